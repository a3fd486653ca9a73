"""Draw tables: pure functions from a DataFrame to a plotly Figure, without side effects."""

import math
from collections.abc import Mapping

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import STYLE, dress, error_bars, looks, name_panels, series, template

MANY = 8
"""With more K than this, a line is drawn without markers and error bars, which would overlap."""
PANELS = 4
"""Largest number of panels in a row."""
ROW_HEIGHT = 320
"""Height of a row of panels in a figure with several, in pixels."""
DODGE = 0.2  # distance between the error bars of two categories, in tokens on the K axis


def speedup_over_k(
    sweep: pd.DataFrame,
    *,
    title: str,
    panel: str,
    line: str = "category",
    marks: Mapping[str, pd.DataFrame] = {},
    fastest: float = 1.0,
) -> go.Figure:
    """Draw the speedup over draft length K: one panel per value of `panel`, one line per `line`.

    `sweep` is `tables.k_sweep` or `tables.replayed`; error bars are its intervals, omitted for more
    than MANY values of K. `marks` are up to two more such tables by name, drawn as filled circles
    with intervals and as open circles. K = 0, plain decoding in the same engine, is the line at 1;
    `fastest`, the speedup of the fastest plain decoding in any engine, is drawn if above 1. The
    title ends with the highest speedup of `sweep`.
    """
    ks = sorted({*sweep["k"]} - {0})
    few = len(ks) <= MANY
    drawn = _drafting(sweep, line, DODGE if few else 0)
    names = drawn[line]  # the same in every panel
    axes = {
        "x": "at",
        "y": "speedup",
        "facet_col": panel,
        "facet_col_wrap": PANELS,
        "hover_data": {"at": False, "k": True},
    }
    figure = px.line(drawn, **axes, **looks(line, names), **(error_bars(drawn) if few else {}))
    figure.update_traces(mode="lines+markers" if few else "lines")
    for (name, table), shape in zip(marks.items(), ("", "-open"), strict=False):
        rows = _drafting(table, line, DODGE)
        look = looks(line, names, by=()) | ({} if shape else error_bars(rows))
        look["category_orders"][panel] = [*drawn[panel].unique()]
        for mark in px.scatter(rows, **axes, **look).data:
            figure.add_trace(mark.update(marker_symbol=f"circle{shape}", showlegend=False))
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=name,
            marker_color="#888",
            marker_symbol=f"circle{shape}",
        )
    name_panels(figure, 28)  # of four panels in a row
    if fastest > 1:
        look = STYLE["fastest"]
        figure.add_hline(fastest, line=look)
        # the point extends the axes above the line
        figure.add_scatter(
            x=ks[:1], y=[fastest], mode="lines", name="fastest plain decoding", line=look
        )
    figure.update_xaxes(tickvals=ks if few else ks[3::4])
    figure.update_yaxes(title_text="speedup, log scale", col=1)
    if "lossless" in drawn and not drawn["lossless"].all():
        title += " (lossy: not the target's distribution)"
    best = drawn.nlargest(1, "speedup").iloc[0]
    title += (
        f"{_busy_note(sweep)}<br>highest: {best[panel]}, {best[line]}, K = {best['k']}: "
        f"{best['speedup']:.2f}"
    )
    figure = dress(figure, "speedup_over_k", title_text=title)
    rows = math.ceil(sweep[panel].nunique() / PANELS)
    if rows > 1:
        for row in range(2, rows + 1):  # plotly counts rows from the bottom
            figure.update_xaxes(title_text="", row=row)
        figure.update_layout(height=ROW_HEIGHT * rows, legend_y=-0.28 / rows)
    return figure


def draw_turns(table: pd.DataFrame, title: str) -> go.Figure:
    """Draw the acceptance rate by turn of a conversation (`tables.turns`), with its interval."""
    figure = px.line(
        table,
        x="turn",
        y="acceptance_rate",
        hover_data="conversations",
        markers=True,
        template=template(),
        **error_bars(table, "acceptance_rate"),
    )
    return dress(figure, "turns", title_text=title)


def _drafting(table: pd.DataFrame, line: str, dodge: float) -> pd.DataFrame:
    """Return the rows with K > 0 by temperature and K; `at` is their position on the K axis."""
    rows = table.query("k > 0").sort_values(["temperature", "k"], kind="stable")
    place, names = pd.factorize(rows[line])
    return rows.assign(at=rows["k"] + dodge * (place - (len(names) - 1) / 2))


def draw_verify_cost(curve: pd.DataFrame, *, title: str) -> go.Figure:
    """Draw T(n)/T(1) over n, with both extremes: free extra tokens, and n single steps.

    The labels are T(n) in ms. Of many widths, those next to the steps of four tokens are labeled.
    """
    widths = curve["width"]
    ends = [widths.min(), widths.max()]
    labeled = (widths % 4 < 2) | (len(widths) <= MANY)
    times = (1000 * curve["median_s"]).map("{:.0f}".format).where(labeled, "")
    figure = px.line(curve, x="width", y="ratio", text=times, markers=True, template=template())
    figure.update_traces(textposition="top center", name="measured", showlegend=True)
    for index, (name, ys) in enumerate(
        {"extra tokens free": [1, 1], "n single steps": ends}.items(), start=2
    ):
        figure.add_scatter(x=ends, y=ys, mode="lines", name=name, **series(index))
    figure.update_xaxes(tickvals=widths[labeled])
    figure.update_yaxes(range=[0, 1.2 * curve["ratio"].max()])
    return dress(figure, "verify_cost", title_text=title + _busy_note(curve))


def _busy_note(frame: pd.DataFrame) -> str:
    return " (the machine was busy)" if frame["busy"].eq(True).any() else ""

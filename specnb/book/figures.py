"""Draw tables: pure functions from a DataFrame to a plotly Figure, without side effects."""

import math
from collections.abc import Mapping

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import STYLE, dress, error_bars, looks, name_panels, series, template

MANY = 8
"""With more K than this, a line is drawn without markers and error bars, which would overlap."""
TICKS = [0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10]
FINE_TICKS = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.7, 2]
"""Speedups on the axis, and those on an axis that spans less than a factor of three."""
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
    n_panels = drawn[panel].nunique()
    columns = 3 if n_panels in (5, 6, 9) else min(n_panels, 4)
    axes = {
        "x": "at",
        "y": "speedup",
        "facet_col": panel,
        "facet_col_wrap": columns,
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
    name_panels(figure, 28 if columns == 4 else 40)
    if fastest > 1:
        look = STYLE["fastest"]
        figure.add_hline(fastest, line=look)
        # the point extends the axes above the line
        figure.add_scatter(
            x=ks[:1], y=[fastest], mode="lines", name="fastest plain decoding", line=look
        )
    figure.update_xaxes(tickvals=ks if few else ks[3::4])
    span = drawn["speedup"].max() / drawn["speedup"].min()
    figure.update_yaxes(tickvals=FINE_TICKS if span < 3 else TICKS)
    figure.update_yaxes(title_text="speedup, log scale", col=1)
    if "lossless" in drawn and not drawn["lossless"].all():
        title += " (lossy: not the target's distribution)"
    best = drawn.nlargest(1, "speedup").iloc[0]
    title += (
        f"{_busy_note(sweep)}<br>highest: {best[panel]}, {best[line]}, K = {best['k']}: "
        f"{best['speedup']:.2f}"
    )
    figure = dress(figure, "speedup_over_k", title_text=title)
    rows = math.ceil(n_panels / columns)
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

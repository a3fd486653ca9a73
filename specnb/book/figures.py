"""Tables to figures: pure functions from a DataFrame to a plotly Figure. Nothing is shown or written here."""

from collections.abc import Mapping

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import arms, dress, looks, series, template

MANY = 8
"""More K's than this are drawn as a line without bars and marks, which would cover each other."""
ASIDE = 0.2  # from one category's bar to the next one's, in tokens of the axis of K


def speedup_over_k(
    sweep: pd.DataFrame, *, title: str, panel: str = "temperature", marks: Mapping[str, pd.DataFrame] = {}
) -> go.Figure:
    """Speed-up over draft length K, a panel for each value of the column `panel`, one line a category; 1 is plain.

    `sweep` is `tables.k_sweep` or `tables.replayed`; bars are its intervals, left out for more than MANY K's. `marks`
    are up to two such tables by name, drawn over it: full marks with their intervals, then open ones. K = 0, the
    baseline, is the line at 1 and not drawn.
    """
    ks = sorted({*sweep["k"]} - {0})
    drawn = _drafting(sweep, ASIDE if (few := len(ks) <= MANY) else 0)
    names = drawn["category"]  # the same in every panel
    axes = {
        "x": "at", "y": "speedup", "facet_col": panel,
        "hover_data": {"at": False, "k": True, "tokens_per_s": True, "accepted": True, "drafted": True},
    }  # fmt: skip
    figure = px.line(drawn, **axes, **looks("category", names), **(arms(drawn) if few else {}))
    figure.update_traces(mode="lines+markers" if few else "lines")
    for (name, table), shape in zip(marks.items(), ("", "-open"), strict=False):
        rows = _drafting(table, ASIDE)
        look = looks("category", names, by=["symbol"]) | ({} if shape else arms(rows))
        for mark in px.scatter(rows, **axes, **look).data:
            figure.add_trace(mark.update(marker_symbol=mark.marker.symbol + shape, showlegend=False))
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=f"{name}: {rows['n_prompts'].max()} prompts",
            marker_color="#888", marker_symbol=f"circle{shape}",
        )  # fmt: skip
    for note in figure.layout.annotations:
        note.text = note.text.removeprefix("drafter=").replace("temperature=0.0", "greedy").replace("=", " ")
    figure.update_xaxes(tickvals=ks if few else ks[3::4])
    figure.update_yaxes(title_text="decoding speed-up (plain = 1)", col=1)
    lossy = " (lossy: not the target's distribution)" * ("lossless" in drawn and not drawn["lossless"].all())
    return dress(figure, "speedup_over_k", title_text=title + lossy + _marked(sweep))


def draw_turns(table: pd.DataFrame) -> go.Figure:
    """Acceptance by turn of a conversation (`tables.turns`), with its interval over conversations."""
    figure = px.line(
        table, x="turn", y="acceptance_rate", hover_data="conversations", markers=True, template=template(),
        **arms(table, "acceptance_rate"),
    )  # fmt: skip
    return dress(figure, "turns")


def _drafting(table: pd.DataFrame, aside: float) -> pd.DataFrame:
    """The rows with drafts, by temperature and K, `at` their place on the axis."""
    rows = table.query("k > 0").sort_values(["temperature", "k"], kind="stable")
    place, names = pd.factorize(rows["category"])
    return rows.assign(at=rows["k"] + aside * (place - (len(names) - 1) / 2))


def draw_verify_cost(curve: pd.DataFrame, *, title: str) -> go.Figure:
    """T(n)/T(1) over the width n of a target forward, beside the two extremes: free width, and n single steps."""
    rows = curve.assign(time=(1000 * curve["median_s"]).map("{:.1f} ms".format))
    figure = px.line(rows, x="width", y="ratio", text="time", markers=True, template=template())
    figure.update_traces(textposition="top center", name="measured", showlegend=True)
    widths = curve["width"]
    ends = [widths.min(), widths.max()]
    for index, (name, ys) in enumerate({"free width": [1, 1], "n single steps": ends}.items(), start=2):
        figure.add_scatter(x=ends, y=ys, mode="lines", name=name, **series(index))
    figure.update_xaxes(tickvals=widths)
    return dress(figure, "verify_cost", title_text=title + _marked(curve))


def _marked(frame: pd.DataFrame) -> str:
    return " (the machine was busy)" if frame["busy"].eq(True).any() else ""

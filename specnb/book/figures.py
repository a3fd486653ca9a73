"""Tables to figures: pure functions from a DataFrame to a plotly Figure. Nothing is shown or written here."""

from collections.abc import Mapping

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import COLOURS, dress, looks, series, spread, template

MANY = 8
"""More K's than this are drawn as a line without bars and marks, which would cover each other."""
ASIDE = 0.2  # from one category's bar to the next one's, in tokens of the axis of K


def speedup_over_k(
    sweep: pd.DataFrame, *, title: str, panel: str = "temperature", marks: Mapping[str, pd.DataFrame] | None = None
) -> go.Figure:
    """Speed-up over draft length K, a panel for each value of the column `panel`, one line a category; 1 is plain.

    `sweep` is `tables.k_sweep` or `tables.replayed`; bars are its intervals, left out for more than MANY K's. `marks`
    are up to two such tables by name, drawn over it: full marks with their intervals, then open ones. K = 0, the
    baseline, is the line at 1 and not drawn.
    """
    ks = sorted(sweep.loc[sweep["k"] > 0, "k"].unique())
    drawn = _drafting(sweep, ASIDE if (few := len(ks) <= MANY) else 0)
    names = drawn["category"].unique()  # the same in every panel
    bars = {"error_y": "above", "error_y_minus": "below"}
    hover = {"at": False} | dict.fromkeys(["k", "tokens_per_s", "accepted", "drafted"], True)
    axes = {"x": "at", "y": "speedup", "facet_col": panel, "hover_data": hover}
    figure = px.line(drawn, **axes, **looks("category", names), **(bars if few else {}))
    figure.update_traces(mode="lines+markers" if few else "lines")
    for (name, table), shape in zip((marks or {}).items(), ("", "-open"), strict=False):
        look = looks("category", names, by=["symbol"]) | ({} if shape else bars)
        for mark in px.scatter(_drafting(table, ASIDE), **axes, **look).data:
            look = {"marker_symbol": mark.marker.symbol + shape, "showlegend": False}
            figure.add_trace(mark.update(name=f"{mark.name}, {name}", **look))
        n, look = table.query("k > 0")["n_prompts"].max(), {"color": "#888", "symbol": f"circle{shape}"}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=f"{name}: {n} prompts", marker=look)
    for note in figure.layout.annotations:
        note.text = note.text.removeprefix("drafter=").replace("temperature=0.0", "greedy").replace("=", " ")
    figure.update_traces(error_y_thickness=1).update_xaxes(tickvals=ks if few else ks[3::4])
    figure.update_yaxes(title_text="decoding speed-up (plain = 1)", col=1)
    lossy = "" if drawn.get("lossless", pd.Series([True])).all() else " (lossy: not the target's distribution)"
    return dress(figure, "speedup_over_k", title_text=title + lossy + _marked(sweep))


def draw_turns(table: pd.DataFrame) -> go.Figure:
    """Acceptance by turn of a conversation (`tables.turns`), with its interval over conversations."""
    figure = px.line(
        table, x="turn", y="acceptance_rate", hover_data="conversations", markers=True, template=template()
    ).update_traces(error_y=spread(table, "acceptance_rate"))
    return dress(figure, "turns")


def _drafting(table: pd.DataFrame, aside: float) -> pd.DataFrame:
    """The rows with drafts, by temperature and K, `at` their place on the axis, and the two arms of their intervals."""
    rows = table[table["k"] > 0].sort_values(["temperature", "k"], kind="stable")
    place, names = pd.factorize(rows["category"])
    at = rows["k"] + aside * (place - (len(names) - 1) / 2)
    return rows.assign(at=at, above=rows["high"] - rows["speedup"], below=rows["speedup"] - rows["low"])


def draw_verify_cost(curve: pd.DataFrame, *, title: str) -> go.Figure:
    """T(n)/T(1) over the width n of a target forward, beside the two extremes: free width, and n single steps."""
    rows = curve.assign(time=(1000 * curve["median_s"]).map("{:.1f} ms".format))
    figure = px.line(rows, x="width", y="ratio", text="time", markers=True, template=template())
    figure.update_traces(textposition="top center", name="measured", showlegend=True, line_color=COLOURS[0])
    widths = curve["width"]
    ends = [widths.min(), widths.max()]
    for index, (name, ys) in enumerate({"free width": [1, 1], "n single steps": ends}.items(), start=2):
        figure.add_scatter(x=ends, y=ys, mode="lines", name=name, line=series(index)["line"])
    figure.update_xaxes(tickvals=widths)
    return dress(figure, "verify_cost", title_text=title + _marked(curve))


def _marked(frame: pd.DataFrame) -> str:
    return " (the machine was busy)" if "busy" in frame and frame["busy"].eq(True).any() else ""

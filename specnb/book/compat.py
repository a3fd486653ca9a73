"""Figures of notebook 03: verdicts of all pairs, and overlap against acceptance."""

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import COLOURS, spread, template
from specnb.compat.check import Verdict
from specnb.measure.bench import NORMAL, wilson

LOOKS = {
    Verdict.DROP_IN: ("D", COLOURS[2]),
    Verdict.SLICING: ("S", COLOURS[5]),
    Verdict.TRANSLATION: ("T", COLOURS[4]),
    Verdict.IMPOSSIBLE: ("X", "#b0b0b0"),
    Verdict.UNKNOWN: ("?", "#ffffff"),
}
"""Letter and colour of each verdict."""


def verdicts(matrix: pd.DataFrame) -> go.Figure:
    """Every pair of `check.matrix`, coloured and lettered by its verdict.

    A mark beside the letter tells where llama.cpp's or transformers' check says otherwise.
    """
    names, order = list(dict.fromkeys(matrix["target"])), list(LOOKS)
    shown = matrix.assign(
        code=[order.index(verdict) + 0.5 for verdict in matrix["verdict"]],
        letters=[LOOKS[Verdict(row.verdict)][0] + _others(row) for row in matrix.itertuples()],
    )
    wide = shown.pivot(index="target", columns="draft", values=["code", "letters"]).reindex(names)
    steps = [(at / len(order), colour) for i, (_, colour) in enumerate(LOOKS.values()) for at in (i, i + 1)]
    figure = go.Figure(
        go.Heatmap(
            x=names, y=names, z=wide["code"].reindex(columns=names).to_numpy().tolist(),
            zmin=0, zmax=len(order), colorscale=steps, showscale=False, xgap=2, ygap=2, texttemplate="%{text}",
            text=wide["letters"].reindex(columns=names).fillna("").to_numpy().tolist(),
            hovertemplate="%{x} for %{y}: %{text}<extra></extra>",
        )
    )  # fmt: skip
    for verdict, (letter, colour) in LOOKS.items():
        if verdict in set(matrix["verdict"]):
            mark = {"color": colour, "symbol": "square", "size": 12, "line": {"color": "#444", "width": 1}}
            figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=mark, name=f"{letter}: {verdict}"))
    figure.update_xaxes(title_text="draft", tickangle=45, showgrid=False)
    figure.update_yaxes(title_text="target", autorange="reversed", showgrid=False)
    side = 180 + 38 * len(names)
    figure.update_layout(title_text="Which draft fits which target", width=side + 120, height=side + 60)
    return figure.update_layout(template=template(), margin_l=190, margin_b=190, legend={"y": 1.0, "yanchor": "bottom"})


def _others(cell: tuple) -> str:
    """l where llama.cpp's check, t where transformers' is wrong about the ids being usable as they are."""
    fits = cell.verdict in (Verdict.DROP_IN, Verdict.SLICING)
    wrong = {"l": cell.llama_cpp, "t": cell.transformers}
    return "".join(f" {letter}" for letter, accepts in wrong.items() if accepts is not None and accepts != fits)


def overlap_against_acceptance(trial: pd.DataFrame) -> go.Figure:
    """Acceptance rate over the share of an ordinary text's tokens that the draft's vocabulary has, with its interval.

    Open circles are what the run of the same draft in its own vocabulary predicts.
    """
    drawn = trial.dropna(subset=["text_shared", "acceptance_rate"])
    ends = [wilson(row.acceptance_rate, row.drafted, NORMAL) for row in drawn.itertuples()]
    ends = pd.DataFrame(ends, drawn.index, ["low", "high"])
    figure = px.scatter(
        drawn, x="text_shared", y="acceptance_rate", hover_data=["translated", "accepted", "drafted"],
        text="vocabulary", template=template(), title="The same draft model behind other vocabularies",
    ).update_traces(
        error_y=spread(drawn["acceptance_rate"], ends["low"], ends["high"]), marker_size=11, showlegend=True,
        name="measured, with the interval of its counts", textposition="middle right",
    )  # fmt: skip
    figure.add_scatter(
        x=drawn["text_shared"], y=drawn["predicted_rate"], mode="markers", text=drawn["vocabulary"],
        marker={"symbol": "circle-open", "size": 17, "color": "#444"}, name="predicted from the draft as it is",
        hovertemplate="%{text}<br>predicted %{y:.2f}<extra></extra>",
    )  # fmt: skip
    title_x = "share of an ordinary text's tokens that both have"
    figure.update_xaxes(title_text=title_x, range=[float(drawn["text_shared"].min()) - 0.01, 1.0099], tickformat=".0%")
    return figure.update_yaxes(title_text="acceptance rate (accepted / drafted)", rangemode="tozero")

"""Figures of notebook 03: verdicts of all pairs, and overlap against acceptance."""

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import STYLE, dress, error_bars, template
from specnb.compat.check import Verdict
from specnb.measure.bench import NORMAL, wilson

LOOKS = STYLE["verdicts"]
"""Letter and colour of each verdict."""


def verdicts(matrix: pd.DataFrame) -> go.Figure:
    """Draw `check.matrix`: every pair in the color and with the letter of its verdict.

    An additional l or t marks pairs about which llama.cpp's or transformers' own check is wrong.
    """
    names = matrix["target"].unique()
    order = list(LOOKS)
    letters = matrix["verdict"].map(lambda verdict: LOOKS[verdict][0])
    fits = matrix["verdict"].isin([Verdict.DROP_IN, Verdict.SLICING])
    for mark, engine in {" l": "llama_cpp", " t": "transformers"}.items():
        letters += np.where(matrix[engine].notna() & (matrix[engine] != fits), mark, "")
    steps = [(at / len(order), colour) for i, (_, colour) in enumerate(LOOKS.values()) for at in (i, i + 1)]
    figure = go.Figure(
        go.Heatmap(
            x=matrix["draft"],
            y=matrix["target"],
            z=matrix["verdict"].map(order.index) + 0.5,
            zmin=0,
            zmax=len(order),
            colorscale=steps,
            showscale=False,
            xgap=2,
            ygap=2,
            text=letters,
            texttemplate="%{text}",
        )
    )
    for verdict in filter(set(matrix["verdict"]).__contains__, order):
        letter, colour = LOOKS[verdict]
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=f"{letter}: {verdict}",
            marker_color=colour,
            marker_size=12,
            marker_symbol="square",
            marker_line_color="#444",
            marker_line_width=1,
        )
    side = 180 + 38 * len(names)
    return dress(figure, "verdicts", width=side + 120, height=side + 60, xaxis_categoryarray=names)


def overlap_against_acceptance(trial: pd.DataFrame) -> go.Figure:
    """Draw the acceptance rate over the share of an ordinary text's tokens that both vocabularies have.

    Open circles are predictions from the run of the same draft model in its own vocabulary.
    """
    drawn = trial.dropna(subset=["text_shared", "acceptance_rate"])
    drawn[["low", "high"]] = [wilson(row.acceptance_rate, row.drafted, NORMAL) for row in drawn.itertuples()]
    figure = px.scatter(
        drawn,
        x="text_shared",
        y="acceptance_rate",
        hover_data=["translated", "accepted", "drafted"],
        text="vocabulary",
        template=template(),
        **error_bars(drawn, "acceptance_rate"),
    ).update_traces(
        name="measured, with the interval of its counts", marker_size=11, showlegend=True, textposition="middle right"
    )
    figure.add_scatter(
        x=drawn["text_shared"],
        y=drawn["predicted_rate"],
        mode="markers",
        text=drawn["vocabulary"],
        marker_symbol="circle-open",
        marker_size=17,
        marker_color="#444",
        name="predicted from the draft as it is",
    )
    figure.update_xaxes(range=[drawn["text_shared"].min() - 0.01, 1.0099])
    return dress(figure, "overlap_against_acceptance")

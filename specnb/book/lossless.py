"""Tables and the figure of notebook 08, from its record."""

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import MARKERS, template
from specnb.records import RunRecord

SUMS = {"z_acc": "drafts kept", "z_draft": "chance of drafts", "z_surp": "chance of committed tokens",
        "z_dir": "lean to draft or target", "z_order": "order of ids"}  # fmt: skip
"""Columns of the five sums, and what each looks at."""
CHANCE = 4.0
"""Standard deviations that a sum of a sound run does not reach."""


def greedy(record: RunRecord) -> pd.DataFrame:
    """A row a prompt: equal to plain decoding, or where it parts and whether the two tokens were nearly tied."""
    return pd.DataFrame(record.measurements["greedy"])


def panel(record: RunRecord) -> pd.DataFrame:
    """The five sums of the audited pair: `z` in standard deviations, `detectable` as a share of probability."""
    return pd.DataFrame(record.measurements["audit"]["panel"])[["name", "n", "z", "p_value", "far", "detectable"]]


def planted(record: RunRecord) -> pd.DataFrame:
    """The audit on a toy pair: a row a planted fault, with its verdict, its causes and the five sums."""
    return pd.DataFrame(record.measurements["planted"])


def planted_figure(record: RunRecord) -> go.Figure:
    """The five sums of each planted fault: between the lines is chance."""
    rows = planted(record).melt("planted", list(SUMS), var_name="sum", value_name="z")
    look = {"color": "sum", "symbol": "sum", "symbol_sequence": MARKERS, "template": template()}
    figure = px.scatter(rows, x="z", y="planted", orientation="h", **look).update_traces(marker_size=10)
    figure.for_each_trace(lambda mark: mark.update(offsetgroup=mark.name, name=f"{mark.name}: {SUMS[mark.name]}"))
    for limit in (-CHANCE, CHANCE):
        figure.add_vline(x=limit, line={"color": "#222", "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="z: standard deviations from what the rows promise (dotted: the limits of chance)")
    figure.update_yaxes(autorange="reversed", automargin=True, title_text="")
    title = "Planted faults of sampling: which sum sees which"
    return figure.update_layout(title_text=title, legend_title_text="", scattermode="group", scattergap=0.4)

"""Tables and the figure of notebook 08, from its record."""

import pandas as pd
import plotly.graph_objects as go

from specnb.book.style import dots, dress
from specnb.records import RunRecord

SUMS = {"z_acc": "drafts kept", "z_draft": "chance of drafts", "z_surp": "chance of committed tokens",
        "z_dir": "lean to draft or target", "z_order": "order of ids"}  # fmt: skip
"""Columns of the five sums, and what each looks at."""


def greedy(record: RunRecord) -> pd.DataFrame:
    """A row a prompt: equal to plain decoding, or where it parts and whether the two tokens were nearly tied."""
    return pd.DataFrame(record.measurements["greedy"])


def panel(record: RunRecord) -> pd.DataFrame:
    """The five sums of the audited pair: `z` in standard deviations, `detectable` as a share of probability."""
    return pd.DataFrame(record.measurements["audit"]["panel"])[["name", "n", "z", "p_value", "far", "detectable"]]


def foreign(record: RunRecord) -> pd.DataFrame:
    """A row a source of texts: tokens that are not the likeliest, those new with drafts, largest margin, verdict."""
    columns = ["source", "texts", "tokens", "forks", "new", "margin", "first", "verdict"]
    return pd.DataFrame(record.measurements["foreign"]["sources"], columns=columns).astype({"new": "Int64"})


def note(record: RunRecord) -> pd.DataFrame:
    """The note's case, made again on the pair: what was done, the text, and what is seen of it."""
    return pd.DataFrame(record.measurements.get("note", []), columns=["done", "text", "seen"])


def planted(record: RunRecord) -> pd.DataFrame:
    """The audit on a toy pair: a row a planted fault, with its verdict, its causes and the five sums."""
    return pd.DataFrame(record.measurements["planted"])


def planted_figure(record: RunRecord) -> go.Figure:
    """The five sums of each planted fault: between the lines is chance."""
    sums = {name: f"{name}: {says}" for name, says in SUMS.items()}
    rows = planted(record).rename(columns=sums).melt("planted", [*sums.values()], var_name="sum", value_name="z")
    return dress(dots(rows, x="z", y="planted", by="sum"), "planted")

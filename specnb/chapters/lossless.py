"""Tables and the figure of notebook 08, from its record."""

import pandas as pd
import plotly.graph_objects as go

from specnb.book.style import dots, dress
from specnb.records import RunRecord

SUMS = {"z_acc": "draft tokens accepted", "z_surp": "surprise of committed tokens"}
"""Columns of the two sums, and what each measures."""


def greedy(record: RunRecord) -> pd.DataFrame:
    """One row per prompt: identical to plain decoding, or where it diverges."""
    return pd.DataFrame(record.measurements["greedy"])


def panel(record: RunRecord) -> pd.DataFrame:
    """The two sums of the audited pair; `z` as `divergence.sampling` defines it."""
    return pd.DataFrame(record.measurements["audit"]["panel"])[["name", "z", "p_value", "far"]]


def foreign(record: RunRecord) -> pd.DataFrame:
    """One row per source of texts: forks, new forks with drafts, largest margin, verdict."""
    columns = ["source", "texts", "tokens", "forks", "new", "margin", "first", "verdict"]
    return pd.DataFrame(record.measurements["foreign"]["sources"], columns=columns).astype({"new": "Int64"})


def note(record: RunRecord) -> pd.DataFrame:
    """The note's case, reproduced on the pair: what was done, the text, what it shows."""
    return pd.DataFrame(record.measurements.get("note", []), columns=["done", "text", "seen"])


def planted(record: RunRecord) -> pd.DataFrame:
    """The audit on a toy pair: one row per planted fault, with verdict, causes and the two sums."""
    return pd.DataFrame(record.measurements["planted"])


def planted_figure(record: RunRecord) -> go.Figure:
    """The two sums of each planted fault; between the lines is chance."""
    sums = {name: f"{name}: {says}" for name, says in SUMS.items()}
    rows = planted(record).rename(columns=sums).melt("planted", [*sums.values()], var_name="sum", value_name="z")
    return dress(dots(rows, x="z", y="planted", by="sum"), "planted")

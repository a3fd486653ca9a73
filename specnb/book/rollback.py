"""Tables and figures of notebook 04: rollback strategies, what they keep, and trees."""

import re

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import dress, error_bars, looks
from specnb.records import RunRecord
from specnb.ssm.strategies import FREE, PLAIN, STRATEGIES

CELL = ["target", "engine", "k", "acceptance"]
"""Columns that one measurement of all strategies shares."""

MIB = 2**20


def strategies(record: RunRecord) -> pd.DataFrame:
    """Return the rows of `run_strategies`; `kept_mib` is the peak memory in a round for rollback, in MiB."""
    frame = pd.DataFrame(record.measurements["ways"])
    return frame.assign(kept_mib=frame.pop("kept_bytes") / MIB)


def drafters(record: RunRecord) -> pd.DataFrame:
    """Return one row per K for lookup and the draft model, with the first target."""
    return pd.DataFrame(record.measurements["drafters"])


def fused(table: pd.DataFrame) -> pd.DataFrame:
    """Return the speed of fused replay relative to separate replay and to a free rewind, by K and acceptance.

    Each speed is relative to plain decoding of the same model with the same drafts. The free rewind is
    that of an attention-only model of the same size.
    """
    wide = table.pivot(index=CELL, columns="method", values="speedup")
    others = {"checkpoint": "over checkpoint", FREE: "over a free rewind"}
    ratios = wide.filter(others).rdiv(wide["fused"], axis=0).rename(columns=others)
    return ratios.rename_axis(columns=None).reset_index()


def fastest_strategies(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest strategy by K and acceptance, with its speed-up, tau and memory."""
    measured = table.query("method in @STRATEGIES")
    best = measured.loc[measured.groupby(CELL)["speedup"].idxmax(), [*CELL, "method", "speedup", "tau", "kept_mib"]]
    return best.rename(columns={"method": "fastest"}).reset_index(drop=True)


def mebibytes(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert columns `*_bytes` to `*_mib` (MiB, three digits)."""
    return _scaled(frame, "_bytes", "_mib", 1 / MIB)


def milliseconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert columns `*_s` to `*_ms` (milliseconds, three digits), and round the ratio."""
    return _scaled(frame, "_s", "_ms", 1e3).round({"ratio": 3})


def _scaled(frame: pd.DataFrame, suffix: str, unit: str, factor: float) -> pd.DataFrame:
    scaled = (frame.filter(regex=f"{suffix}$") * factor).round(3)
    return frame.assign(**scaled).rename(columns=lambda name: re.sub(f"{suffix}$", unit, name))


def draw_strategies(table: pd.DataFrame, target: str) -> go.Figure:
    """Draw the speed over plain decoding: a mark per strategy, a panel per K and acceptance."""
    rows = table[(table["target"] == target) & (table["method"] != PLAIN)].sort_values(["k", "acceptance"])
    panel = "K = " + rows["k"].astype(str) + ", " + rows["acceptance"].map("{:.0%} of drafts correct".format)
    columns = rows["acceptance"].nunique()
    lines = rows["k"].nunique()
    look = looks("method", (*STRATEGIES, FREE), by=["symbol"])  # the same in every figure
    look["category_orders"]["method"] = [name for name in (*STRATEGIES, FREE) if name in set(rows["method"])]
    figure = px.scatter(
        rows.assign(panel=panel),
        x="speedup",
        y="method",
        facet_col="panel",
        facet_col_wrap=columns,
        facet_col_spacing=0.03,
        facet_row_spacing=0.32 / lines,
        height=120 + 220 * lines,
        **look,
        **error_bars(rows, axis="x"),
    )
    figure.for_each_annotation(lambda note: note.update(text=note.text.removeprefix("panel=")))
    figure.update_traces(marker_size=10).update_xaxes(title_text="speed (plain decoding = 1)", row=1)
    title = f"Cost of rollback: {rows['engine'].iloc[0]}, {rows['n_prompts'].max()} passages"
    return dress(figure, "ways_back", title_text=title)


def draw_tree_times(table: pd.DataFrame) -> go.Figure:
    """Draw the time of the serial rule along every path relative to one masked solve, by tree size."""
    figure = (
        px.line(
            milliseconds(table),
            x="nodes",
            y="ratio",
            text=table["tree"].mask(table["tree"].duplicated("last"), ""),
            hover_data=["solve_ms", "paths_ms"],
            markers=True,
            **looks("tree", table["tree"]),
        )
        .update_traces(textposition="top left")
        .update_xaxes(tickvals=table["nodes"].unique())
    )
    return dress(figure, "trees")

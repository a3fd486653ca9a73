"""Tables and figures of notebook 04: rollback strategies, what they keep, and trees."""

import re

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import arms, dress, looks
from specnb.records import RunRecord
from specnb.ssm.strategies import FREE, PLAIN, STRATEGIES

CELL = ["target", "engine", "k", "acceptance"]
"""What one measurement of all strategies has in common."""

MIB = 2**20


def strategies(record: RunRecord) -> pd.DataFrame:
    """The rows of `run_strategies`; `kept_mib` are the MiB kept for going back at the widest moment of a round."""
    frame = pd.DataFrame(record.measurements["ways"])
    return frame.assign(kept_mib=frame.pop("kept_bytes") / MIB)


def drafters(record: RunRecord) -> pd.DataFrame:
    """Lookup and the draft model with the first target, a row for each K."""
    return pd.DataFrame(record.measurements["drafters"])


def fused(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each K and acceptance: the speed of fused replay over that of separate replay, and over a free rewind.

    Both are ratios of ratios to plain decoding of the same model on the same drafts: the free rewind is that of an
    attention-only model of the same size.
    """
    wide = table.pivot(index=CELL, columns="method", values="speedup")
    others = {"checkpoint": "over checkpoint", FREE: "over a free rewind"}
    ratios = wide.filter(others).rdiv(wide["fused"], axis=0).rename(columns=others)
    return ratios.rename_axis(columns=None).reset_index()


def fastest_strategies(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest strategy at each K and acceptance, its ratio to plain decoding, and what it keeps."""
    measured = table.query("method in @STRATEGIES")
    best = measured.loc[measured.groupby(CELL)["speedup"].idxmax(), [*CELL, "method", "speedup", "tau", "kept_mib"]]
    return best.rename(columns={"method": "fastest"}).reset_index(drop=True)


def mebibytes(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_bytes` in MiB, under names that say so, rounded to a thousandth."""
    return _scaled(frame, "_bytes", "_mib", 1 / MIB)


def milliseconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_s` in milliseconds, under names that say so; three digits of them and of the ratio."""
    return _scaled(frame, "_s", "_ms", 1e3).round({"ratio": 3})


def _scaled(frame: pd.DataFrame, suffix: str, unit: str, factor: float) -> pd.DataFrame:
    scaled = (frame.filter(regex=f"{suffix}$") * factor).round(3)
    return frame.assign(**scaled).rename(columns=lambda name: re.sub(f"{suffix}$", unit, name))


def draw_strategies(table: pd.DataFrame, target: str) -> go.Figure:
    """Speed over plain decoding, a mark with its interval for each strategy, a panel for each K and acceptance."""
    rows = table[(table["target"] == target) & (table["method"] != PLAIN)].sort_values(["k", "acceptance"])
    panel = "K = " + rows["k"].astype(str) + ", " + rows["acceptance"].map("{:.0%} of drafts right".format)
    columns, lines = rows["acceptance"].nunique(), rows["k"].nunique()
    look = looks("method", (*STRATEGIES, FREE), by=["symbol"])  # the same in every figure
    look["category_orders"]["method"] = [name for name in (*STRATEGIES, FREE) if name in set(rows["method"])]
    figure = px.scatter(
        rows.assign(panel=panel), x="speedup", y="method", facet_col="panel", facet_col_wrap=columns,
        facet_col_spacing=0.03, facet_row_spacing=0.32 / lines, height=120 + 220 * lines,
        **look, **arms(rows, axis="x"),
    )  # fmt: skip
    figure.for_each_annotation(lambda note: note.update(text=note.text.removeprefix("panel=")))
    figure.update_traces(marker_size=10).update_xaxes(title_text="speed (plain decoding = 1)", row=1)
    title = f"What going back costs: {rows['engine'].iloc[0]}, {rows['n_prompts'].max()} passages"
    return dress(figure, "ways_back", title_text=title)


def draw_tree_times(table: pd.DataFrame) -> go.Figure:
    """Draw the time of the serial rule along every path over that of one masked solve; each tree at its line."""
    figure = px.line(
        milliseconds(table), x="nodes", y="ratio", text=table["tree"].mask(table["tree"].duplicated("last"), ""),
        hover_data=["solve_ms", "paths_ms"], markers=True, **looks("tree", table["tree"]),
    ).update_traces(textposition="top left").update_xaxes(tickvals=table["nodes"].unique())  # fmt: skip
    return dress(figure, "trees")

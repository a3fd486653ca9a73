"""Tables and figures of notebook 04: rollback strategies, what they keep, and trees."""

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import looks, template
from specnb.records import RunRecord
from specnb.ssm.strategies import FREE, PLAIN, STRATEGIES

CELL = ["target", "engine", "k", "acceptance"]
"""What one measurement of all strategies has in common."""

MIB = 2**20


def strategies(record: RunRecord) -> pd.DataFrame:
    """The rows of `ssm.strategies.run`; `kept_mib` are the MiB kept for going back at the widest moment of a round."""
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
    others = {"over checkpoint": "checkpoint", "over a free rewind": FREE}
    ratios = {name: wide["fused"] / wide[other] for name, other in others.items() if other in wide}
    return pd.DataFrame(ratios).reset_index()


def fastest(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest strategy at each K and acceptance, its ratio to plain decoding, and what it keeps."""
    measured = table[table["method"].isin(STRATEGIES)]
    best = measured.loc[measured.groupby(CELL)["speedup"].idxmax(), [*CELL, "method", "speedup", "tau", "kept_mib"]]
    return best.rename(columns={"method": "fastest"}).reset_index(drop=True)


def mebibytes(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_bytes` in MiB, under names that say so, rounded to a thousandth."""
    return _scaled(frame, "_bytes", "_mib", 1 / MIB)


def milliseconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_s` in milliseconds, under names that say so; three digits of them and of the ratio."""
    return _scaled(frame, "_s", "_ms", 1e3).round({"ratio": 3})


def _scaled(frame: pd.DataFrame, suffix: str, unit: str, factor: float) -> pd.DataFrame:
    names = {name: name.removesuffix(suffix) + unit for name in frame.columns if name.endswith(suffix)}
    return frame.assign(**{name: (frame[name] * factor).round(3) for name in names}).rename(columns=names)


def speed(table: pd.DataFrame, target: str) -> go.Figure:
    """Speed over plain decoding at each K, a line for each strategy and a panel for each acceptance."""
    rows = table[(table["target"] == target) & (table["method"] != PLAIN)].sort_values(["acceptance", "k"])
    rows = rows.assign(
        k=rows["k"].astype(str), above=rows["high"] - rows["speedup"], below=rows["speedup"] - rows["low"]
    )
    figure = px.line(
        rows, x="k", y="speedup", error_y="above", error_y_minus="below", facet_col="acceptance", markers=True,
        template=template(), title=f"What going back costs: {rows['engine'].iloc[0]}",
        **looks("method", (*STRATEGIES, FREE)),
    )  # fmt: skip
    for note, rate in zip(figure.layout.annotations, rows["acceptance"].unique(), strict=False):
        note.text = f"{rate:.0%} of drafts right"
    figure.add_hline(y=1, line={"color": "#888", "dash": "dash", "width": 1})
    figure.update_xaxes(title_text="draft length K", type="category")
    figure.update_yaxes(rangemode="tozero").update_yaxes(title_text="speed over plain decoding", col=1)
    return figure.update_layout(margin={"t": 90}, legend_title_text="")


def trees(table: pd.DataFrame) -> go.Figure:
    """Milliseconds over the number of nodes: one masked solve, and the serial rule along every path."""
    hows = {"solve_s": "one solve", "paths_s": "path by path"}
    rows = table.melt(["tree", "nodes"], list(hows), var_name="how", value_name="ms")
    rows = rows.assign(ms=1e3 * rows["ms"], line=rows["tree"] + ", " + rows["how"].map(hows))
    look = looks("line", rows["line"].unique().tolist())
    title = "Verifying a tree on one layer of Qwen3-Next-80B's shapes"
    figure = px.line(rows, x="nodes", y="ms", markers=True, template=template(), title=title, **look)
    ticks = [digit * 10**power for power in range(-2, 4) for digit in (1, 2, 5)]
    figure.update_xaxes(title_text="nodes (drafted tokens)", type="log", tickvals=sorted(table["nodes"].unique()))
    figure.update_yaxes(title_text="time of one layer (ms)", type="log", tickvals=ticks)
    return figure.update_layout(legend_title_text="")

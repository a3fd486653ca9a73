"""Tables and figures of notebook 04: ways back, what they keep, and trees."""

import pandas as pd
import plotly.graph_objects as go

from specnb.book.style import series, spread, template
from specnb.records import RunRecord
from specnb.ssm.ways import FREE, PLAIN, WAYS

CELL = ["target", "engine", "k", "acceptance"]
"""What one measurement of all ways has in common."""

MIB = 2**20


def ways(record: RunRecord) -> pd.DataFrame:
    """The rows of `ssm.ways.run`; `kept_mib` are the MiB kept for going back at the widest moment of a round."""
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
    """The fastest way back at each K and acceptance, its ratio to plain decoding, and what it keeps."""
    of_strategies = table[table["method"].isin(WAYS)]
    best = of_strategies.loc[of_strategies.groupby(CELL)["speedup"].idxmax()]
    columns = [*CELL, "method", "speedup", "tau", "kept_mib"]
    return best[columns].rename(columns={"method": "fastest"}).reset_index(drop=True)


def mebibytes(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_bytes` in MiB, under names that say so, rounded to a thousandth."""
    named = {name: name.replace("bytes", "mib") for name in frame.columns if "bytes" in name}
    return frame.assign(**{name: (frame[name] / MIB).round(3) for name in named}).rename(columns=named)


def milliseconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Columns `*_s` in milliseconds, under names that say so; three digits of all that is not a count or an error."""
    named = {name: f"{name[:-2]}_ms" for name in frame.columns if name.endswith("_s")}
    scaled = frame.assign(**{name: frame[name] * 1e3 for name in named}).rename(columns=named)
    return scaled.round(dict.fromkeys((*named.values(), "ratio"), 3))


def speed(table: pd.DataFrame, target: str) -> go.Figure:
    """Speed over plain decoding at each K, a line for each way and a panel for each acceptance."""
    rows = table[(table["target"] == target) & (table["method"] != PLAIN)]
    rates = sorted(rows["acceptance"].unique())
    figure = go.Figure()
    ks = [str(k) for k in sorted(rows["k"].unique())]
    present = set(rows["method"])
    for index, way in enumerate((*WAYS, FREE)):  # a way looks the same in every figure
        if way not in present:
            continue
        for panel, rate in enumerate(rates, start=1):
            line = rows[(rows["method"] == way) & (rows["acceptance"] == rate)].sort_values("k")
            figure.add_trace(
                go.Scatter(
                    x=line["k"].astype(str).tolist(), y=line["speedup"].tolist(), mode="lines+markers", name=way,
                    error_y=spread(line["speedup"], line["low"], line["high"]),
                    legendgroup=way, showlegend=panel == 1, xaxis=f"x{panel}", yaxis="y", **series(index),
                    hovertemplate=f"{way}, {rate:.0%} right<br>K = %{{x}}: %{{y:.2f}} times plain<extra></extra>",
                )
            )  # fmt: skip
    width = 1 / len(rates)
    for panel, rate in enumerate(rates, start=1):
        domain = [(panel - 1) * width, panel * width - 0.03]
        axis = {"domain": domain, "title": {"text": "draft length K"}, "type": "category", "categoryarray": ks}
        figure.update_layout({f"xaxis{panel}": axis})
        figure.add_annotation(
            x=domain[0], y=1.06, xref="paper", yref="paper", xanchor="left", showarrow=False,
            text=f"{rate:.0%} of drafts right",
        )  # fmt: skip
    even = {"color": "#888", "dash": "dash", "width": 1}
    figure.add_shape(type="line", x0=0, x1=1, xref="paper", y0=1, y1=1, line=even)
    figure.update_yaxes(title_text="speed over plain decoding", rangemode="tozero")
    engine = rows["engine"].iloc[0]
    return figure.update_layout(template=template(), title_text=f"What going back costs: {engine}", margin={"t": 90})


def trees(table: pd.DataFrame) -> go.Figure:
    """Milliseconds over the number of nodes: one masked solve, and the serial rule along every path."""
    figure = go.Figure()
    index = 0
    for kind, rows in table.groupby("tree", sort=False):
        for how, column in (("one solve", "solve_s"), ("path by path", "paths_s")):
            figure.add_trace(
                go.Scatter(
                    x=rows["nodes"].tolist(), y=(rows[column] * 1e3).tolist(), mode="lines+markers",
                    name=f"{kind}, {how}", **series(index),
                    hovertemplate=f"{kind}, {how}<br>%{{x}} nodes: %{{y:.2f}} ms<extra></extra>",
                )
            )  # fmt: skip
            index += 1
    figure.update_xaxes(title_text="nodes (drafted tokens)", type="log", tickvals=sorted(table["nodes"].unique()))
    ticks = [digit * 10**power for power in range(-2, 4) for digit in (1, 2, 5)]
    figure.update_yaxes(title_text="time of one layer (ms)", type="log", tickvals=ticks)
    title = "Verifying a tree on one layer of Qwen3-Next-80B's shapes"
    return figure.update_layout(template=template(), title_text=title)

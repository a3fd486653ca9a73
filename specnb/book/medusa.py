"""Figures of notebook 05 on what heads are: faults and their fingerprints, the ablation, accuracy by head."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.style import series, template
from specnb.errors import InputError

COUNTED = ("alpha_1", "kept", "tested")
FINGERPRINT = {
    "alpha_1": "drafts kept (alpha_1)",
    "right_normed_once": "right, were the norm applied once",
    "copies": "equal to the backbone's own next token",
}
"""Columns of `head_planted.judge` that tell faults apart, and what they are called."""


def fingerprints(faults: pd.DataFrame) -> pd.DataFrame:
    """Every fault in numbers, shares in percent: drafts kept, the fingerprint, and the tau of a chain."""
    kept = [f"{a:.1%} ({k}/{n})" if n else "" for a, k, n in zip(*(faults[c] for c in COUNTED), strict=True)]
    shares = {name: faults[name].map("{:.1%}".format) for name in ("right", "right_normed_once", "copies", "repeats")}
    return pd.DataFrame({"fault": faults["fault"], "alpha_1": kept, **shares, "tau": faults["tau"].round(2)})


def chains(accuracy: np.ndarray) -> pd.DataFrame:
    """What greedy chains of 1, 2, … heads come to if heads are right independently of one another, as trees assume.

    `accuracy (heads, ranks)` are marginal. Columns: heads, tau, acceptance_rate (accepted / drafted).
    """
    accepted = np.cumprod(np.asarray(accuracy)[:, 0]).cumsum()
    heads = np.arange(1, len(accepted) + 1)
    return pd.DataFrame({"heads": heads, "tau": 1 + accepted, "acceptance_rate": accepted / heads}).round(2)


def faults(table: pd.DataFrame, died: pd.DataFrame) -> go.Figure:
    """The fingerprint of each fault, a mark for each share; beside it the schedule that died, and its loss.

    `died` has step, lr and loss. Raises InputError for a table without rows.
    """
    if table.empty:
        raise InputError("no fault was planted: the table has no rows")
    figure = make_subplots(
        cols=2, rows=1, column_widths=[0.65, 0.35], horizontal_spacing=0.12,
        subplot_titles=["each fault in numbers", "the schedule that died"],
    )  # fmt: skip
    names = table["fault"].tolist()
    for index, (column, label) in enumerate(FINGERPRINT.items()):
        shares = (100 * table[column].astype(float)).tolist()
        figure.add_trace(
            go.Scatter(x=shares, y=names, mode="markers", name=label, marker=series(index)["marker"] | {"size": 11},
                       orientation="h", offsetgroup=label,
                       hovertemplate=f"%{{y}}<br>{label}: %{{x:.1f}} %<extra></extra>"),
            row=1, col=1,
        )  # fmt: skip
    loss = {"x": died["step"].tolist(), "y": died["loss"].tolist(), "text": [f"{rate:.2g}" for rate in died["lr"]]}
    figure.add_trace(
        go.Scatter(**loss, mode="lines+markers", name="loss of all heads, weighted", **series(3),
                   hovertemplate="step %{x}: %{y:.2f} nats, learning rate %{text}<extra></extra>"),
        row=1, col=2,
    )  # fmt: skip
    if (dead := died["lr"] == 0).any():
        figure.add_vrect(
            x0=died.loc[~dead, "step"].max(), x1=died["step"].max(), fillcolor="#888", opacity=0.25, line_width=0,
            annotation_text="rate 0", annotation_position="top left", row=1, col=2,
        )  # fmt: skip
    figure.update_xaxes(title_text="share of positions (%)", range=[-3, 103], col=1)
    figure.update_xaxes(title_text="step", col=2)
    figure.update_yaxes(autorange="reversed", col=1)
    figure.update_yaxes(title_text="loss (nats)", col=2)
    return figure.update_layout(
        template=template(), title_text="The faults of the Medusa note", margin={"l": 150}, scattermode="group",
        scattergap=0.3,
    )  # fmt: skip


def ablation_table(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `head_ablation.run` with a column for each head's held-out accuracies, in percent."""
    heads = max((len(shares) for shares in table["top1"] if isinstance(shares, list)), default=0)
    percent = {
        f"{top} head {head}": [round(100 * s[head], 1) if isinstance(s, list) else None for s in table[top]]
        for top in ("top1", "top5")
        for head in range(heads)
    }
    sizes = ["own_mb", "shared_mb", "read_mb"]
    costs = table[["variant", "parameters", *sizes, "draft_ms"]].round(dict.fromkeys((*sizes, "draft_ms"), 2))
    return costs.assign(**percent)


def ablation(table: pd.DataFrame) -> go.Figure:
    """Held-out top-1 of every head beside what one draft reads and takes, a line for each variant."""
    trained = table[table["top1"].map(lambda shares: isinstance(shares, list))]
    if trained.empty:
        raise InputError("no variant was trained: there is no accuracy to draw")
    names = table["variant"].tolist()
    figure = make_subplots(
        cols=3, rows=1, shared_yaxes=True, horizontal_spacing=0.04, column_widths=[0.44, 0.28, 0.28],
        subplot_titles=[f"after {trained['steps'].max():.0f} steps", "one draft reads", "and takes"],
    )  # fmt: skip
    for head in range(len(trained["top1"].iloc[0])):
        shares = [100 * one[head] for one in trained["top1"]]
        figure.add_trace(
            go.Scatter(x=shares, y=trained["variant"].tolist(), mode="markers", name=f"head {head}",
                       marker=series(head)["marker"] | {"size": 11},
                       hovertemplate=f"%{{y}}, head {head}: %{{x:.1f}} %<extra></extra>"),
            row=1, col=1,
        )  # fmt: skip
    for column, (field, unit) in enumerate((("read_mb", "MB"), ("draft_ms", "ms")), start=2):
        values = table[field].tolist()
        figure.add_trace(
            go.Bar(x=values, y=names, orientation="h", marker_color=series(6)["marker"]["color"], showlegend=False,
                   text=[f"{value:.3g}" for value in values], textposition="outside", cliponaxis=False,
                   hovertemplate=f"%{{y}}: %{{x:.3g}} {unit}<extra></extra>"),
            row=1, col=column,
        )  # fmt: skip
        figure.update_xaxes(range=[0, 1.25 * max(values)], col=column)
    for column, title in enumerate(("held-out top-1 (%)", "megabytes", "milliseconds (median)"), start=1):
        figure.update_xaxes(title_text=title, col=column)
    figure.update_xaxes(rangemode="tozero", col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    title = "One part of the heads changed at a time: same text, steps and seed"
    return figure.update_layout(template=template(), title_text=title, margin={"l": 150})


def accuracy(table: pd.DataFrame) -> go.Figure:
    """Accuracy over heads with its intervals, a line for each kind and number of guesses."""
    if table.empty:
        raise InputError("no head was scored: the table has no rows")
    figure = go.Figure()
    for index, ((kind, top), line) in enumerate(table.groupby(["kind", "top"], sort=False)):
        figure.add_trace(
            go.Scatter(
                x=[f"head {head}: t + {head + 2}" for head in line["head"]], y=(100 * line["accuracy"]).tolist(),
                error_y=spread(line["accuracy"], line["low"], line["high"], 100), mode="lines+markers",
                name=f"{kind}, top {top}", **series(index),
                hovertemplate=f"{kind}, %{{x}}<br>right among its best {top}: %{{y:.1f}} %<extra></extra>",
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="head, and the token it foretells from the state of token t")
    figure.update_yaxes(title_text="held-out accuracy (%)", rangemode="tozero")
    title = "How often heads are right along the backbone's own text"
    return figure.update_layout(template=template(), title_text=title)


def spread(value: pd.Series, low: pd.Series, high: pd.Series, scale: float = 1.0) -> dict | None:
    """Error bars of an interval, None where one end is not known."""
    if low.isna().any() or high.isna().any():
        return None
    up, down = scale * (high - value), scale * (value - low)
    return {"type": "data", "symmetric": False, "array": up.tolist(), "arrayminus": down.tolist(), "thickness": 1}

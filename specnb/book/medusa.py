"""Figures and tables of notebook 05: faults and their fingerprints, the ablation, speed and its parts."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.style import COLOURS, series, spread, template

COUNTED = ("alpha_1", "kept", "tested")
ALL, PARTS = "all", ("draft", "verify", "rewind", "other")
FINGERPRINT = {
    "alpha_1": "drafts kept (alpha_1)",
    "right_normed_once": "right, were the norm applied once",
    "copies": "equal to the backbone's own next token",
}
"""Columns of `medusa.faults.judge` that tell faults apart, and what they are called."""


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

    `died` has step, lr and loss.
    """
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
    """The rows of `medusa.practice.ablate` with a column for each head's held-out accuracies, in percent."""
    heads = max((len(shares) for shares in table["top1"] if isinstance(shares, list)), default=0)
    percent = {
        f"{top} head {head}": [round(100 * s[head], 1) if isinstance(s, list) else None for s in table[top]]
        for top in ("top1", "top5")
        for head in range(heads)
    }
    sizes = ["own_mb", "shared_mb", "read_mb"]
    costs = table[["variant", "parameters", *sizes, "draft_ms"]].round(dict.fromkeys((*sizes, "draft_ms"), 2))
    return costs.assign(**percent)


def speed(table: pd.DataFrame) -> go.Figure:
    """Speed-up over plain decoding by category, with intervals, beside the parts that a round's time goes to."""
    figure = make_subplots(
        cols=2, rows=1, horizontal_spacing=0.12, column_widths=[0.5, 0.5],
        subplot_titles=["speed-up, interval over prompts", "where the time of a round goes (all categories)"],
    )  # fmt: skip
    for index, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
        labels = [f"tau {row.tau:.2f}, {row.identical} of {row.n_prompts} texts as plain" for row in rows.itertuples()]
        figure.add_trace(
            go.Bar(x=rows["category"].tolist(), y=rows["speedup"].tolist(), name=kind, text=labels, textposition="none",
                   error_y=spread(rows["speedup"], rows["low"], rows["high"]), marker_color=COLOURS[index],
                   hovertemplate=f"{kind}, %{{x}}: %{{y:.2f}} times plain<br>%{{text}}<extra></extra>"),
            row=1, col=1,
        )  # fmt: skip
    whole = table[table["category"] == ALL]
    before = np.zeros(len(whole))
    for index, part in enumerate(PARTS):
        shares = 100 * whole[f"{part}_share"].to_numpy(dtype=float)
        figure.add_trace(
            go.Bar(x=shares.tolist(), y=whole["kind"].tolist(), base=before.tolist(), name=part, orientation="h",
                   marker_color=COLOURS[index + 2], offsetgroup="parts", customdata=shares.tolist(),
                   hovertemplate=f"%{{y}}, {part}: %{{customdata:.1f}} %<extra></extra>"),
            row=1, col=2,
        )  # fmt: skip
        before = before + shares
    figure.add_shape(type="line", x0=0, x1=1, xref="x domain", y0=1, y1=1, yref="y", line={"color": "#222", "width": 1})
    figure.update_yaxes(title_text="speed-up (plain = 1)", rangemode="tozero", col=1)
    figure.update_xaxes(title_text="share of the time (%)", range=[0, 100], col=2)
    figure.update_yaxes(autorange="reversed", col=2)
    return figure.update_layout(template=template(), title_text="Medusa and Hydra against plain decoding")


def speeds(table: pd.DataFrame) -> pd.DataFrame:
    """What a reader needs of `Study.time`: the rounds, the ratio and its interval, tokens a second, the time split."""
    columns = ["kind", "category", "tau", "alpha_1", "speedup", "low", "high", "tokens_per_s", "plain_tokens_per_s"]
    shares = [f"{part}_share" for part in PARTS]
    return table[[*columns, *shares, "identical", "n_prompts"]].round(2)

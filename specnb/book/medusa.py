"""Figures of notebook 05: faults and their fingerprints, ablation, accuracy, trees, acceptance, speed and its parts."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.style import COLOURS, series, spread, template
from specnb.errors import InputError

COUNTED = ("alpha_1", "kept", "tested")
ALL, PARTS = "all", ("draft", "verify", "rewind", "other")
THICKEST = 9
"""Line width, in pixels, of an edge that is always right."""
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


def ablation(table: pd.DataFrame) -> go.Figure:
    """Held-out top-1 of every head beside what one draft reads and takes, a line for each variant."""
    trained = table[table["top1"].map(lambda shares: isinstance(shares, list))]
    names = table["variant"].tolist()
    figure = make_subplots(
        cols=3, rows=1, shared_yaxes=True, horizontal_spacing=0.04, column_widths=[0.44, 0.28, 0.28],
        subplot_titles=[f"after {trained['steps'].max():.0f} steps", "one draft reads", "and takes"],
    )  # fmt: skip
    for head in range(len(trained["top1"].iloc[0])):
        shares = [100 * of_heads[head] for of_heads in trained["top1"]]
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


def rows_of_nodes(parents: Sequence[int]) -> list[int]:
    """The row on which each node of a tree is drawn: a leaf has one of its own, others stand beside their first child.

    Parents are indices of earlier nodes, -1 is the root, which is not drawn here.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    rows, free = [0] * len(parents), 0
    waiting = list(reversed(children.get(-1, [])))
    while waiting:
        node = waiting.pop()
        rows[node] = free
        below = children.get(node, [])
        waiting.extend(reversed(below))
        free += not below
    return rows


def tree(table: pd.DataFrame) -> go.Figure:
    """The drafted trees, a panel for each kind: columns are heads, an edge is as thick as it is likely to be right.

    `table` is `Study.tree`: kind, node, parent, head, rank, value (of the edge, given its parent is right), worth (of
    the path).
    """
    kinds = list(dict.fromkeys(table["kind"]))
    titles = [f"{kind}: {(table['kind'] == kind).sum()} nodes" for kind in kinds]
    figure = make_subplots(cols=len(kinds), rows=1, subplot_titles=titles, horizontal_spacing=0.06)
    for column, kind in enumerate(kinds, start=1):
        _draw_tree(figure, table[table["kind"] == kind], column)
    deepest = int(table["head"].max())
    ticks = {
        "tickvals": [0, *range(1, deepest + 2)],
        "ticktext": ["newest", *(f"head {i}" for i in range(deepest + 1))],
    }
    figure.update_xaxes(**ticks, range=[-0.3, deepest + 1.6], showgrid=False)
    figure.update_yaxes(visible=False, autorange="reversed")
    note = "number: rank among the head's best (0 the best); thickness: how often right, given what is before it"
    figure.add_annotation(x=0, y=-0.16, xref="paper", yref="paper", xanchor="left", showarrow=False, text=note)
    most = max((table["kind"] == kind).sum() for kind in kinds)
    return figure.update_layout(
        template=template(), title_text="The trees that pay on this machine", height=max(480, 18 * int(most) + 160),
        showlegend=False, margin={"b": 90},
    )  # fmt: skip


def _draw_tree(figure: go.Figure, nodes: pd.DataFrame, column: int) -> None:
    rows = rows_of_nodes(nodes["parent"].tolist())
    at = {-1: (0, 0)} | {node: (head + 1, rows[node]) for node, head in enumerate(nodes["head"])}
    for node, (parent, value) in enumerate(zip(nodes["parent"], nodes["value"], strict=True)):
        (x0, y0), (x1, y1) = at[parent], at[node]
        line = {"color": COLOURS[0], "width": 0.5 + THICKEST * value}
        edge = go.Scatter(x=[x0, x1], y=[y0, y1], mode="lines", line=line, opacity=0.45, hoverinfo="skip")
        figure.add_trace(edge, row=1, col=column)
    hover = [
        f"head {n.head}, rank {n.rank}<br>right {n.value:.1%} of the time, given its parent<br>the path: {n.worth:.1%}"
        for n in nodes.itertuples()
    ]
    points = [at[node] for node in range(len(nodes))]
    dots = go.Scatter(
        x=[x for x, _ in points], y=[y for _, y in points], mode="markers+text", text=nodes["rank"].tolist(),
        textposition="top right", textfont={"size": 11}, marker={"color": COLOURS[1], "size": 8}, hovertext=hover,
        hovertemplate="%{hovertext}<extra></extra>",
    )  # fmt: skip
    root = go.Scatter(x=[0], y=[0], mode="markers", marker={"color": "#222", "size": 11, "symbol": "square"},
                      hovertemplate="the newest token<extra></extra>")  # fmt: skip
    figure.add_trace(dots, row=1, col=column)
    figure.add_trace(root, row=1, col=column)


def sizes(table: pd.DataFrame) -> go.Figure:
    """What a tree of each size promises: tokens a round, time of a round in plain steps, and their quotient.

    `table` is `Study.choose`. Raises InputError for a table without the row of plain decoding (no nodes).
    """
    if table.empty or not (table["nodes"] == 0).any():
        raise InputError("no sizes were compared: the target cannot verify trees, or none were asked for")
    kinds = list(dict.fromkeys(table["kind"]))
    figure = make_subplots(cols=len(kinds), rows=1, shared_yaxes=True, subplot_titles=kinds, horizontal_spacing=0.04)
    for column, kind in enumerate(kinds, start=1):
        rows = table[table["kind"] == kind].sort_values("nodes")
        rows = rows[rows["tokens"] == rows["tokens"].cummax()]  # a wide flat tree that a smaller one outdoes is no size
        step_s = rows.loc[rows["nodes"] == 0, "seconds"].iloc[0]
        lines = {
            "tokens a round": rows["tokens"], "time of a round (plain steps)": rows["seconds"] / step_s,
            "speed-up": rows["tokens"] / (rows["seconds"] / step_s),
        }  # fmt: skip
        for index, (name, values) in enumerate(lines.items()):
            figure.add_trace(
                go.Scatter(x=rows["nodes"].tolist(), y=values.tolist(), mode="lines+markers", name=name,
                           legendgroup=name, showlegend=column == 1, **series(index),
                           hovertemplate=f"%{{x}} nodes: {name} %{{y:.2f}}<extra></extra>"),
                row=1, col=column,
            )  # fmt: skip
        best = int(lines["speed-up"].idxmax())
        figure.add_annotation(
            x=rows.loc[best, "nodes"], y=lines["speed-up"][best], text=f"best: {rows.loc[best, 'nodes']} nodes", ay=32,
            ax=30, row=1, col=column,
        )  # fmt: skip
    figure.update_xaxes(title_text="nodes of the tree (0: plain decoding)")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="expected, plain decoding = 1", col=1)
    title = "How large a tree pays: measured accuracies against measured T(n)"
    return figure.update_layout(template=template(), title_text=title)


def alpha(table: pd.DataFrame) -> go.Figure:
    """Acceptance by drafted position, given that those before were kept, with intervals; a line for each kind."""
    figure = go.Figure()
    for index, (kind, line) in enumerate(table.groupby("kind", sort=False)):
        shown = line[line["tested"] > 0]
        counts = [f"{k} of {n}" for k, n in zip(shown["kept"], shown["tested"], strict=True)]
        figure.add_trace(
            go.Scatter(
                x=shown["position"].tolist(), y=shown["alpha"].tolist(), text=counts, mode="lines+markers", name=kind,
                error_y=spread(shown["alpha"], shown["low"], shown["high"]), **series(index),
                hovertemplate=f"{kind}, position %{{x}}: %{{y:.2f}}, %{{text}} drafts kept<extra></extra>",
            )
        )  # fmt: skip
    figure.update_xaxes(title_text="drafted position k of a chain", dtick=1)
    figure.update_yaxes(title_text="alpha_k (kept / tested)", range=[0, 1.02])
    return figure.update_layout(template=template(), title_text="Served: which drafts are kept")


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

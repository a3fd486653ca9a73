"""Figures of notebook 06 and of an investigation's page: where a draft parts from itself, by module and token."""

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.style import series, spread, template
from specnb.divergence.errors import HEAT
from specnb.divergence.tolerances import TIMES_FLOOR

LIMIT = float(np.log10(TIMES_FLOOR))
"""From here on a tensor counts as wrong."""
LOW, HIGH = HEAT
MOST_ROWS = 120
"""Modules that a heat map shows; of more those that are wrong and their neighbours in time."""
SCALE = [(0.0, "#ffffff"), (0.111, "#f4f7fa"), (0.164, "#d6e6f2"), (0.166, "#fdd49e"), (0.4, "#fc8d59"),
         (0.7, "#d7301f"), (1.0, "#67000d")]  # fmt: skip
LEAST = 1e-8
"""What is less is drawn here on a logarithmic axis."""
MISSING = "#bdbdbd"
TOLD = f"0: at the floor of sound runs; wrong from {LIMIT:.2f} on ({TIMES_FLOOR:g} times the floor)"


class Box(NamedTuple):
    """The frame around the first divergence: its module and its first and last token."""

    module: str
    first_token: int
    last_token: int


def heat(
    table: pd.DataFrame, *, box: Box | None = None, cells: pd.DataFrame | None = None, title: str = "Error over floor"
) -> go.Figure:
    """Modules in order of time by tokens, coloured by log10 of error over floor (`Investigation.heat`).

    `cells` (`report.cells`) are told on hover. Places that were not compared are grey.
    """
    drawn = _chosen(table)
    names = [_named(module) for module in drawn.index]
    figure = go.Figure(_heatmap(drawn, names, cells, scale=True))
    if box is not None and box.module in drawn.index:
        at = list(drawn.index).index(box.module)
        columns = list(drawn.columns)
        ends = (columns.index(box.first_token) - 0.5, columns.index(box.last_token) + 0.5)
        figure.add_shape(
            type="rect", x0=ends[0], x1=ends[1], y0=at - 0.5, y1=at + 0.5, line={"color": "#111", "width": 3}
        )
    tokens = len(drawn.columns)
    step = max(1, -(-tokens // 32))
    figure.update_xaxes(
        title_text="position of the token in the text", showgrid=False, range=[-0.5, tokens - 0.5],
        tickvals=list(range(0, tokens, step)), ticktext=[str(c) for c in drawn.columns[::step]], tickangle=0,
    )  # fmt: skip
    figure.update_yaxes(
        autorange="reversed", showgrid=False, tickvals=names, tickfont={"size": 11},
        title_text="module, in order of time", title_standoff=4,
    )  # fmt: skip
    few = "" if len(drawn) == len(table) else f"; {len(drawn)} of {len(table)} modules"
    figure.update_layout(
        template=template(), title_text=f"{html.escape(title)}<br><sup>{TOLD}; grey: not compared{few}</sup>",
        height=160 + 16 * max(len(drawn), 12), margin={"l": 60, "r": 20, "t": 80, "b": 60}, plot_bgcolor=MISSING,
    )  # fmt: skip
    return figure.update_yaxes(automargin=True)


def heats(tables: Mapping[str, pd.DataFrame], *, title: str = "Each set-up") -> go.Figure:
    """One small heat map for each set-up, modules downwards, tokens to the right; layers are named, modules on hover.

    The names may have several lines.
    """
    columns = min(4, len(tables))
    rows = -(-len(tables) // columns)
    figure = make_subplots(
        rows=rows, cols=columns, shared_yaxes=True,
        subplot_titles=[html.escape(name).replace("\n", "<br>") for name in tables],
        horizontal_spacing=0.02, vertical_spacing=0.36 / rows,
    )  # fmt: skip
    for at, table in enumerate(tables.values()):
        row, column = at // columns + 1, at % columns + 1
        names = [_named(module) for module in table.index]
        figure.add_trace(_heatmap(table, names, None, scale=at == 0), row=row, col=column)
        last = len(tables) - columns <= at
        figure.update_xaxes(title_text="position of the token" if last else None, showgrid=False, row=row, col=column)
        starts, labels = layer_ticks(table.index)
        figure.update_yaxes(
            autorange="reversed", showgrid=False, tickvals=[names[start] for start in starts], ticktext=labels,
            tickfont={"size": 10},
            row=row, col=column,
        )  # fmt: skip
    figure.update_annotations(font_size=12)
    return figure.update_layout(
        template=template(), title_text=f"{html.escape(title)}<br><sup>{TOLD}</sup>", plot_bgcolor=MISSING,
        height=150 + 250 * rows, margin={"t": 115, "l": 80},
    )  # fmt: skip


def strips(table: pd.DataFrame, *, title: str, marks: Mapping[str, str] | None = None) -> go.Figure:
    """One strip for each row (a set-up, a fault): modules in order of time, the worst of all tokens.

    `table`: rows by names, columns by modules. `marks`: of a row the module that is framed.
    """
    names = [html.escape(str(name)) for name in table.index]
    modules = [_named(module) for module in table.columns]
    figure = go.Figure(
        go.Heatmap(
            z=_bounded(table), x=modules, y=names, ygap=3, colorscale=SCALE, zmin=LOW, zmax=HIGH,
            colorbar=_bar(), hovertemplate="%{x}<br>%{y}<br>log10(error / floor) %{z:.2f}<extra></extra>",
        )
    )  # fmt: skip
    for name, module in (marks or {}).items():
        if name in table.index and module in table.columns:
            x, y = list(table.columns).index(module), list(table.index).index(name)
            figure.add_shape(
                type="rect", x0=x - 0.5, x1=x + 0.5, y0=y - 0.42, y1=y + 0.42, line={"color": "#111", "width": 2}
            )
    starts, labels = layer_ticks(table.columns)
    at = [modules[start] for start in starts]
    figure.update_xaxes(title_text="module, in order of time", tickvals=at, ticktext=labels, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, automargin=True)
    framed = "; framed: named first" if marks else ""
    return figure.update_layout(
        template=template(), title_text=f"{html.escape(title)}<br><sup>{TOLD}{framed}</sup>", plot_bgcolor=MISSING,
        height=190 + 26 * len(table), margin={"l": 60, "t": 80},
    )  # fmt: skip


def misleading(table: pd.DataFrame, *, title: str = "What each number says of the same outputs") -> go.Figure:
    """For each module's output: how far its mean, its deviation, its direction and its values are off, log scale.

    `table` is `book.divergence.misleading`. Smaller values than LEAST are drawn there.
    """
    shown = {
        "mean: |ratio - 1|": (table["mean_ratio"] - 1).abs(),
        "standard deviation: |ratio - 1|": (table["std_ratio"] - 1).abs(),
        "1 - cosine": 1 - table["cosine"],
        "relative L2": table["relative_l2"],
        "relative L2 of the module by itself (shadow replay)": table["by_itself"],
    }
    figure = go.Figure()
    for index, (name, values) in enumerate(shown.items()):
        line = index < len(shown) - 1  # what a module does by itself has nothing to do with the next one
        cross = {"color": "#111", "symbol": "x-thin", "size": 9, "line": {"width": 2}}
        look = series(index) if line else {"marker": cross}
        look["marker"] |= {"size": 6} if line else {}
        figure.add_trace(
            go.Scatter(
                x=list(range(len(table))), y=values.clip(lower=LEAST).tolist(), name=name,
                mode="lines+markers" if line else "markers", text=[_named(module) for module in table["module"]],
                hovertemplate=f"%{{text}}<br>{name}: %{{y:.3g}}<extra></extra>", **look,
            )
        )  # fmt: skip
    starts, labels = layer_ticks(table["module"])
    decades = range(int(np.log10(LEAST)), 4, 2)
    names = [f"≤ 10<sup>{decades[0]}</sup>", *(f"10<sup>{n}</sup>" for n in decades[1:])]
    figure.update_xaxes(title_text="module, in order of time", tickvals=starts, ticktext=labels)
    figure.update_yaxes(
        title_text="difference from the sound run", type="log", tickvals=[10.0**n for n in decades], ticktext=names
    )
    return figure.update_layout(
        template=template(), title_text=html.escape(title), height=560, legend={"y": -0.18}, margin={"l": 95}
    )


def acceptance(table: pd.DataFrame, *, title: str = "Drafts kept, by position") -> go.Figure:
    """alpha_k over k with its interval (`Profile.table`)."""
    alpha, low, high = (100 * table[name] for name in ("alpha", "low", "high"))
    figure = go.Figure(
        go.Scatter(
            x=table["position"].tolist(), y=alpha.tolist(), mode="lines+markers", customdata=table[["kept", "tested"]],
            error_y=spread(alpha, low, high),
            hovertemplate="draft %{x}: %{y:.1f} %<br>%{customdata[0]} of %{customdata[1]} kept<extra></extra>",
            **series(0),
        )
    )  # fmt: skip
    figure.update_xaxes(title_text="draft position k", tickvals=table["position"].tolist())
    figure.update_yaxes(title_text="kept, of those put to the test (%)", range=[-4, 104])
    return figure.update_layout(template=template(), title_text=html.escape(title), height=380, margin={"l": 90})


def layer_ticks(modules: Sequence[str]) -> tuple[list[int], list[str]]:
    """Where each layer begins among modules in order of time, and its name; what is in no layer is not named."""
    starts: dict[str, int] = {}
    for at, module in enumerate(modules):
        number = next((part for part in module.split(".") if part.isdecimal()), None)
        if number is not None:
            starts.setdefault(number, at)
    every = max(1, -(-len(starts) // 12))
    kept = list(starts.items())[::every]
    return [at for _, at in kept], [f"layer {number}" for number, _ in kept]


def _heatmap(table: pd.DataFrame, names: list[str], cells: pd.DataFrame | None, *, scale: bool) -> go.Heatmap:
    hover = {"hovertemplate": "%{y}, place %{x}<br>log10(error / floor) %{z:.2f}<extra></extra>"}
    if cells is not None:
        hover = {"hovertemplate": "%{customdata}<extra></extra>", "customdata": _told(table, names, cells)}
    gap = 0.5 if cells is not None else 0
    return go.Heatmap(
        z=_bounded(table), y=names, colorscale=SCALE, zmin=LOW, zmax=HIGH, showscale=scale,
        colorbar=_bar() if scale else None, xgap=gap if len(table.columns) <= 80 else 0, ygap=gap, **hover,
    )  # fmt: skip


def _told(table: pd.DataFrame, names: list[str], cells: pd.DataFrame) -> list[list[str]]:
    """The hover text of each place."""
    known = {(c.module, c.position): c for c in cells.itertuples()}
    rows = []
    for (module, values), name in zip(table.iterrows(), names, strict=True):
        row = []
        for position, value in values.items():
            head = f"{name}, token {position}"
            cell = known.get((module, position))
            if cell is not None:
                head += (
                    f"<br>{html.escape(cell.role)} {html.escape(cell.name)} of {_named(cell.at)}"
                    f"<br>error {cell.error:.3g}, floor {cell.floor:.3g}, gain {cell.gain:.4g}"
                )
            row.append(f"{head}<br>" + ("not compared" if np.isnan(value) else f"log10(error / floor) {value:.2f}"))
        rows.append(row)
    return rows


def _chosen(table: pd.DataFrame) -> pd.DataFrame:
    if len(table) <= MOST_ROWS:
        return table
    wrong = (table.max(axis=1) > LIMIT).to_numpy()
    near = wrong | np.roll(wrong, 1) | np.roll(wrong, -1)
    return table[near].head(MOST_ROWS) if near.any() else table.head(MOST_ROWS)


def _bounded(table: pd.DataFrame) -> list[list[float | None]]:
    values = table.to_numpy(float).clip(LOW, HIGH)
    return [[None if np.isnan(value) else round(float(value), 2) for value in row] for row in values]


def _bar() -> dict:
    ticks = {"-1": -1, "0": 0, "2": 2, "4": 4, "6": 6, "8": 8}
    return {
        "title": {"text": "log10(error / floor)", "side": "right"}, "tickvals": list(ticks.values()),
        "ticktext": list(ticks), "thickness": 14, "outlinewidth": 1, "outlinecolor": "#444",
    }  # fmt: skip


def _named(module: str) -> str:
    """A module's path for a figure, where tags would be obeyed."""
    return html.escape(module) or "(the model)"

"""Figures of notebook 06: where a draft parts from itself, by module and token."""

import html
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from specnb.book.style import STYLE, dress, series
from specnb.divergence.errors import HEAT, TIMES_FLOOR

LIMIT = float(np.log10(TIMES_FLOOR))
"""From here on a tensor counts as wrong."""
LOW, HIGH = HEAT
MOST_ROWS = 40
"""Modules that a heat map shows; of more those that are wrong and their neighbours in time."""
LEAST = 1e-8
"""What is less is drawn here on a logarithmic axis."""
WRONG, SCALE = STYLE["heat"]["wrong"], STYLE["heat"]["scale"]
LEGEND = f"0: at the floor of sound runs; wrong from {LIMIT:.2f} on ({TIMES_FLOOR:g} times the floor)"


def draw_heat_map(table: pd.DataFrame, *, box: tuple[str, int, int] | None = None, title: str) -> go.Figure:
    """Modules in order of time by tokens, coloured by log10 of error over floor (`Investigation.heat`).

    `box` is framed: a module, its first and its last token. Places that were not compared are grey.
    """
    drawn = _near_wrong(table)
    names = _named(drawn.index)
    figure = go.Figure(_heatmap(drawn, x=[*drawn.columns], y=names))
    if box is not None and box[0] in drawn.index:
        _frame(figure, *box[1:], list(drawn.index).index(box[0]))
    figure.update_yaxes(tickvals=names)
    few = "" if len(drawn) == len(table) else f"; {len(drawn)} of {len(table)} modules"
    text = {"text": html.escape(title), "subtitle_text": f"{LEGEND}; grey: not compared{few}"}
    return dress(figure, "heat", title=text, height=170 + 16 * max(len(drawn), 12))


def strips(table: pd.DataFrame, *, title: str, marks: Mapping[str, str]) -> go.Figure:
    """One strip for each row (a set-up, a fault): modules in order of time, the worst of all tokens.

    `table`: rows by names, columns by modules. `marks`: of a row the module that is framed and named.
    """
    modules = _named(table.columns)
    figure = go.Figure(_heatmap(table, x=modules, y=_named(table.index), ygap=3))
    for name, module in marks.items():
        x, y = list(table.columns).index(module), list(table.index).index(name)
        _frame(figure, x, x, y, half=0.42, width=2)
        side = {"xanchor": "left", "xshift": 10} if x < 0.8 * len(modules) else {"xanchor": "right", "xshift": -10}
        figure.add_annotation(x=x, y=y, text=modules[x].removeprefix("layers."), showarrow=False, font_size=11, **side)
    _name_layers(figure, table.columns, modules)
    text = {"text": html.escape(title), "subtitle_text": f"{LEGEND}; framed: the module named first"}
    return dress(figure, "strips", title=text, height=200 + 26 * len(table))


def draw_misleading(table: pd.DataFrame) -> go.Figure:
    """For each module's output: how far its mean, its deviation, its direction and its values are off, log scale.

    `table` is `book.divergence.misleading`. Smaller values than LEAST are drawn there.
    """
    shown = {
        "mean: |ratio - 1|": (table["mean_ratio"] - 1).abs(),
        "standard deviation: |ratio - 1|": (table["std_ratio"] - 1).abs(),
        "1 - cosine": 1 - table["cosine"],
        "relative L2": table["relative_l2"],
        "module by itself (shadow replay), sound": table["by_itself"].where(table["ratio"] <= TIMES_FLOOR),
        "module by itself, wrong": table["by_itself"].where(table["ratio"] > TIMES_FLOOR),
    }
    figure = go.Figure()
    for index, (name, values) in enumerate(shown.items()):
        look = series(index) | {"mode": "lines", "opacity": 0.7}
        if index > 3:  # what a module does by itself has nothing to do with the next one
            colour, width = ("#888", 2) if index == 4 else (WRONG, 4)
            look = {"marker": {"symbol": "x-thin", "size": 4 * width, "line": {"color": colour, "width": width}}}
            look |= {"mode": "markers"}
        x, y, text = list(range(len(table))), values.clip(lower=LEAST).tolist(), _named(table["module"])
        figure.add_scatter(x=x, y=y, name=name, text=text, **look)
    _name_layers(figure, table["module"], range(len(table)))
    return dress(figure, "misleading")


def _name_layers(figure: go.Figure, modules: Sequence[str], places: Sequence[str | int]) -> None:
    """Name the layers below the middles of their modules, which are in order of time, and draw a line before each."""
    layers: dict[str, list[int]] = {}
    for at, module in enumerate(modules):
        if number := next(filter(str.isdecimal, module.split(".")), None):
            layers.setdefault(number, []).append(at)
    every = max(1, -(-len(layers) // 12))
    for start, *_ in layers.values():
        figure.add_vline(start - 0.5, line={"color": "#888", "width": 1, "dash": "dot"})
    middles = {f"layer {number}": places[of[len(of) // 2]] for number, of in [*layers.items()][::every]}
    figure.update_xaxes(tickvals=[*middles.values()], ticktext=[*middles])


def _heatmap(table: pd.DataFrame, **look: object) -> go.Heatmap:
    values = table.to_numpy(float).clip(LOW, HIGH)
    z = [[None if np.isnan(value) else round(float(value), 2) for value in row] for row in values]
    bar = {"title": {"text": "log10(error / floor)", "side": "right"}, "thickness": 14, "outlinewidth": 1}
    return go.Heatmap(z=z, colorscale=SCALE, zmin=LOW, zmax=HIGH, colorbar=bar, **look)


def _frame(figure: go.Figure, first: int, last: int, row: int, half: float = 0.5, width: int = 3) -> None:
    line = {"color": "#111", "width": width}
    figure.add_shape(type="rect", x0=first - 0.5, x1=last + 0.5, y0=row - half, y1=row + half, line=line)


def _near_wrong(table: pd.DataFrame) -> pd.DataFrame:
    """At most MOST_ROWS rows: of more those that are wrong, and those beside them."""
    if len(table) <= MOST_ROWS:
        return table
    wrong = (table.max(axis=1) > LIMIT).to_numpy()
    near = wrong | np.roll(wrong, 1) | np.roll(wrong, -1)
    return table[near].head(MOST_ROWS) if near.any() else table.head(MOST_ROWS)


def _named(modules: Sequence[str]) -> list[str]:
    """Paths of modules for a figure, where tags would be obeyed."""
    return [html.escape(str(module)) or "(the model)" for module in modules]

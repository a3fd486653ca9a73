"""One look for every figure: a plotly template with colours, dashes and markers that differ without colour."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import PureWindowsPath
from typing import Any
from urllib.parse import parse_qsl

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

# Okabe & Ito's colours, told apart by colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
CONFIG = {
    "displaylogo": False, "showSendToCloud": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d"],
}  # fmt: skip
"""plotly's buttons in pages and notebooks: none that uploads."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")

DRAFTERS = {"lookup": "prompt lookup", "self": "a smaller copy of itself", "medusa": "Medusa heads"}
MODELS = {f"smollm2-{size.lower()}": f"SmolLM2-{size}" for size in ("135M", "360M", "1.7B")}


def template() -> go.layout.Template:
    """The template that every figure of the suite carries; nothing is registered globally."""
    axis = {
        "showline": True, "linecolor": "#444", "ticks": "outside", "tickcolor": "#444", "gridcolor": "#e6e6e6",
        "zeroline": False, "title": {"standoff": 10},
    }  # fmt: skip
    return go.layout.Template(
        layout={
            "font": {"family": "DejaVu Sans, Liberation Sans, Arial, sans-serif", "size": 13, "color": "#222"},
            "title": {"x": 0.0, "xref": "paper", "xanchor": "left", "font": {"size": 16}},
            "colorway": COLOURS,
            "plot_bgcolor": "white",
            "paper_bgcolor": "white",
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top"},
            "margin": {"l": 70, "r": 20, "t": 70, "b": 60},
            "width": 960,
            "height": 480,
        }
    )


def series(index: int) -> dict[str, dict]:
    """Line and marker of the index-th series: colour, dash and shape change together."""
    at = index % len(COLOURS)
    return {
        "line": {"color": COLOURS[at], "dash": DASHES[at], "width": 2},
        "marker": {"color": COLOURS[at], "symbol": MARKERS[at], "size": 9},
    }


def looks(column: str, names: Sequence[str]) -> dict[str, Any]:
    """Arguments of plotly express that draw the values of `column` by colour, dash and marker.

    `names` are all that may occur, in their order: each looks the same in every figure, as in `series`; `all` is grey.
    """
    sequences = {"color_discrete_map": COLOURS, "line_dash_map": DASHES, "symbol_map": MARKERS}
    maps = {key: dict(zip(names, cycle(seq), strict=False)) | {"all": seq[-1]} for key, seq in sequences.items()}
    return {"color": column, "line_dash": column, "symbol": column, "category_orders": {column: list(names)}, **maps}


def dots(rows: pd.DataFrame, *, x: str, y: str, by: str, title: str) -> go.Figure:
    """A mark for each row at `x`, on the line of its `y`; those of different `by` one below the other."""
    look = {"color": by, "symbol": by, "symbol_sequence": MARKERS, "template": template()}
    figure = px.scatter(rows, x=x, y=y, orientation="h", title=title, **look)
    figure.for_each_trace(lambda marks: marks.update(offsetgroup=marks.name, marker_size=11))
    figure.update_yaxes(autorange="reversed", automargin=True, title_text="")
    return figure.update_layout(scattermode="group", scattergap=0.3, legend_title_text="")


def spread(value: pd.Series, low: pd.Series, high: pd.Series) -> dict[str, Any]:
    """Return the error bars of intervals; where an end is NaN, plotly draws none."""
    return {"type": "data", "symmetric": False, "thickness": 1, "array": high - value, "arrayminus": value - low}


def readable(name: str) -> str:
    """Return the name of a model or a drafter as people write it.

    >>> readable("smollm2-135m?backend=hf&dtype=bfloat16"), readable("smollm2-135m:q4_0"), readable("lookup(n=1..6,x4)")
    ('SmolLM2-135M, torch bfloat16', 'SmolLM2-135M q4_0', 'prompt lookup')
    """
    if drafter := DRAFTERS.get(name.partition("(")[0]):
        return drafter
    source, _, query = name.partition("?")
    source, _, kind = PureWindowsPath(source).name.partition(":")  # of either kind of path
    options = dict(parse_qsl(query))
    engine = {"hf": ", torch", "llama": ", llama.cpp"}.get(options.get("backend"), "")
    return f"{MODELS.get(source, source)}{engine} {options.get('dtype') or options.get('weights') or kind}".rstrip()

"""One look for every figure: a plotly template with colours, dashes and markers that differ without colour."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import parse_qsl

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.io import read_toml

STYLE = read_toml(Path(__file__).with_suffix(".toml"))
COLOURS, MARKERS, DASHES = (STYLE[name] for name in ("colours", "markers", "dashes"))
CONFIG = STYLE["config"]
QUICK = "quick run: checks hold, speeds do not"


def template() -> go.layout.Template:
    """The template that every figure of the suite carries; nothing is registered globally."""
    axis = STYLE["axis"]
    layout = STYLE["layout"] | {"colorway": COLOURS, "xaxis": axis, "yaxis": axis}
    return go.layout.Template(layout=layout, data=STYLE["traces"])


def series(index: int) -> dict[str, Any]:
    """Line and marker of the index-th series: colour, dash and shape change together."""
    line = {"line_color": COLOURS[index], "line_dash": DASHES[index]}
    return line | {"marker_color": COLOURS[index], "marker_symbol": MARKERS[index], "marker_size": 9}


def looks(column: str, names: Iterable[str], *, by: Sequence[str] = ("line_dash", "symbol")) -> dict[str, Any]:
    """Arguments of plotly express that draw the values of `column` by colour, and by dash and marker or one of them.

    `names` are all that may occur, in the order of their first place: each looks the same in every figure, as in
    `series`; `all` is grey.
    """
    names = [*dict.fromkeys(names)]
    sequences = {"color_discrete": COLOURS, "line_dash": DASHES, "symbol": MARKERS}
    maps = {
        f"{key}_map": dict(zip(names, cycle(sequences[key]), strict=False)) | {"all": sequences[key][-1]}
        for key in ("color_discrete", *by)
    }
    shared = {"color": column, "category_orders": {column: names}, "template": template()}
    return shared | dict.fromkeys(by, column) | maps


def dress(figure: go.Figure, name: str, **layout: Any) -> go.Figure:
    """Return `figure` with the axes, layout and lines that `style.toml` has for it, and `layout` on top of them."""
    look = STYLE["figures"][name]
    figure.update_xaxes(look.get("x")).update_yaxes(look.get("y"))
    for line in look.get("lines", ()):
        figure.add_hline(**line) if "y" in line else figure.add_vline(**line)
    return figure.update_layout({"template": template()} | look.get("layout", {}) | layout)


def dots(rows: pd.DataFrame, *, x: str, y: str, by: str, **bars: pd.Series) -> go.Figure:
    """A mark for each row at `x`, on the line of its `y`; those of different `by` one below the other.

    `bars` are `arms` on the axis x.
    """
    figure = px.scatter(rows, x=x, y=y, orientation="h", **looks(by, rows[by], by=["symbol"]), **bars)
    figure.update_traces(marker_size=11).update_yaxes(autorange="reversed", automargin=True, title_text="")
    return figure.update_layout(scattermode="group", scattergap=0.3, legend_title_text="")


def arms(rows: pd.DataFrame, value: str = "speedup", axis: str = "y") -> dict[str, pd.Series]:
    """Arguments of plotly express for the intervals of `value`, from the columns low to high; none where one is NaN."""
    return {f"error_{axis}": rows["high"] - rows[value], f"error_{axis}_minus": rows[value] - rows["low"]}


def readable(name: str) -> str:
    """Return the name of a model or a drafter as people write it.

    >>> readable("smollm2-135m?backend=hf&dtype=bfloat16"), readable("smollm2-135m:q4_0"), readable("lookup(n=1..6,x4)")
    ('SmolLM2-135M, torch bfloat16', 'SmolLM2-135M q4_0', 'prompt lookup')
    """
    if drafter := STYLE["drafters"].get(name.partition("(")[0]):
        return drafter
    source, _, query = name.partition("?")
    source, _, kind = PureWindowsPath(source).name.partition(":")  # of either kind of path
    options = dict(parse_qsl(query))
    engine = {"hf": ", torch", "llama": ", llama.cpp"}.get(options.get("backend"), "")
    model, kind = STYLE["models"].get(source, source), options.get("dtype") or options.get("weights") or kind
    return f"{model}{engine} {kind}".rstrip()

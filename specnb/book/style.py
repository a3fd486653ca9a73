"""One style for all figures: a plotly template whose series differ in color, dash and marker."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path, PureWindowsPath
from textwrap import wrap
from typing import Any
from urllib.parse import parse_qsl

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.io import read_toml

STYLE = read_toml(Path(__file__).with_suffix(".toml"))
COLORS = STYLE["colors"]
MARKERS = STYLE["markers"]
DASHES = STYLE["dashes"]
CONFIG = STYLE["config"]
QUICK = "quick run: checks hold, speeds do not"


def template() -> go.layout.Template:
    """Return the template of all figures; nothing is registered globally."""
    axis = STYLE["axis"]
    layout = STYLE["layout"] | {"colorway": COLORS, "xaxis": axis, "yaxis": axis}
    return go.layout.Template(layout=layout, data=STYLE["traces"])


def series(index: int) -> dict[str, Any]:
    """Return the line and marker of series `index`: each differs in color, dash and shape."""
    return {
        "line_color": COLORS[index],
        "line_dash": DASHES[index],
        "marker_color": COLORS[index],
        "marker_symbol": MARKERS[index],
        "marker_size": 9,
    }


def looks(
    column: str, names: Iterable[str], *, by: Sequence[str] = ("line_dash", "symbol")
) -> dict[str, Any]:
    """Return arguments of plotly express that distinguish the values of `column`.

    They differ in color and in what `by` lists: `line_dash`, `symbol`, or both. `names` are all
    possible values, in order of first use, so each value looks the same in every figure, as in
    `series`; `all` is gray.
    """
    names = [*dict.fromkeys(names)]
    sequences = {"color_discrete": COLORS, "line_dash": DASHES, "symbol": MARKERS}
    maps = {
        f"{key}_map": dict(zip(names, cycle(sequences[key]), strict=False))
        | {"all": sequences[key][-1]}
        for key in ("color_discrete", *by)
    }
    shared = {"color": column, "category_orders": {column: names}, "template": template()}
    shared["render_mode"] = "svg"  # plotly draws many points with WebGL, which lacks our dashes
    return shared | dict.fromkeys(by, column) | maps


def dress(figure: go.Figure, name: str, **layout: Any) -> go.Figure:
    """Return `figure` with the axes, layout and lines of `name` in `style.toml`, then `layout`."""
    look = STYLE["figures"][name]
    figure.update_xaxes(look.get("x")).update_yaxes(look.get("y"))
    for line in look.get("lines", ()):
        add = figure.add_hline if "y" in line else figure.add_vline
        add(**line, line=STYLE["line"])
    figure.update_layout(template=template(), legend_title_text="")
    return figure.update_layout(look.get("layout", {}) | layout)


def dots(rows: pd.DataFrame, *, x: str, y: str, by: str, **options: Any) -> go.Figure:
    """Draw a dot plot: one mark per row, with groups (`by`) dodged vertically.

    `options` of plotly express are `error_bars` on the axis x, and panels, which are named.
    """
    look = looks(by, rows[by], by=["symbol"])
    figure = px.scatter(rows, x=x, y=y, orientation="h", **look, **options)
    figure.update_traces(marker_size=9)
    figure.update_yaxes(autorange="reversed", automargin=True, title_text="")
    name_panels(figure)
    return figure.update_layout(scattermode="group", scattergap=0.3)


def name_panels(figure: go.Figure, width: int = 99) -> None:
    """Reduce the titles of panels to values ("torch" for "engine=torch"), in lines of `width`."""
    for note in figure.layout.annotations:
        column, _, name = note.text.partition("=")
        if column == "drafter" and name not in STYLE["drafters"].values():
            name = f"draft model: {name}"
        note.text = "<br>".join(wrap(name, width))


def error_bars(rows: pd.DataFrame, value: str = "speedup", axis: str = "y") -> dict[str, pd.Series]:
    """Return arguments of plotly express for the intervals of `value`.

    Bounds are the columns VALUE_low and VALUE_high, or else low and high. A row whose bounds are
    NaN gets no bar.
    """
    low, high = (rows.get(f"{value}_{end}", rows.get(end)) for end in ("low", "high"))
    return {f"error_{axis}": high - rows[value], f"error_{axis}_minus": rows[value] - low}


def readable(name: str) -> str:
    """Return the display name of a model or a drafter.

    >>> readable("smollm2-135m?backend=hf&dtype=bfloat16"), readable("smollm2-135m:q4_0")
    ('SmolLM2-135M, torch bfloat16', 'SmolLM2-135M q4_0')
    >>> readable("lookup(n=1..6,x4)")
    'prompt lookup'
    """
    if drafter := STYLE["drafters"].get(name.partition("(")[0]):
        return drafter
    source, _, query = name.partition("?")
    source, _, kind = PureWindowsPath(source).name.partition(":")  # a POSIX or Windows path
    options = dict(parse_qsl(query))
    engine = {"hf": ", torch", "llama": ", llama.cpp"}.get(options.get("backend"), "")
    model = STYLE["models"].get(source, source)
    kind = options.get("dtype") or options.get("weights") or kind
    return f"{model}{engine} {kind}".rstrip()

"""What the groups of commands share: how they show what they found, through `cli`, which alone prints."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import pandas as pd

Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


class Show(NamedTuple):
    """What prints for these commands: a JSON document, a table, a line; `complain` prints a line on stderr."""

    json: Callable[[Any], None]
    table: Callable[[str, list[str], list[list[str]]], None]
    line: Callable[[str], None]
    complain: Callable[[object], None]


def names(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [word.strip() for word in text.split(",")]


def show_frame(show: Show, title: str, frame: "pd.DataFrame") -> None:
    """As a table, unless it is empty."""
    columns = [str(column).replace("_", " ") for column in frame.columns]
    if len(frame):
        show.table(title, columns, [[_cell(cell) for cell in row] for row in frame.itertuples(index=False)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

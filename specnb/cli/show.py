"""What the groups of commands share: how they show what they found, through `cli`, which alone prints."""

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from specnb.errors import SpecnbError

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = 125
"""Exit code where nothing could be judged: `git bisect run` skips it, and takes 1 to 124 for a bad commit."""
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


class Show(NamedTuple):
    """What prints for these commands: a JSON document, a table, a line; `complain` prints a line on stderr."""

    json: Callable[[Any], None]
    table: Callable[[str, list[str], list[list[str]]], None]
    line: Callable[[str], None]
    complain: Callable[[object], None]


@contextmanager
def judged(complain: Callable[[object], None]) -> Iterator[None]:
    """What keeps a draft from being judged ends with UNKNOWN, whatever it is: Python's own exit code 1 is a verdict.

    A service may print; stdout is for the result.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SpecnbError as error:
        complain(error)
        raise typer.Exit(UNKNOWN) from error
    except (Exception, SystemExit) as error:  # a script that is taken into service may end itself
        traceback.print_exc()
        complain(f"nothing was judged: {type(error).__name__}: {error}")
        raise typer.Exit(UNKNOWN) from error


def names(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return None if text is None else [word.strip() for word in text.split(",")]


def show_frame(show: Show, title: str, frame: "pd.DataFrame") -> None:
    """As a table, unless it is empty."""
    columns = [str(column).replace("_", " ") for column in frame.columns]
    if len(frame):
        show.table(title, columns, [[_cell(cell) for cell in row] for row in frame.itertuples(index=False)])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

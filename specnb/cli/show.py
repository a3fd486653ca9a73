"""What the commands share: how they print, and which exit code an error becomes."""

import json
import math
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specnb.errors import SpecnbError

if TYPE_CHECKING:
    import pandas as pd

    from specnb.measure.pair import PairRun

UNKNOWN = 125
"""Exit code where nothing could be judged: `git bisect run` skips it, and takes 1 to 124 for a bad commit."""
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: object) -> str:
    """Return text whose control characters, which a model may write, are shown and no longer obeyed by a terminal."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", str(text).replace("\r\n", "\n"))


def print_json(document: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(document))  # ASCII: a pipe may have an encoding that lacks what a model writes


def print_table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Print a table whose cells hold anything."""
    title = escape(clean(title))
    table = Table(title=title, title_justify="left", show_header=any(columns))
    for column in columns:
        table.add_column(escape(clean(column.replace("_", " "))), overflow="fold")
    for row in rows:
        table.add_row(*(escape(clean(cell(value))) for value in row))
    Console().print(table if rows else title)


def print_summary(result: "PairRun") -> None:
    """Print what a generation comes to, with one speed-up: measured, else estimated."""
    summary, generation = result.summary, result.generation
    shown = summary.model_dump(exclude={"notes", "k_choice"})
    shown |= {"fork": summary.fork, "translation": generation.translation}
    del shown["estimated_speedup" if summary.speedup else "speedup"]
    labels = {"tau": "tau, tokens per target call", "speedup": "speedup over the baseline"}
    facts = [[labels.get(name, name), value] for name, value in shown.items() if value not in (None, "")]
    facts += [["note", note] for note in summary.notes]
    print_table(f"{generation.target}, {generation.drafter or 'no drafter'}", ["", ""], facts)


def print_result(
    as_json: bool, document: Any, title: str, columns: list[str], rows: list[list[Any]] | None = None
) -> None:
    """Print the document as JSON, or a table of `rows`, which are by default these fields of each of its objects."""
    if as_json:
        print_json(document)
    else:
        print_table(title, columns, [[row[name] for name in columns] for row in document] if rows is None else rows)


def print_frame(title: str, frame: "pd.DataFrame") -> None:
    """Print a table, unless it is empty."""
    if len(frame):
        print_table(title, [*map(str, frame.columns)], [*frame.itertuples(index=False)])


def complain(message: object) -> None:
    """Print one line on stderr."""
    print(f"specnb: {' '.join(clean(message).splitlines())}", file=sys.stderr)


@contextmanager
def judged() -> Iterator[None]:
    """Turn any error into exit code UNKNOWN, because 1 means that a draft is wrong.

    A service may print; stdout is for the result.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # a script that is taken into service may end itself
        expected = isinstance(error, SpecnbError)
        if not expected:
            traceback.print_exc()
        complain(error if expected else f"nothing was judged: {type(error).__name__}: {error}")
        raise typer.Exit(UNKNOWN) from error


def cell(value: Any) -> str:
    """Return the text of a table's cell: four digits of a number, nothing for what is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

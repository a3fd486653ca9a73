"""Shared options of commands, printing of results, and exit codes of errors."""

import json
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Exit, Option, Typer
from typer.core import TyperCommand

from specnb.errors import SpecnbError
from specnb.io import read_toml
from specnb.registry import DRAFTERS

if TYPE_CHECKING:
    import pandas as pd

    from specnb.measure.pair import PairRun

UNKNOWN = 125
"""Exit code if nothing could be judged: `git bisect run` skips it; 1 to 124 mean a bad commit."""
EPILOG = "More options: --help-all."
FOLDED = 13
"""Width to which a column of text may be folded."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Json = Annotated[bool, Option("--json", help="print one JSON document")]
OPTIONS = read_toml(Path(__file__).with_name("options.toml"))

Part = tuple[str, list[str], list]
"""A table: its title, its columns (shown unless all are ""), and its rows."""


class Command(TyperCommand):
    """A command whose `--help` shows the most common options, and whose `--help-all` shows all."""

    def parse_args(self, ctx, args):
        if "--help-all" in args:
            for parameter in self.params:
                parameter.hidden = False  # pyright: ignore[reportAttributeAccessIssue]
            args = ["--help"]
        return super().parse_args(ctx, args)


class TakesPairs(Command):
    """A command whose `-p` takes NAME VALUE or NAME=VALUE; typer has no lists of pairs."""

    def parse_args(self, ctx, args):
        rest = iter(args)
        joined = []
        for word in rest:
            joined.append(word)
            if word in ("-p", "--parameter"):
                name = next(rest, "")
                joined.append("=".join([name, *islice(rest, "=" not in name)]))
        return super().parse_args(ctx, joined)


class App(Typer):
    """An app whose commands have their options' help and bounds from `options.toml`."""

    def command(self, name=None, **options):
        def register(function):
            rows = OPTIONS.get(function.__module__.rpartition(".")[2], {}).get(
                function.__name__, {}
            )
            declared = dict(declarations(rows))
            for parameter, option in declared.items():
                function.__annotations__[parameter] = Annotated[
                    function.__annotations__[parameter], option
                ]
            rare = any(option.hidden for option in declared.values())
            defaults = {"cls": Command, "epilog": EPILOG if rare else None}
            return super(App, self).command(name, **defaults | options)(function)

        return register


def declarations(rows: Mapping[str, Any], panel: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each parameter in rows of `options.toml` with typer's declaration of it.

    A capitalized name is that of a group of rows, which help shows in a panel.
    """
    for name, row in rows.items():
        if name.istitle():
            yield from declarations(row, panel=name)
            continue
        facts: dict[str, Any] = {"help": row} if isinstance(row, str) else dict(row)
        facts["help"] = facts["help"].format(drafters=", ".join(DRAFTERS))
        facts |= {"rich_help_panel": panel, "hidden": facts.pop("rare", False)}
        if facts.pop("argument", False):
            yield name, Argument(**facts)
        else:  # by default, typer would add --no-…, and turn k into -k
            names = facts.pop("names", [f"--{name.replace('_', '-')}"])
            yield name, Option(*names, **facts)


def clean(text: object) -> str:
    """Return text with control characters, which a model may generate, escaped for the terminal."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", str(text).replace("\r\n", "\n"))


def print_result(as_json: bool, document: Any, *parts: str | Part | None) -> None:
    """Print `document` as one line of JSON (paths as text), or else `parts`: lines and tables."""
    if as_json:  # ASCII: a pipe's encoding may lack characters that a model generates
        parts = (json.dumps(document, default=str),)
    for part in filter(None, parts):
        print(part) if isinstance(part, str) else print_table(*part)


def print_table(title: str, columns: list[str], rows: list) -> None:
    """Print a table with cells of any type; columns that do not fit are named below it.

    Short columns are never folded, nor are single words (ids, names, numbers) of up to half of the
    width if there is room.
    """
    console = Console()
    table = Table(show_header=any(columns))
    fitting = []
    room = console.width - 1
    for name, *values in zip(columns, *rows, strict=True):
        header, *texts = map(cell, (name.replace("_", " "), *values))
        width = max(map(len, (header, *texts)))
        words = " " not in "".join(texts)
        whole = width <= FOLDED or (words and width <= min(room - 3, console.width // 2))
        room -= 3 + (width if whole else FOLDED)  # a border and two spaces
        if room < 0 and len(fitting) > 1:
            break
        table.add_column(header, no_wrap=whole, overflow="fold")
        fitting.append(texts)
    for row in zip(*fitting, strict=True):
        table.add_row(*row)
    if title:
        print(clean(title))
    if rows:
        console.print(table)
        if left := columns[len(fitting) :]:
            print(f"no room for {', '.join(left)}: widen the terminal, or use --json")


def table_of(title: str, documents: Iterable[Mapping[str, Any]], columns: list[str]) -> Part:
    """Return a table with the fields `columns` of documents."""
    return title, columns, [[row[name] for name in columns] for row in documents]


def facts_of(title: str, facts: Mapping[str, Any]) -> Part:
    """Return a table of the facts that are not missing."""
    return (
        title,
        ["", ""],
        [[name, value] for name, value in facts.items() if value not in (None, "", [])],
    )


def frame_of(title: str, frame: "pd.DataFrame") -> Part | None:
    """Return the table of a frame, or None if it is empty."""
    return (
        (title, [*map(str, frame.columns)], [*frame.itertuples(index=False)])
        if len(frame)
        else None
    )


def records_of(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """Return the rows of a frame in JSON types."""
    return json.loads(frame.to_json(orient="records", date_format="iso"))


def summary_of(result: "PairRun") -> Part:
    """Return the summary table of a generation, with the measured or the estimated speed-up."""
    summary, generation = result.summary, result.generation
    facts = summary.model_dump(
        exclude={"notes", "estimated_speedup" if summary.speedup else "speedup"}
    )
    facts |= {"fork": summary.fork, "translation": generation.translation}
    labels = {
        "tau": "tau, tokens per target call",
        "speedup": "speedup in this engine",
        "over_fastest": "speedup over the baseline",
    }
    title = f"{generation.target}, {generation.drafter or 'no drafter'}"
    title, columns, rows = facts_of(
        title, {labels.get(name, name): value for name, value in facts.items()}
    )
    return title, columns, rows + [["note", note] for note in summary.notes]


def complain(message: object) -> None:
    """Print one line on stderr."""
    print(f"specnb: {' '.join(clean(message).splitlines())}", file=sys.stderr)


@contextmanager
def judged() -> Iterator[None]:
    """Turn any error into exit code UNKNOWN, because 1 means that a draft is wrong.

    What a service prints goes to stderr; stdout is for the result.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # an imported service may exit
        expected = isinstance(error, SpecnbError)
        if not expected:
            traceback.print_exc()
        complain(error if expected else f"nothing was judged: {type(error).__name__}: {error}")
        raise Exit(UNKNOWN) from error


def cell(value: Any) -> str:
    """Return the text of a table cell without markup: four digits of a number, minutes of a time.

    A missing value is "".
    """
    if isinstance(value, float | datetime) and value != value:  # NaN, and NaT of pandas
        value = None
    elif isinstance(value, float):
        value = f"{value:.4g}"
    elif isinstance(value, datetime):
        value = f"{value:%d %b %H:%M}"
    elif isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return "" if value is None else escape(clean(value))

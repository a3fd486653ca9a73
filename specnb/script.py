"""A command with options of its own that a module keeps for itself: run by `python -m`, or by a group of `specnb`."""

from collections.abc import Callable, Sequence
from typing import Any

import typer

from specnb.errors import SpecnbError


def run(name: str, command: Callable[..., Any], words: Sequence[str] | None = None) -> None:
    """Call `command` with the options in `words`, or those that were typed; a SpecnbError is one line, exit 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(words, prog_name=name)
    except SpecnbError as error:
        typer.echo(f"{name}: {error}", err=True)
        raise SystemExit(2) from error

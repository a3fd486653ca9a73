"""What every module does that is run by `python -m`: one command, and errors made on purpose on one line."""

from collections.abc import Callable
from typing import Any

import typer

from specnb.errors import SpecnbError


def run(name: str, command: Callable[..., Any]) -> None:
    """Call `command` with the options that were typed; a SpecnbError becomes one line after `name`, and exit code 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except SpecnbError as error:
        typer.echo(f"{name}: {error}", err=True)
        raise SystemExit(2) from error

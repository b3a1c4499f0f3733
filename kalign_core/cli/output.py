"""How the command line speaks: tables or JSON on standard output, everything else on standard error."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from kalign_core.errors import KalignError

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")


def say(text: str) -> None:
    """One line of progress on standard error."""
    click.echo(text, err=True)


def emit(as_json: bool, data: dict[str, Any], *tables: Table | str) -> None:
    """Print ``data`` as JSON, or ``tables`` for a reader."""
    if as_json:
        click.echo(json.dumps(_strict(data), indent=2, default=str, allow_nan=False))
        return
    # A terminal's width where there is one; files and pipes get whole lines.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 240, highlight=False, soft_wrap=True)
    for table in tables:
        console.print(table, markup=False) if isinstance(table, str) else console.print(table)


def _strict(data: Any) -> Any:
    """``data`` with numbers that JSON has not (NaN, infinities) as text."""
    if isinstance(data, dict):
        return {key: _strict(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_strict(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of text cells."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(_plain(cell) for cell in row))
    return made


def _plain(cell: object) -> str:
    text = "" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell)
    return text.replace("[", "\\[")


def reporting_errors(function: F) -> F:
    """Turn kalign's errors into their message on standard error and their exit code."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KalignError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("stopped; what was decided so far is kept", err=True)
            sys.exit(130)

    return run  # type: ignore[return-value]  # wraps keeps the signature

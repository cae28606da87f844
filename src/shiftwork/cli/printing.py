"""What is shown: tables for people, one JSON document for programs, and nothing that a terminal would obey.

Texts in the database were written by anyone who may enqueue. On their way to a screen, control characters,
escape sequences and marks that turn the direction of writing are made visible, so that none can act.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from shiftwork.printable import clean


def clean_lines(text: object) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(clean, str(text).split("\n")))


def shortened(text: object, most: int = 60) -> str:
    """A text for a cell of a table."""
    said = clean(text)
    return said if len(said) <= most else f"{said[: most - 1]}…"


def at(moment: datetime | None) -> str:
    """An instant, to the second, in UTC."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S}Z"


def document(value: object) -> str:
    """Compact JSON on one line, for people."""
    return json.dumps(value, default=_plain, ensure_ascii=False, separators=(", ", ": "))


def print_json(value: object) -> None:
    """One JSON document, in ASCII, so that no terminal finds anything to obey in it."""
    click.echo(json.dumps(value, default=_plain, indent=2))


def print_answer(said: str, told: Mapping[str, object], *, as_json: bool) -> None:
    """What came of it: a sentence for people, or the same as JSON."""
    if as_json:
        print_json(told)
    else:
        click.echo(said)


def json_line(value: object) -> str:
    """A JSON document in one line, in ASCII."""
    return json.dumps(value, default=_plain)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return list(value)
    return str(value)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()
) -> None:
    """Rows under their headings; `numbers` are the columns that are set to the right."""
    cells = [[clean("" if cell is None else cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, cells, numbers)
        return
    lines = [[name.upper() for name in columns], *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        parts = (
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        )
        click.echo("  ".join(parts).rstrip())


COLOURS = {
    "blocked": "magenta",
    "scheduled": "blue",
    "ready": "cyan",
    "running": "yellow",
    "waiting": "magenta",
    "completed": "green",
    "failed": "red",
    "cancelled": "bright_black",
    "expired": "bright_black",
    "paused": "yellow",
    "lost": "red",
}


def _print_rich(columns: Sequence[str], cells: Sequence[Sequence[str]], numbers: Sequence[str]) -> None:
    from rich import box  # noqa: PLC0415  -- only a terminal needs it
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    used = [place for place in range(len(columns)) if any(row[place] for row in cells)]  # room is scarce
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in (columns[place] for place in used):
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(row[place], style=COLOURS.get(row[place], "")) for place in used))
    Console(highlight=False).print(table)


def print_fields(fields: Mapping[str, Any]) -> None:
    """Names and values below each other; what is empty is left out."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", (), [])}
    width = max(map(len, shown), default=0) + 2
    for name, value in shown.items():
        first, *more = str(value).split("\n")
        click.echo(f"{name:<{width}}{clean(first)}")
        for line in more:
            click.echo(f"{'':<{width}}{clean(line)}")

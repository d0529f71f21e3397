"""What commands print: tables for people, JSON for programs, and what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console

_WIDE = 10_000


class Interrupted(click.ClickException):
    """Ctrl-C, with a line that says how to go on."""

    exit_code = 130

    @override
    def show(self, file: Any = None) -> None:
        click.echo(f"\nInterrupted. {self.message}", err=True)


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Ctrl-C within the block ends the command with exit code 130 and the hint."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(hint) from None


def console() -> Console:
    """Standard output; nothing is wrapped or cut where it is no terminal."""
    from rich.console import Console

    found = Console(highlight=False, soft_wrap=True)
    return found if found.is_terminal else Console(width=_WIDE, highlight=False)


def print_json(value: Any) -> None:
    """The value as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], nothing: str) -> None:
    """Rows under their columns, or the sentence `nothing` where there are none."""
    if not rows:
        click.echo(nothing)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    target = console()
    table = Table(box=box.SIMPLE_HEAD if target.is_terminal else None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    target.print(table)


def as_dict(message: Message) -> dict[str, Any]:
    """A protobuf message as plain values under the names of the .proto file, defaults included."""
    return {field.name: _plain(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is None:
        return list(value) if _repeated(value) else value
    if field.message_type.GetOptions().map_entry:
        return dict(value)
    if _repeated(value):
        return [as_dict(item) for item in value]
    return as_dict(value)


def _repeated(value: Any) -> bool:
    return hasattr(value, "append") and not isinstance(value, (str, bytes))


def ago(moment: float, now: float | None = None) -> str:
    """How long ago a Unix time is, for people."""
    if not moment:
        return "never"
    return f"{duration(max(0.0, (now or time.time()) - moment))} ago"


def duration(seconds: float) -> str:
    """A length of time, for people."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"

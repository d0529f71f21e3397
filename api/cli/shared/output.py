"""The only place that prints: text and tables for people, JSON for programs, and what Ctrl-C leaves behind.

What is printed may hold words of silos, coordinators and tasks. Here every line passes `printable`, tables
hold plain text and no markup, and JSON is escaped; a test looks that no command prints in another way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from roundtable.core.foreign_text import LINE, json_text, printable, printable_lines
from roundtable.core.observability.logs import announce

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

_WIDE = 10_000
_CELL = 200
_BRIEF = 60
_LONGEST = 20_000


class Interrupted(click.ClickException):
    """Ctrl-C, with a line that says how to go on."""

    exit_code = 130


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Ctrl-C within the block ends the command with exit code 130 and the hint."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(hint) from None


def say(line: object = "", *, err: bool = False) -> None:
    """Prints one line, whatever the words in it; an empty one by default."""
    click.echo(printable(line, _LONGEST), err=err)


def tell(as_json: bool, values: Mapping[str, Any], *lines: str) -> None:
    """What a command has done: as JSON for programs, or in lines for people."""
    if as_json:
        print_json(values)
        return
    for line in lines:
        say(line)


def say_lines(text: str, *, err: bool = False) -> None:
    """Prints several lines of ours; words of others in them must have their line ends escaped already."""
    click.echo("\n".join(printable_lines(text, _LONGEST)), err=err)


def say_error(message: object) -> None:
    """Prints why the command fails, on standard error; a line of the log where a service writes JSON."""
    announce(f"Error: {message}", error=True)


def show_error(error: click.ClickException) -> None:
    """Prints a mistake in the command line, with the command's usage where it is known."""
    if isinstance(error, Interrupted):
        say(err=True)
        say(f"Interrupted. {error.message}", err=True)
        return
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # A group without a command: its help is the whole message.
        say_lines(error.format_message(), err=True)
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        say_lines(error.ctx.get_usage(), err=True)
        say(f"Try '{error.ctx.command_path} --help' for help.", err=True)
        say(err=True)
    # Click sets choices one on a line, behind tabs.
    say_error(error.format_message().replace("\n\t", " "))


def confirm(question: str) -> None:
    """Asks; ends the command unless the answer is yes. UsageError where nobody is there to answer."""
    try:
        click.confirm(printable(question), abort=True)
    except click.Abort as error:
        if isinstance(error.__cause__ or error.__context__, EOFError):
            say(err=True)
            raise click.UsageError("nobody answers here: give --yes to go on without being asked") from None
        raise


def ask_secret(name: str, *, twice: bool = False) -> str:
    """Asks for a secret, which the terminal does not show; `twice` against slips."""
    return str(click.prompt(name, hide_input=True, confirmation_prompt=twice))


def console() -> Console:
    """Standard output; nothing is wrapped or cut where it is no terminal."""
    from rich.console import Console

    target = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if target.is_terminal:
        return target
    return Console(width=_WIDE, highlight=False, markup=False, emoji=False)


@contextmanager
def working(on: str) -> Iterator[Callable[[str], None]]:
    """Says what takes seconds, with a moving sign, until the block ends; on a terminal only.

    What it yields takes words on how far it is.
    """
    screen = console()
    if not screen.is_terminal:
        yield lambda _: None
        return
    with screen.status(cell(on)) as status:
        yield lambda how_far: status.update(cell(f"{on}: {how_far}"))


@contextmanager
def transferring(on: str) -> Iterator[Callable[[int, int], None]]:
    """Says how much of a transfer has arrived, until the block ends; on a terminal only."""
    with working(on) as tell:
        yield lambda arrived, size: tell(f"{amount(arrived)} of {amount(size)}")


def amount(count: int) -> str:
    """A number of bytes, for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def cell(text: object, style: str = "", limit: int = _CELL) -> Text:
    """A word for a table or a live display: plain, in one line, of bounded length."""
    from rich.text import Text

    return Text(printable(text, limit), style=style)


def grid(*rows: Sequence[Text | ProgressBar]) -> Table:
    """Cells and bars in columns, without lines, for a live display."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def say_above(live: Console, line: str) -> None:
    """Prints a line above a live display."""
    live.print(cell(line, limit=_LONGEST))


def say_styled(*parts: tuple[str, str]) -> None:
    """Prints one line of (text, style) pairs."""
    from rich.text import Text

    console().print(Text.assemble(*(cell(text, style, _LONGEST) for text, style in parts)))


def print_json(value: Any) -> None:
    """The value as indented JSON."""
    click.echo(json_text(value, indent=2))


def print_json_line(value: Any) -> None:
    """The value as JSON in one line."""
    click.echo(json_text(value))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], nothing: str) -> None:
    """Rows under their columns, or the sentence `nothing` where there are none."""
    if not rows:
        say(nothing)
        return
    from rich import box
    from rich.table import Table

    target = console()
    table = Table(box=box.SIMPLE_HEAD if target.is_terminal else None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(cell(column), overflow="fold")
    for row in rows:
        table.add_row(*(cell("" if value is None else value, limit=LINE) for value in row))
    if target.is_terminal:
        target.print(table)
        return
    with target.capture() as captured:
        target.print(table)
    # Not the blanks up to the longest line, which would wrap the others too wherever they are shown.
    click.echo("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))


def brief(text: str) -> str:
    """The first line of a sentence for a table in which it is not the point, cut where it is long; the whole
    of it belongs into --json, and where one thing alone is shown."""
    first = text.partition("\n")[0]
    whole = first == text and len(first) <= _BRIEF
    return first if whole else f"{first[: _BRIEF - 1].rstrip()}…"


def as_dict(message: Message) -> dict[str, Any]:
    """A protobuf message as plain values under the names of the .proto file, defaults included.

    What is not known is None: of a field that can be absent, its default would be taken for an answer, as an
    epsilon of 0 of a job without noise.
    """
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
    }


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

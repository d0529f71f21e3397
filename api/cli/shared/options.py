"""Options that several commands share."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from roundtable.operator import OperatorClient

Command = TypeVar("Command", bound=Callable[..., Any])

_GIVEN = "roundtable.set"

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


APPROVALS = "the file of --encodings"


def _approvals(context: click.Context, parameter: click.Parameter, file: Path | None) -> Mapping[str, str]:
    if file is None:
        return {}
    from roundtable.core.encodings.foreign.approval import read_approvals

    return read_approvals(file)


encodings_option = click.option(
    "--encodings",
    "approved",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    callback=_approvals,
    help="TOML with [encodings] name = hash: code of others that may run here.",
)
"""Gives a mapping name → hash; without the option an empty one."""


def connection_options(command: Command) -> Command:
    """`--coordinator` and `--credentials`, with their environment variables."""
    command = click.option(
        "--credentials",
        type=click.Path(path_type=Path),
        envvar="ROUNDTABLE_CREDENTIALS",
        show_envvar=True,
        help="Folder with ca.crt, node.crt and node.key; or ca.crt and token.",
    )(command)
    return click.option(
        "--coordinator",
        metavar="HOST:PORT",
        envvar="ROUNDTABLE_COORDINATOR",
        show_envvar=True,
        help="Where the coordinator listens.",
    )(command)


def require_connection(coordinator: str | None, credentials: Path | None) -> tuple[str, Path]:
    """Both options; a usage error names the one that is missing."""
    if not coordinator:
        raise click.UsageError(
            "say which coordinator: --coordinator host:port, or set ROUNDTABLE_COORDINATOR"
        )
    if not credentials:
        raise click.UsageError(
            "say who you are: --credentials FOLDER (made by `roundtable ca issue NAME --role operator`), "
            "or set ROUNDTABLE_CREDENTIALS"
        )
    return coordinator, credentials


def connect(coordinator: str | None, credentials: Path | None) -> OperatorClient:
    """A connection made of the two options."""
    from roundtable.operator import OperatorClient

    return OperatorClient(*require_connection(coordinator, credentials))


def _overrides(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    context.meta[_GIVEN] = values
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{value!r} is not key=value, for example cohort.size=5")
        overrides[key.strip()] = parse_value(text.strip())
    return overrides


def set_arguments() -> list[str]:
    """`--set KEY=VALUE` as the running command was given them, for a command that repeats it."""
    return [word for value in click.get_current_context().meta.get(_GIVEN, ()) for word in ("--set", value)]


def parse_value(text: str) -> Any:
    """The text as a TOML value; what is none is taken as a string, so that quotes may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_overrides,
    help="Override a value of the job file, for example --set cohort.size=5; may be repeated.",
)

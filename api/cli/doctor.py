"""`roundtable doctor`: what is fine on this machine, what is not, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.options import connection_options, json_option
from roundtable.cli.output import console, print_json

if TYPE_CHECKING:
    from roundtable.doctor import Check

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@click.command()
@connection_options
@click.option(
    "--listen", metavar="HOST:PORT", default="0.0.0.0:7443", show_default=True, help="Port to check."
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    default=".",
    help="Folder whose disk is checked; default: here.",
)
@json_option
def doctor(coordinator: str | None, credentials: Path | None, listen: str, state: Path, as_json: bool) -> int:
    """Check versions, ports, certificates, GPU, disk and clock; exit code 1 if something fails.

    With --credentials the certificates are checked, with --coordinator also the way to it.
    """
    from roundtable.doctor import examine

    checks = examine(coordinator, credentials, listen, state)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            _print(check)
    return 1 if any(check.state == "fail" for check in checks) else 0


def _print(check: Check) -> None:
    from rich.text import Text

    line = Text(f"{check.state:<5}", style=_STYLES[check.state])
    line.append(f"{check.name:<13} {check.message}", style="default")
    console().print(line)
    if check.remedy:
        console().print(Text(f"{'':<19}→ {check.remedy}"))

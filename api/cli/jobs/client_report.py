"""`roundtable clients diagnose`: a report of a silo that its people have seen and approved."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import ago, amount, as_dict, interruptible, print_json, say, working
from roundtable.core.errors import ConfigError

if TYPE_CHECKING:
    from roundtable.operator import OperatorClient
    from roundtable.proto.operator_pb2 import Report

_OPEN = ("waiting", "shown")
_PAUSE_SECONDS = 2.0
_SHOWN_LINES = 10


@click.command("diagnose")
@click.argument("silo")
@click.option("--reason", default="", help="For the silo's people: why you ask.")
@click.option("--again", is_flag=True, help="Ask anew, though the last request is over.")
@click.option("--wait", is_flag=True, help="Wait until the silo's people have answered.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the report into this file."
)
@connection_options
@json_option
def diagnose_client(
    silo: str,
    reason: str,
    again: bool,
    wait: bool,
    output: Path | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> int:
    """Ask a silo's people for a report of it.

    It is shown once they have sent it. It has versions, settings without secrets, the doctor's findings and
    the newest lines of the agent's log; the silo's people see it before it is sent, and may deny it. The same
    command shows where that stands. A silo that is away is asked when it comes, within a week. Exit code 1:
    denied, or not answered in time.
    """
    with connect(coordinator, credentials) as operator:
        found = _asked(operator, silo, reason, again)
        if wait and found.status in _OPEN:
            with (
                interruptible("The request stays; the same command shows the answer."),
                working(f"asking {silo}"),
            ):
                while found.status in _OPEN:
                    time.sleep(_PAUSE_SECONDS)
                    found = operator.report(silo)
    if output is not None and found.status == "answered":
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(found.report)
    if as_json:
        report = _content(found) if found.status == "answered" else None
        print_json({**as_dict(found), "report": report})
    else:
        _show(found, output)
    return 1 if found.status in ("denied", "expired") else 0


def _asked(operator: OperatorClient, silo: str, reason: str, again: bool) -> Report:
    """The open request or, unless another is wanted, the last one; a new one where there is none."""
    try:
        last = operator.report(silo)
    except ConfigError:
        # Nobody has asked yet; whether there is such a silo, asking tells.
        return operator.ask_report(silo, reason)
    return operator.ask_report(silo, reason) if again and last.status not in _OPEN else last


def _content(found: Report) -> dict[str, Any]:
    try:
        return dict(json.loads(found.report))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the report of {found.silo} cannot be read: {error}; -o keeps it as it came"
        ) from error


def _show(found: Report, output: Path | None) -> None:
    asked = f"{found.author} asked {found.silo} {ago(found.created)} (request {found.request})"
    again = f"`roundtable clients diagnose {found.silo} --again` asks anew."
    if found.status == "waiting":
        say(f"{asked}. The silo has not seen it yet: it is asked once connected, and needs a minute.")
    elif found.status == "shown":
        say(f"{asked}. The silo's people can see it, and have not answered yet.")
    elif found.status == "denied":
        say(f"{asked}. The silo's people have denied it: {found.said or 'no reason given'}. {again}")
    elif found.status == "expired":
        say(f"{asked}, and nobody answered in time. {again}")
    else:
        say(f"{asked}, and was answered {ago(found.answered)}: {amount(len(found.report))}.")
        if output is not None:
            say(f"Wrote {output}.")
        else:
            _summarise(_content(found))
        say(again)


def _summarise(report: dict[str, Any]) -> None:
    """The findings that are not fine, and the last lines of the log; -o or --json has all of it."""
    versions, doctor, log = (report.get(name) for name in ("versions", "doctor", "log"))
    if isinstance(versions, dict):
        say(
            "  "
            + ", ".join(
                f"{name} {versions[name]}" for name in ("roundtable", "python", "torch") if name in versions
            )
        )
    for check in doctor if isinstance(doctor, list) else []:
        if isinstance(check, dict) and check.get("state") != "ok":
            say(f"  {check.get('state')}  {check.get('name')}: {check.get('message')}")
    for line in (log if isinstance(log, list) else [])[-_SHOWN_LINES:]:
        if isinstance(line, dict):
            say(f"  {str(line.get('level')).upper()}: {line.get('text')}")
    say("  All of it: -o FILE or --json.")

"""`roundtable doctor`: what is fine on this machine, what is not, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.shared.options import connection_options, json_option
from roundtable.cli.shared.output import interruptible, print_json, say, say_styled, working

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from roundtable.doctor.inquiries import Check, Inquiry

_STYLES = {"ok": "green", "skipped": "dim", "warn": "yellow", "fail": "bold red"}
_FILE = click.Path(path_type=Path, dir_okay=False)


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
@click.option("--server", type=_FILE, help="A coordinator.toml: check all that it names instead.")
@click.option("--agent", type=_FILE, help="An agent.toml: the same as `roundtable client doctor`.")
@json_option
def doctor(
    coordinator: str | None,
    credentials: Path | None,
    listen: str,
    state: Path,
    server: Path | None,
    agent: Path | None,
    as_json: bool,
) -> int:
    """Check this machine: versions, ports, GPU, disk, clock.

    Exit code 1 if something fails. With --credentials the certificates are checked, with --coordinator also
    the way to it. With --server or --agent, everything that these settings name, before the service is
    started.
    """
    if server is None and agent is None:
        from roundtable.doctor.machine_checks import examine

        return report(examine(coordinator, credentials, listen, state), as_json)
    probes: list[Iterator[Inquiry]] = []
    if server is not None:
        from roundtable.doctor.doctor_coordinator import examine_coordinator

        probes.append(examine_coordinator(server))
    if agent is not None:
        from roundtable.doctor.doctor_agent import examine_agent

        probes.append(examine_agent(agent))
    return report(chain.from_iterable(probes), as_json)


@click.command("doctor")
@click.option("--no-rehearsal", is_flag=True, help="Run no task: only their code is read.")
@json_option
@click.pass_context
def client_doctor(context: click.Context, no_rehearsal: bool, as_json: bool) -> int:
    """Check whether this silo's agent would start and train.

    And whether the coordinator would have it. Exit code 1 if not. Each task is tried as a round would: its
    code, its model, its data, one batch of training and one of evaluation, in a training process within the
    silo's limits. Nothing of it is kept, sent or paid for. The coordinator sees the silo for a moment,
    offering nothing.
    """
    from roundtable.doctor.doctor_agent import examine_agent

    assert context.parent is not None
    file = context.parent.params["config"]
    return report(examine_agent(file, skip_tasks=no_rehearsal), as_json)


def report(probes: Iterable[Inquiry], as_json: bool) -> int:
    """Prints what each probe finds as soon as it is known; the exit code that it all makes."""
    found: list[Check] = []
    with interruptible("Nothing was changed; what is printed above was checked."):
        for probe in probes:
            with working(probe.about or f"checking {probe.name}"):
                answer = probe.answer()
            found += answer
            if not as_json:
                for check in answer:
                    _print(check)
    if as_json:
        print_json([asdict(check) for check in found])
    return 1 if any(check.state == "fail" for check in found) else 0


def _print(check: Check) -> None:
    say_styled((f"{check.state:<8}", _STYLES[check.state]), (f"{check.name:<13} {check.message}", "default"))
    if check.remedy:
        say(f"{'':<22}→ {check.remedy}")

"""`roundtable job privacy JOB`: who is protected against whom, what is spent and will be, an audit of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.jobs.privacy_audit import REFUTED, audited, report_values, show_report
from roundtable.cli.shared.options import (
    APPROVALS,
    connect,
    connection_options,
    encodings_option,
    json_option,
)
from roundtable.cli.shared.output import as_dict, print_json, print_table, say

if TYPE_CHECKING:
    from roundtable.core import JobConfig
    from roundtable.proto.operator_pb2 import JobPrivacy


@click.command("privacy")
@click.argument("name", metavar="JOB")
@click.option("--audit", is_flag=True, help="Audit the job, as the coordinator has it, on this machine.")
@click.option(
    "--group",
    type=click.IntRange(min=1),
    help="Also show epsilon for one person with data at so many silos, or so many records in a silo.",
)
@encodings_option
@connection_options
@json_option
def job_privacy(
    name: str,
    audit: bool,
    group: int | None,
    approved: Mapping[str, str],
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> int:
    """Show whom a job protects, against whom, and its epsilon.

    What it has spent, and what it will have spent at its end. With --audit also whether its mechanism bears
    that out: exit code 1 where it does not.
    """
    from roundtable.core.config import job_from_json
    from roundtable.core.encodings.foreign.approval import not_approved
    from roundtable.core.errors import ConfigError

    with connect(coordinator, credentials) as operator:
        told = operator.job_privacy(name)
    job = job_from_json(told.settled_job)
    # Its code would run here, and the job may be somebody else's.
    named = job.transfer.foreign if audit else []
    if reasons := [*not_approved(named, approved, "the auditor", APPROVALS)]:
        raise ConfigError("; ".join(reasons))
    of_group = None if group is None else _of_group(told, job, group)
    if not as_json:
        _show(told, group, of_group, audit)
    found = audited(job, told.silos, as_json) if audit else None
    if as_json:
        more: dict[str, Any] = {"audit": None if found is None else report_values(found)}
        if group is not None:
            more |= {"group": group, "group_epsilon": of_group}
        print_json({**as_dict(told), **more})
    elif found is not None:
        say()
        show_report(found)
    return REFUTED if found is not None and found.refuted else 0


def _of_group(told: JobPrivacy, job: JobConfig, group: int) -> float:
    """Epsilon of all the job's rounds for so many units together."""
    from roundtable.privacy.levels import group_spending, noise_for

    noise = noise_for(job, told.silos, told.dimension)
    return group_spending(job, noise, told.silos, told.dimension, group)


def _show(told: JobPrivacy, group: int | None, of_group: float | None, audit: bool) -> None:
    say(f"job         {told.job}, round {told.rounds_done} of {told.rounds}")
    say(f"level       {told.level}")
    say(f"hides       {told.hides}")
    say(f"people      {told.people}" + ("" if group else " (--group K says how much)"))
    say(f"population  {told.population}, {told.silos} silos when the job began")
    for line in _figures(told):
        say(line)
    if of_group is not None:
        what = "records in one silo" if told.level == "example" else "silos"
        say(
            f"group       epsilon = {of_group:.4f} of a person with data in {group} {what}, by all its rounds"
        )
    if not audit:
        say("audit       none made: --audit makes one of this very job, on this machine, in about a minute")
    say()
    rows = [(each.party, "yes" if each.holds else "no", each.assumption) for each in told.protections]
    print_table(("against", "holds", "by what assumption; else what is seen"), rows, "")
    if told.statement:
        say()
        say(told.statement)


def _figures(told: JobPrivacy) -> list[str]:
    """Epsilon now and to come, each with its limit."""
    lines = []
    if told.HasField("epsilon"):
        at = f"at delta = {told.delta:g}"
        lines = [
            f"spent       epsilon = {told.epsilon:.4f} {at}, by all jobs of the population",
            f"forecast    epsilon = {told.forecast:.4f} at its end; {told.own_forecast:.4f} by it alone",
        ]
    if told.HasField("budget"):
        lines.append(f"budget      epsilon = {told.budget:g} of the job")
    if told.HasField("population_budget"):
        lines.append(f"budget      epsilon = {told.population_budget:g} of the population")
    return lines

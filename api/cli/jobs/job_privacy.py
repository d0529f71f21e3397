"""`roundtable job privacy JOB`: who is protected against whom, what is spent, and what will be at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import as_dict, print_json, print_table, say

if TYPE_CHECKING:
    from roundtable.proto.operator_pb2 import JobPrivacy


@click.command("privacy")
@click.argument("name", metavar="JOB")
@connection_options
@json_option
def job_privacy(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Show who is protected against whom, what the job has spent, and what it will have at its end."""
    with connect(coordinator, credentials) as operator:
        told = operator.job_privacy(name)
    if as_json:
        print_json(as_dict(told))
        return
    say(f"job         {told.job}, round {told.rounds_done} of {told.rounds}")
    say(f"level       {told.level}")
    say(f"hides       {told.hides}")
    say(f"population  {told.population}, {told.silos} silos when the job began")
    for line in _figures(told):
        say(line)
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

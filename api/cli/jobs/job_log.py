"""`roundtable job log`: what the coordinator logged about a job, and what silos share of their logs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import as_dict, interruptible, print_json_line, say
from roundtable.core.observability.log_levels import LEVELS

if TYPE_CHECKING:
    from roundtable.proto.operator_pb2 import JobLogLine


@click.command("log")
@click.argument("name", metavar="JOB")
@click.option("--follow", is_flag=True, help="Go on with what comes, until the job ends.")
@click.option("--silo", default="", help="Lines of this silo alone.")
@click.option("--level", type=click.Choice(LEVELS), help="Lines of this level and above.")
@click.option("--round", "number", type=click.IntRange(min=1), help="Lines of this round alone.")
@connection_options
@json_option
def job_log(
    name: str,
    follow: bool,
    silo: str,
    level: str | None,
    number: int | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Show the log lines of a job.

    The coordinator's, and those that silos share, in the order in which they came. A silo shares none unless
    its administrator says so, in [log_sharing] of agent.toml. --json prints one line each.
    """
    hint = "The job goes on; the same command shows its log again."
    with connect(coordinator, credentials) as operator, interruptible(hint):
        # A later job may be called the same.
        job = operator.job(name).job.id
        lines = operator.job_log(
            job,
            follow=follow,
            silo=silo,
            level=level or "",
            round_number=number or 0,
            away=partial(say, err=True),
        )
        line = None
        for line in lines:
            if as_json:
                print_json_line(as_dict(line))
            else:
                say(_sentence(line))
        if line is None:
            say(f"Job {job} has no such lines: none were logged, or none are kept any more.", err=True)


def _sentence(line: JobLogLine) -> str:
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time))
    place = f"round {line.round}" if line.round else "job"
    kind = f" {line.kind}" if line.kind in ("figures", "output") else ""
    return f"{day} {line.level.upper():<7} {line.silo or 'coordinator'}, {place}{kind}: {line.text}"

"""`roundtable job queue`, `move`, `hold`, `release`: which jobs have their turn, what the others wait for."""

from __future__ import annotations

import time
from pathlib import Path

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import ago, as_dict, duration, print_json, print_table, say
from roundtable.proto.operator_pb2 import Job, QueuedJob


@click.command("queue")
@connection_options
@json_option
def show_queue(coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """List the jobs that have their turn, and those that wait.

    For what they wait, and until when about."""
    with connect(coordinator, credentials) as operator:
        jobs = operator.queue()
    if as_json:
        print_json([as_dict(each) for each in jobs])
        return
    rows = [
        (
            str(each.place or "turn"),
            each.job.id,
            each.job.name,
            each.project,
            str(each.priority) if each.level == each.priority else f"{each.priority} (now {each.level})",
            ago(each.since),
            f"{each.connected}/{each.silos}",
            _until(each),
            each.reason,
        )
        for each in jobs
    ]
    columns = ("place", "job", "name", "project", "priority", "since", "silos", "expected", "waits because")
    print_table(columns, rows, "No job runs or waits; start one with `roundtable job submit job.toml`.")


@click.command("move")
@click.argument("name", metavar="JOB")
@click.option("--priority", type=click.IntRange(-100, 100), required=True, help="Higher goes first.")
@connection_options
@json_option
def move(name: str, priority: int, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Give JOB another priority. One that goes first takes a turn when the round that has it ends."""
    with connect(coordinator, credentials) as operator:
        _tell(operator.move(name, priority=priority), f"has priority {priority}", as_json)


@click.command("hold")
@click.argument("name", metavar="JOB")
@click.option("--reason", default="held by an operator", show_default=True, help="For whoever asks.")
@connection_options
@json_option
def hold(name: str, reason: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Keep JOB in the queue. One that runs completes its round first; `roundtable job release` ends it."""
    with connect(coordinator, credentials) as operator:
        _tell(operator.move(name, hold=reason or "held"), "is held in the queue", as_json)


@click.command("release")
@click.argument("name", metavar="JOB")
@connection_options
@json_option
def release(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Let JOB have its turn again."""
    with connect(coordinator, credentials) as operator:
        _tell(operator.move(name, hold=""), "may have its turn", as_json)


def _until(job: QueuedJob) -> str:
    if not job.place or not job.HasField("expected"):
        return ""
    return f"in {duration(max(0.0, job.expected - time.time()))}"


def _tell(job: Job, said: str, as_json: bool) -> None:
    if as_json:
        print_json(as_dict(job))
    else:
        say(f"{job.name} ({job.id}) {said}.")

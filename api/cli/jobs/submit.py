"""`roundtable job submit` and `job apply`: what starts jobs."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from blake3 import blake3

from roundtable.cli.jobs.watch import watch_to_its_end
from roundtable.cli.shared.options import connect, connection_options, json_option, set_option
from roundtable.cli.shared.output import as_dict, interruptible, print_json, say, transferring, working
from roundtable.core.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from roundtable.core.config import JobConfig
    from roundtable.operator import OperatorClient
    from roundtable.preparation import Prepared
    from roundtable.proto.operator_pb2 import Job

_FILE = click.Path(path_type=Path, dir_okay=False)
_OVER = ("finished", "cancelled", "failed")
_ABSENT = "nothing"


@click.command("submit")
@click.argument("file", type=_FILE)
@set_option
@connection_options
@click.option(
    "--model",
    "start",
    type=click.Path(path_type=Path),
    help="Start from another job's model, or from the folder of a checkpoint in safetensors; default: the "
    "task's own weights.",
)
@click.option("--watch", is_flag=True, help="Show the job's progress until it ends.")
@click.option("--request-id", help="The same one twice gives the same job: for scripts that retry.")
@json_option
def submit(
    file: Path,
    overrides: dict[str, Any],
    coordinator: str | None,
    credentials: Path | None,
    start: Path | None,
    watch: bool,
    request_id: str | None,
    as_json: bool,
) -> int:
    """Start the job that FILE describes.

    From a model made here under its seed, or from a given one.
    """
    from roundtable.preparation import prepare

    with connect(coordinator, credentials) as operator:
        operator.status()
        with working(f"checking {file}"):
            prepared = prepare(file, overrides, start)
        prepared = _standardised(operator, prepared, request_id)
        submitted = _started(operator, prepared, request_id)
        if as_json and not watch:
            print_json(as_dict(submitted))
            return 0
        say(f"Submitted job {submitted.id} ({submitted.name}, {submitted.rounds} rounds).", err=as_json)
        if watch:
            return watch_to_its_end(operator, submitted.id, 1, as_json)
        say(f"Watch it:   roundtable job watch {shlex.quote(submitted.id)}")
        say(f"Its model:  roundtable job model {shlex.quote(submitted.id)} -o model.safetensors")
        return 0


@click.command("apply")
@click.option("-f", "--file", "file", type=_FILE, required=True, help="The job file.")
@set_option
@connection_options
@click.option(
    "--when-changed",
    type=click.Choice(["refuse", "replace"]),
    default="refuse",
    show_default=True,
    help="If your job of this name goes on and is another one: replace it, from its first round, or do not.",
)
@json_option
def apply(
    file: Path,
    overrides: dict[str, Any],
    coordinator: str | None,
    credentials: Path | None,
    when_changed: str,
    as_json: bool,
) -> int:
    """See to it that the job of a file is there.

    For a repository that declares jobs. It is compared with your own newest job of its name, one that goes on
    before one that is over. The same one is left alone, however often this runs; where there is none, or
    another that is over, it is started. Exit code 1: it is there, and was cancelled or failed.
    """
    from roundtable.core.config import job_from_json
    from roundtable.preparation import prepare

    with connect(coordinator, credentials) as operator:
        caller = operator.status().caller
        if not caller:
            raise ProtocolError(
                "the coordinator does not say who calls it: it must be as new as this command"
            )
        with working(f"checking {file}"):
            prepared = prepare(file, overrides)
        named = [each for each in operator.jobs() if each.own and _is_of(each, prepared.job)]
        there = min(named, key=lambda each: each.status in _OVER, default=None)
        changes: list[str] = []
        if there is not None:
            stored = job_from_json(operator.job(there.id).job_config)
            wanted = _with_figures_of(stored, prepared.job)
            changes = list(differences(stored.model_dump(mode="json"), wanted.model_dump(mode="json")))
            if not changes:
                return _told("unchanged", there, changes, as_json)
            if there.status not in _OVER:
                _replace(operator, file, there, changes, when_changed)
        request = _request(prepared.job, caller, there)
        prepared = _standardised(operator, prepared, request)
        started = _started(operator, prepared, request)
        return _told("started", started, changes, as_json)


def _standardised(operator: OperatorClient, prepared: Prepared, request: str | None) -> Prepared:
    """With the figures of [standardise], for which silos are asked where the job lacks some."""
    if prepared.job.standardise is None or prepared.job.standardise.complete:
        return prepared
    from roundtable.asked_silos import standardised_by_silos

    with (
        interruptible("No job was started; the analysis of its columns goes on and is asked anew next time."),
        working("asking silos for means and deviations") as say_how_far,
    ):
        job = standardised_by_silos(operator, prepared.job, request, say_how_far)
    assert job.standardise is not None
    say(f"Columns are standardised by {job.standardise.source}.", err=True)
    return replace(prepared, job=job)


def _with_figures_of(stored: JobConfig, wanted: JobConfig) -> JobConfig:
    """With the figures that the stored job got when it began, if it standardises the same columns."""
    mine, theirs = wanted.standardise, stored.standardise
    if mine is None or theirs is None or mine.complete or theirs.found == "given":
        return wanted
    if mine.table != theirs.table or mine.described != theirs.described:
        return wanted
    known = {
        name: (column.mean, column.sd)
        for name, column in theirs.columns.items()
        if column.mean is not None and column.sd is not None
    }
    return wanted.model_copy(update={"standardise": mine.filled(known, theirs.source)})


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """`table.key: stored → wanted` for each value that is another."""
    for key in sorted({*stored, *wanted}):
        one, other = stored.get(key, _ABSENT), wanted.get(key, _ABSENT)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{table}{key}.")
        elif one != other:
            yield f"{table}{key}: {one} → {other}"


def _is_of(there: Job, job: JobConfig) -> bool:
    """Whether a job has the other's name; a run of one that is repeated has its number behind it."""
    name, mark, run = there.name.rpartition("#")
    if job.queue.repeat and mark and run.isdigit():
        return name == job.title[:90]
    return there.name == job.title


def _replace(operator: OperatorClient, file: Path, there: Job, changes: list[str], when_changed: str) -> None:
    """Cancels a job that goes on; ConfigError where nobody has said that it may be."""
    if when_changed == "refuse":
        raise ConfigError(
            f"{file} is another job than {there.id}, which is {there.status} under the name {there.name!r}: "
            f"{'; '.join(changes)}. Give it a name of its own, or say --when-changed replace, which cancels "
            f"that one after {there.rounds_done} of {there.rounds} rounds and starts this one at its first"
        )
    operator.cancel(there.id)


def _request(job: JobConfig, caller: str, before: Job | None) -> str:
    """The same for the same job after the same one: two who apply it at once start it once."""
    said = "\0".join((caller, before.id if before else "", job.to_json()))
    return f"apply-{blake3(said.encode()).hexdigest()[:32]}"


def _started(operator: OperatorClient, prepared: Prepared, request: str | None) -> Job:
    """The job, begun with its initial model."""
    from roundtable.core.initial_model import travel_note
    from roundtable.core.models import save_model

    if stays := travel_note(prepared.job, prepared.model.layout):
        say(stays, err=True)
    for warning in prepared.warnings:
        say(f"warning: {warning}", err=True)
    with tempfile.TemporaryDirectory(prefix="roundtable-") as folder:
        model = Path(folder) / "initial.safetensors"
        save_model(model, prepared.model)
        hint = "Nothing was started; the same command goes on, what has arrived is not sent twice."
        with interruptible(hint), transferring("sending the first model") as arrived:
            return operator.submit(prepared.job, model, request, arrived)


def _told(action: str, job: Job, changes: list[str], as_json: bool) -> int:
    """Says what was done, and gives the exit code."""
    if as_json:
        print_json({"action": action, "changes": changes, "job": as_dict(job)})
    else:
        for change in changes:
            say(f"  {change}")
        state = f"{job.status}, {job.rounds_done} of {job.rounds} rounds done"
        say(f"Job {job.id} ({job.name}) {'was started' if action == 'started' else 'is unchanged'}: {state}.")
        if job.status in ("cancelled", "failed"):
            say(
                "It is not started again by itself: change the file, or use `roundtable job submit`.",
                err=True,
            )
    return 1 if job.status in ("cancelled", "failed") else 0

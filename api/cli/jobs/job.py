"""`roundtable job`: submit, watch and steer jobs, and fetch their models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.jobs.chosen_model import model_of
from roundtable.cli.jobs.diagnose import diagnose
from roundtable.cli.jobs.export import export, shard_size_option, size_of_shards
from roundtable.cli.jobs.job_log import job_log
from roundtable.cli.jobs.job_privacy import job_privacy
from roundtable.cli.jobs.job_record import record
from roundtable.cli.jobs.job_view import (
    in_one_line,
    loading_lines,
    measured_by_silo,
    print_detail,
    summary_of,
    transfer_sums,
)
from roundtable.cli.jobs.keeping import archive, clone, delete, download
from roundtable.cli.jobs.queue import hold, move, release, show_queue
from roundtable.cli.jobs.submit import apply, submit
from roundtable.cli.jobs.watch import watch_to_its_end
from roundtable.cli.shared.options import connect, connection_options, json_option, set_option
from roundtable.cli.shared.output import (
    ago,
    as_dict,
    brief,
    interruptible,
    print_json,
    print_table,
    say,
    say_lines,
    transferring,
    working,
)
from roundtable.cli.shared.rounds import throughput_of
from roundtable.core.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from roundtable.core.config import JobConfig
    from roundtable.core.models import Model
    from roundtable.operator import OperatorClient
    from roundtable.proto.operator_pb2 import Job

_DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{kind}{n}" for kind in ("COM", "LPT") for n in range(1, 10))}
"""Names that Windows gives to no file."""
_LONGEST_NAME = 100
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def job() -> None:
    """Submit, watch and steer jobs."""


@job.command("check")
@click.argument("file", type=_FILE)
@set_option
@json_option
def check(file: Path, overrides: dict[str, Any], as_json: bool) -> None:
    """Check a job file, its task and what goes together.

    Also the model's layout, the aggregation and privacy.
    """
    from roundtable.preparation import prepare

    with interruptible("Nothing was changed."), working(f"checking {file}"):
        summary = summary_of(prepare(file, overrides))
    if as_json:
        print_json(summary)
        return
    say(f"{file} is valid.")
    for name, value in summary.items():
        say(f"  {name}: {in_one_line(value)}")


@job.command("list")
@connection_options
@json_option
def list_jobs(coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """List all jobs, the newest first."""
    with connect(coordinator, credentials) as operator:
        jobs = operator.jobs()
    if as_json:
        print_json([as_dict(each) for each in jobs])
        return
    rows = [
        (
            each.id,
            each.name,
            each.status,
            f"{each.rounds_done}/{each.rounds}",
            ago(each.submitted),
            each.submitter,
            brief(each.reason),
        )
        for each in jobs
    ]
    columns = ("job", "name", "status", "rounds", "submitted", "by", "reason")
    print_table(columns, rows, "No job yet; start one with `roundtable job submit job.toml`.")


@job.command("show")
@click.argument("target", metavar="JOB|FILE")
@click.option("--resolved", is_flag=True, help="Print the configuration with every default.")
@set_option
@connection_options
@json_option
def show(
    target: str,
    resolved: bool,
    overrides: dict[str, Any],
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Show a job: its state, rounds and silos. With --resolved, JOB may also be a job file."""
    from roundtable.core.config import job_from_json, load_job

    path = Path(target)
    if resolved and (path.suffix == ".toml" or path.is_file()):
        _print_resolved(load_job(path, overrides), as_json)
        return
    with connect(coordinator, credentials) as operator:
        detail = operator.job(target)
    if resolved:
        _print_resolved(job_from_json(detail.job_config), as_json)
    elif as_json:
        values = as_dict(detail)
        values["job_config"] = json.loads(detail.job_config or "{}")
        values["history"] = [json.loads(record) for record in detail.history]
        values["transfer"] = transfer_sums(values["history"])
        values["throughput"] = [{"round": each["round"], **throughput_of(each)} for each in values["history"]]
        measured = measured_by_silo(values["history"], detail.job_config)
        values["measured"] = [] if measured is None else list(measured)
        values["fairness"] = {} if measured is None else measured.plain_fairness
        print_json(values)
    else:
        print_detail(detail)


job.add_command(submit)
job.add_command(apply)
job.add_command(diagnose)
job.add_command(job_privacy)
job.add_command(record)
for command in (archive, clone, delete, download, export, job_log, show_queue, move, hold, release):
    job.add_command(command)


@job.command("watch")
@click.argument("name", metavar="JOB")
@click.option(
    "--from", "start", type=click.IntRange(1), default=1, show_default=True, help="First event shown."
)
@connection_options
@json_option
def watch(name: str, start: int, coordinator: str | None, credentials: Path | None, as_json: bool) -> int:
    """Show a job's progress until it ends.

    Ctrl-C leaves the job running.
    """
    with connect(coordinator, credentials) as operator:
        return watch_to_its_end(operator, name, start, as_json)


@job.command("cancel")
@click.argument("name", metavar="JOB")
@connection_options
@json_option
def cancel(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Cancel a job for good. Its newest committed model stays.

    Of a job that is repeated, its name means the newest run: with that one the series ends.
    """
    _steer(coordinator, credentials, as_json, lambda operator: operator.cancel(name))


@job.command("pause")
@click.argument("name", metavar="JOB")
@connection_options
@json_option
def pause(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Pause a job.

    Its current round is discarded, and starts again when you resume.
    """
    _steer(coordinator, credentials, as_json, lambda operator: operator.pause(name))


@job.command("resume")
@click.argument("name", metavar="JOB")
@connection_options
@json_option
def resume(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Resume a paused job from the round where it stopped."""
    _steer(coordinator, credentials, as_json, lambda operator: operator.resume(name))


@job.command("model")
@click.argument("name", metavar="JOB")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Where to write it; default: NAME.safetensors. With --shard-size a folder, empty or new.",
)
@shard_size_option
@click.option(
    "--best", is_flag=True, help="The best model by [stop] metric: the default where the job keeps it."
)
@click.option("--last", is_flag=True, help="The newest model: the default otherwise.")
@click.option(
    "--round", "number", type=click.IntRange(0), help="The model of this round, if it is kept; 0: the first."
)
@click.option(
    "--task",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the task's code: put in its frozen weights, which do not travel, and verify them too.",
)
@connection_options
@json_option
def model(
    name: str,
    output: Path | None,
    shard_size: str | None,
    best: bool,
    last: bool,
    number: int | None,
    folder: Path | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Fetch a job's model as a safetensors file, and verify it.

    The newest, or the best where the job keeps that, or the model of another round.
    """
    if best + last + (number is not None) > 1:
        raise click.UsageError("--best, --last and --round name different models: choose one")
    most = size_of_shards(shard_size)
    with connect(coordinator, credentials) as operator:
        detail = operator.job(name)
        submitted = detail.job
        chosen = model_of(detail, best=best, last=last, number=number)
        path = output or _file_named(submitted.name)
        shards = None if most is None else _empty_folder(path if output else path.with_suffix(""))
        if shards is not None:
            path = shards / f".{chosen.digest}.safetensors"
        elif path.is_dir():
            raise click.UsageError(f"{path} is a folder: name a file, or give --shard-size for many in it")
        hint = "What has arrived is kept; the same command goes on from there."
        with interruptible(hint), transferring(f"fetching {name}") as arrived:
            operator.get_artifact(chosen.digest, chosen.size, path, arrived)
    from roundtable.core.config import job_from_json
    from roundtable.core.models import open_model

    job = job_from_json(detail.job_config)
    if folder is not None:
        _fill(path, job, folder)
    fetched, size = open_model(path), path.stat().st_size
    if shards is not None and most is not None:
        _cut(path, fetched, shards, most)
        path = shards
    if as_json:
        values = {"path": str(path), "digest": chosen.digest, "size": size}
        print_json({**values, "round": chosen.round, "best": chosen.best, "lacking": fetched.lacking})
        return
    which = ", the best so far" if chosen.best else ""
    say(f"Wrote {path}: {submitted.name} after round {chosen.round} of {submitted.rounds}{which}, verified.")
    if held := fetched.metadata.get("transfer"):
        say(f"This is {held}.")
    if told := fetched.metadata.get("privacy"):
        say(told)
    if lacking := fetched.lacking:
        say(
            f"It lacks {len(lacking)} frozen tensors, such as {lacking[0]!r}, which do not travel: with "
            "--task FOLDER, where the task's code lies, they are put in."
        )
    say("Load it with:")
    for line in loading_lines(job.task, path, partial=bool(lacking)):
        say(f"  {line}")


def _fill(path: Path, job: JobConfig, folder: Path) -> None:
    """Puts the frozen tensors of the task in `folder` into the model file."""
    from roundtable.core.initial_model import whole_model
    from roundtable.core.models import open_model, save_model
    from roundtable.core.task import load_task

    task = load_task(job.task.name, folder, parameters=job.task.parameters, trains=False)
    save_model(path, whole_model(job, task, open_model(path)))


def _empty_folder(folder: Path) -> Path:
    """A folder that holds nothing but what an earlier call of the same command has left hidden."""
    if folder.is_file() or (folder.is_dir() and any(not f.name.startswith(".") for f in folder.iterdir())):
        raise ConfigError(f"{folder} is there already and not empty: name another folder")
    return folder


def _cut(path: Path, fetched: Model, folder: Path, most: int) -> None:
    """Writes the model in the file as files of at most so many bytes, and deletes that one."""
    from roundtable.core.foundation.checkpoint_files import write_checkpoint

    try:
        write_checkpoint(fetched.state_dict(), folder, most)
        path.unlink()
    except OSError as error:
        raise ResourceError(f"{error.filename or folder} cannot be written: {error.strerror}") from error


def _file_named(job: str) -> Path:
    """A model's file in this folder; the name is the coordinator's word, and no way out of the folder.

    What some file systems do not take in a name, such as the colon of `digits.py:Digits`, becomes a hyphen.
    """
    plain = re.sub(r'[<>:"|?*\\/]', "-", job)
    device = plain.partition(".")[0].strip().upper() in _DEVICES
    if plain.startswith(".") or not plain.isprintable() or len(plain) > _LONGEST_NAME or device:
        raise ConfigError(f"the job's name {job!r} cannot name a file here: say where, with -o FILE")
    return Path(f"{plain}.safetensors")


def _steer(
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
    action: Callable[[OperatorClient], Job],
) -> None:
    with connect(coordinator, credentials) as operator:
        steered = action(operator)
    if as_json:
        print_json(as_dict(steered))
        return
    say(
        f"Job {steered.id} ({steered.name}) is {steered.status}, "
        f"{steered.rounds_done} of {steered.rounds} rounds done."
    )


def _print_resolved(config: Any, as_json: bool) -> None:
    from roundtable.cli.shared.resolved import render

    if as_json:
        print_json(config.model_dump(mode="json"))
    else:
        say_lines(render(config).rstrip("\n"))

"""`roundtable job download`, `archive`, `clone` and `delete`: what one does with jobs that are over."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.jobs.watch import watch_to_its_end
from roundtable.cli.shared.options import connect, connection_options, json_option, set_option
from roundtable.cli.shared.output import as_dict, confirm, interruptible, print_json, say, working
from roundtable.core.errors import ConfigError

if TYPE_CHECKING:
    from roundtable.core.config import JobConfig
    from roundtable.job_archive import FetchedJob

_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)
_MAKES_THE_MODEL = ("task", "seed", "model")
UNPROVEN = 3


@click.command("download")
@click.argument("name", metavar="JOB")
@click.option("-o", "--output", type=_FOLDER, help="The folder; default: job-IDENTIFIER.")
@click.option(
    "--all-models", is_flag=True, help="The first model and those of all rounds that are kept, too."
)
@connection_options
@json_option
def download(
    name: str,
    output: Path | None,
    all_models: bool,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Fetch a job into a folder, verified.

    Its configuration, rounds, events and newest model. The same command goes on where it was interrupted, and
    fetches nothing twice.
    """
    from roundtable.job_archive import download as fetch

    with connect(coordinator, credentials) as operator:
        identifier = operator.job(name).job.id
        folder = output or Path(f"job-{_plain(identifier)}")
        hint = "What has arrived is kept; the same command goes on from there."
        with interruptible(hint), working(f"fetching {name}") as tell:
            found = fetch(operator, identifier, folder, all_models, tell)
    if as_json:
        print_json({"folder": str(folder), **asdict(found)})
        return
    say(f"Wrote {len(found.files)} files into {folder}: {found.name} ({found.status}), verified.")
    _say_what_lacks(found)


@click.command("archive")
@click.argument("target", metavar="JOB|FILE")
@click.option("-o", "--output", type=_FILE, help="The archive; default: job-IDENTIFIER.tar.")
@click.option("--verify", is_flag=True, help="Check the archive FILE, offline, in the place of writing one.")
@click.option(
    "--ca",
    "authority",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="With --verify: the root's certificate (ca.crt).",
)
@connection_options
@json_option
def archive(
    target: str,
    output: Path | None,
    verify: bool,
    authority: Path | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> int:
    """Write a job that is over into one file.

    It holds configuration, events, rounds, models and the signed statement. With --verify, check such a file:
    every digest, and that its models, rounds and configuration are those that the coordinator has signed for.
    Exit code 3: the certificate that signed has ended since.
    """
    if verify:
        if authority is None:
            raise click.UsageError("--verify needs --ca FILE, the root's certificate")
        return _verify(Path(target), authority, as_json)
    from roundtable.administration import Administrator
    from roundtable.cli.shared.options import require_connection
    from roundtable.job_archive import archive as write

    with (
        connect(coordinator, credentials) as operator,
        Administrator(*require_connection(coordinator, credentials)) as administrator,
    ):
        identifier = operator.job(target).job.id
        path = output or Path(f"job-{_plain(identifier)}.tar")
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            interruptible("Nothing was written."),
            working(f"archiving {target}") as tell,
            tempfile.TemporaryDirectory(prefix=".roundtable-", dir=path.parent) as scratch,
        ):
            found = write(operator, identifier, path, Path(scratch), administrator.provenance, tell)
    if as_json:
        print_json({"path": str(path), **asdict(found)})
        return 0
    say(f"Wrote {path}: {found.name} ({found.status}) with {len(found.files)} files.")
    _say_what_lacks(found)
    say(f"Check it with: roundtable job archive --verify {path} --ca ca.crt")
    return 0


@click.command("clone")
@click.argument("name", metavar="JOB")
@set_option
@connection_options
@click.option("--watch", is_flag=True, help="Show the job's progress until it ends.")
@click.option("--request-id", help="The same one twice gives the same job: for scripts that retry.")
@json_option
def clone(
    name: str,
    overrides: dict[str, Any],
    coordinator: str | None,
    credentials: Path | None,
    watch: bool,
    request_id: str | None,
    as_json: bool,
) -> int:
    """Start a job of another's configuration.

    It begins with the model that the other began with. --set changes values. Nothing of the task is run here:
    what makes another first model needs `job submit` with the job file.
    """
    from roundtable.core.config import job_from_json, override_job

    with connect(coordinator, credentials) as operator:
        detail = operator.job(name)
        earlier = job_from_json(detail.job_config)
        job = override_job(earlier, overrides)
        _check_same_start(earlier, job)
        if not detail.initial_model.size:
            raise ConfigError(
                f"the model that job {detail.job.id} began with is not kept any more: submit its file anew"
            )
        with interruptible("Nothing was started."):
            started = operator.start(job, detail.initial_model, request_id)
        if as_json and not watch:
            print_json({"cloned": detail.job.id, **as_dict(started)})
            return 0
        say(f"Submitted job {started.id} ({started.name}), a clone of {detail.job.id}.", err=as_json)
        return watch_to_its_end(operator, started.id, 1, as_json) if watch else 0


@click.command("delete")
@click.argument("name", metavar="JOB")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connection_options
@json_option
def delete(name: str, yes: bool, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Delete a job that is over, for good.

    Its models, updates, rounds and events. What it has spent of privacy stays in the ledger, and what
    happened in the audit log; nobody can take either back. `job archive` keeps a job beforehand.
    """
    with connect(coordinator, credentials) as operator:
        job = operator.job(name).job
        if not yes:
            confirm(
                f"Delete job {job.id} ({job.name}, {job.status}, {job.rounds_done} rounds) with its models "
                "and history? The privacy that it has spent stays charged"
            )
        deleted = operator.delete(job.id)
    if as_json:
        print_json(as_dict(deleted))
        return
    say(f"Job {deleted.id} ({deleted.name}) was deleted. Its charges and the audit log stay.")


def _verify(path: Path, authority: Path, as_json: bool) -> int:
    from roundtable.core.evidence.job_archive_check import check_archive

    with working(f"checking {path}"):
        found = check_archive(path, authority.read_bytes())
    proven = not found.signer or found.ends >= time.time()
    if as_json:
        print_json({"path": str(path), "proven": proven, **asdict(found)})
        return 0 if proven else UNPROVEN
    say(f"{path} is sound: job {found.job} ({found.name}), {found.status} after {found.rounds} rounds.")
    say(f"  {found.files} files with {found.models} models; not kept: {found.not_kept}")
    if found.signer:
        say(f"  configuration, rounds and newest model are those that {found.signer} has signed for")
    if not proven:
        ended = datetime.fromtimestamp(found.ends, UTC)
        say(f"UNPROVEN: the certificate of {found.signer} ended on {ended:%Y-%m-%d}.")
    return 0 if proven else UNPROVEN


def _check_same_start(earlier: JobConfig, job: JobConfig) -> None:
    """ConfigError where the job would have another first model than the one that the earlier began with."""
    from roundtable.core.algorithms.known_algorithms import same_layouts

    changed = [key for key in _MAKES_THE_MODEL if getattr(earlier, key) != getattr(job, key)]
    if earlier.algorithm != job.algorithm and not same_layouts(earlier.algorithm, job.algorithm):
        changed.append("algorithm")
    for key in changed:
        raise ConfigError(
            f"--set {key}: a job with another {key} begins with another model, which is made of the "
            "task's code: submit its job file with `roundtable job submit FILE --set ...`"
        )


def _say_what_lacks(found: FetchedJob) -> None:
    if found.not_kept:
        say(f"Models that the coordinator keeps no more: {len(found.not_kept)}.")
    if not found.log_told:
        say("Without the log, which is for those who submitted the job, and for operators.")
    if found.rounds_told < found.rounds:
        say(f"Records of {found.rounds_told} of {found.rounds} rounds: the coordinator tells the newest.")


def _plain(identifier: str) -> str:
    """The coordinator's word as part of a file's name."""
    if not identifier.isalnum() or len(identifier) > 64:
        raise ConfigError(f"the job's identifier {identifier[:64]!r} cannot name a file: say where, with -o")
    return identifier

"""`roundtable job export`: what a job fine-tuned, in the formats of Hugging Face's libraries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.jobs.chosen_model import model_of
from roundtable.cli.shared.options import connect, connection_options, json_option, require_connection
from roundtable.cli.shared.output import interruptible, print_json, say, transferring, working
from roundtable.core.errors import ConfigError, RoundtableError, TaskError
from roundtable.core.quantities import parse_size

if TYPE_CHECKING:
    from roundtable.cli.jobs.chosen_model import ChosenModel
    from roundtable.core.config import JobConfig
    from roundtable.core.foundation.pretrained_task import PretrainedTask
    from roundtable.core.foundation.published import Format, Story
    from roundtable.core.models import Model

_PSEUDONYM = re.compile("[0-9a-f]{8,64}")
_FOLDER = click.Path(path_type=Path, file_okay=False)
shard_size_option = click.option(
    "--shard-size",
    help='Write files of at most this size, such as "2GB", with an index, as Hugging Face\'s libraries do.',
)


def size_of_shards(text: str | None) -> int | None:
    """Bytes, or None for one file."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise click.UsageError(f"--shard-size: {error}") from error


@click.command("export")
@click.argument("target", metavar="JOB|RUN")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["peft", "transformers", "traced", "onnx"]),
    default="peft",
    show_default=True,
    help="peft: the adapter; others: the whole model, adapters merged in float32; traced: for torch.export.",
)
@click.option("-o", "--output", type=_FOLDER, required=True, help="A folder that is empty or not there.")
@click.option(
    "--task",
    "tasks",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("."),
    help="Folder of the task's code; default: this one.",
)
@shard_size_option
@click.option("--best", is_flag=True, help="The best model by [stop] metric.")
@click.option("--last", is_flag=True, help="The newest model.")
@click.option("--round", "number", type=click.IntRange(0), help="The model of this round, if it is kept.")
@connection_options
@json_option
def export(
    target: str,
    kind: Format,
    output: Path,
    tasks: Path,
    shard_size: str | None,
    best: bool,
    last: bool,
    number: int | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Write what a job fine-tuned as other tools read it.

    JOB is one at a coordinator, RUN the folder that a simulation wrote. The base must be on this machine: it
    is checked to be the job's. A README.md says how the model was made, without names of silos; beside it is
    the coordinator's signed statement of that.
    """
    from roundtable.core.config import job_from_json
    from roundtable.core.foundation.published import publish
    from roundtable.core.models import open_model
    from roundtable.operator import partly_fetched

    if best + last + (number is not None) > 1:
        raise click.UsageError("--best, --last and --round name different models: choose one")
    if shard_size is not None and kind != "transformers":
        raise click.UsageError(
            f"--shard-size with --format {kind}: only --format transformers writes a model as many files"
        )
    most = size_of_shards(shard_size)
    run = Path(target)
    with interruptible("Nothing was written."):
        if (run / "job.json").is_file() and (run / "model.safetensors").is_file():
            if best or last or number is not None:
                raise click.UsageError(f"{run} is a simulation's folder: its model is the one that it gives")
            with working(f"exporting {target}"):
                job, model, told = _of_run(run)
                publish(job, _task(job, tasks, output, kind), model, output, kind, told, most)
        else:
            with connect(coordinator, credentials) as operator:
                detail = operator.job(target)
                chosen = model_of(detail, best=best, last=last, number=number)
                job = job_from_json(detail.job_config)
                task = _task(job, tasks, output, kind)
                told = _signed(require_connection(coordinator, credentials), detail.job, chosen)
                fetched = output.absolute().with_name(f".{output.absolute().name}.{chosen.digest[:12]}")
                hint = "What has arrived is kept; the same command goes on from there."
                with interruptible(hint), transferring(f"fetching {target}") as arrived:
                    operator.get_artifact(chosen.digest, chosen.size, fetched, arrived)
            try:
                with working(f"exporting {target}"):
                    publish(job, task, open_model(fetched), output, kind, told, most)
            except RoundtableError:
                # As after an interruption: the same command takes it up, and fetches nothing.
                waiting = fetched.replace(partly_fetched(fetched, chosen.digest))
                say(f"The fetched model is kept for another try with the same -o: {waiting}", err=True)
                raise
            fetched.unlink()
    files = sorted(file.name for file in output.iterdir())
    if as_json:
        print_json({"folder": str(output), "format": kind, "round": told.round, "files": files})
        return
    say(f"Wrote {output}: {told.job} after round {told.round}, {', '.join(files)}.")


def _of_run(run: Path) -> tuple[JobConfig, Model, Story]:
    from roundtable.core.config import job_from_json
    from roundtable.core.foundation.published import Story
    from roundtable.core.models import open_model

    try:
        job = job_from_json((run / "job.json").read_text(encoding="utf-8"))
        lines = (run / "history.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line)["record"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run} is no whole run of a simulation: {error}") from error
    model = open_model(run / "model.safetensors")
    round = int(model.metadata.get("round", len(records)))
    names = {name for record in records[:round] for name in record.get("contributors", ())}
    silos = [f"silo {number}" for number in range(1, len(names) + 1)]
    return job, model, Story(job.title, round, silos)


def _task(job: JobConfig, folder: Path, output: Path, kind: Format) -> PretrainedTask:
    """The job's task, where what it makes can be written: told before anything is fetched."""
    from roundtable.core.foundation.pretrained_task import PretrainedTask
    from roundtable.core.foundation.published import check_publishable
    from roundtable.core.task import load_task

    task: Any = load_task(job.task.name, folder, parameters=job.task.parameters, trains=False)
    if not isinstance(task, PretrainedTask):
        raise TaskError(
            f"task {job.task.name!r} is no rt.HuggingFaceTask or rt.HuggingFaceClassifier, so that nobody "
            "knows which files its model would be: `roundtable job model` fetches it as safetensors"
        )
    check_publishable(task, output, kind)
    return task


def _signed(place: tuple[str, Path], job: Any, chosen: ChosenModel) -> Story:
    """What the coordinator has signed of the model: silos under the pseudonyms that they have in this job.

    Nothing of a model that no round made, nor where the coordinator has no key to sign with.
    """
    import grpc

    from roundtable.administration import Administrator
    from roundtable.core.errors import IdentityError
    from roundtable.core.foundation.published import Story
    from roundtable.core.identity.credentials import CA_CERTIFICATE
    from roundtable.core.identity.signing import open_envelope

    if chosen.round == 0:
        return Story(job.name, 0, ())
    try:
        with Administrator(*place) as administrator:
            statement = administrator.provenance(job.id, chosen.round)
    except RoundtableError as error:
        cause = error.__cause__
        if isinstance(cause, grpc.RpcError) and cause.code() == grpc.StatusCode.FAILED_PRECONDITION:
            return Story(job.name, chosen.round, ())
        raise
    try:
        authority = (place[1] / CA_CERTIFICATE).read_bytes()
        signed = open_envelope(json.loads(statement), authority, "coordinator", "provenance")
        rounds = signed.values["rounds"]
        names = {str(name) for each in rounds for name in each.get("participants", ())}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IdentityError(f"the coordinator's statement of this model proves nothing: {error}") from error
    if signed.values.get("model") != chosen.digest:
        raise IdentityError("the coordinator has signed for another model than the one that it gave")
    if odd := sorted(name for name in names if not _PSEUDONYM.fullmatch(name)):
        raise IdentityError(f"the coordinator's statement has {odd[0][:40]!r} where a pseudonym belongs")
    return Story(job.name, chosen.round, sorted(names), statement, signed.signer)

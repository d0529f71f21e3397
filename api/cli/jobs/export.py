"""`roundtable job export`: what a job fine-tuned, in the formats of Hugging Face's libraries."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.jobs.chosen_model import model_of
from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import interruptible, print_json, say, working
from roundtable.core.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from roundtable.core.config import JobConfig
    from roundtable.core.foundation.published import Format, Story
    from roundtable.core.models import Model

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command("export")
@click.argument("target", metavar="JOB|RUN")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["peft", "transformers"]),
    default="peft",
    show_default=True,
    help="peft: the adapter; transformers: the whole model, adapters merged in float32.",
)
@click.option("-o", "--output", type=_FOLDER, required=True, help="A folder that is empty or not there.")
@click.option(
    "--task",
    "tasks",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("."),
    help="Folder of the task's code; default: this one.",
)
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
    best: bool,
    last: bool,
    number: int | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Write what a job fine-tuned for peft or transformers.

    JOB is one at a coordinator, RUN the folder that a simulation wrote. The base must be on this machine: it
    is checked to be the job's. A README.md says how the model was made, without names of silos.
    """
    from roundtable.core.foundation.huggingface_task import HuggingFaceTask
    from roundtable.core.foundation.published import publish
    from roundtable.core.task import load_task

    if best + last + (number is not None) > 1:
        raise click.UsageError("--best, --last and --round name different models: choose one")
    run = Path(target)
    with interruptible("Nothing was written."), working(f"exporting {target}"):
        if (run / "job.json").is_file() and (run / "model.safetensors").is_file():
            if best or last or number is not None:
                raise click.UsageError(f"{run} is a simulation's folder: its model is the one that it gives")
            job, model, told = _of_run(run)
        else:
            with (
                tempfile.TemporaryDirectory(prefix="roundtable-") as scratch,
                connect(coordinator, credentials) as own,
            ):
                job, model, told = _of_job(own, target, Path(scratch), best, last, number)
        task: Any = load_task(job.task.name, tasks, parameters=job.task.parameters, trains=False)
        if not isinstance(task, HuggingFaceTask):
            raise TaskError(
                f"task {job.task.name!r} is no rt.HuggingFaceTask, so that nobody knows which files its "
                "model would be: `roundtable job model` fetches it as safetensors"
            )
        publish(job, task, model, output, kind, told)
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
    return job, model, Story(job.title, round, _silos(records[:round]))


def _of_job(
    operator: Any, name: str, scratch: Path, best: bool, last: bool, number: int | None
) -> tuple[JobConfig, Model, Story]:
    from dataclasses import replace

    from roundtable.core.config import job_from_json
    from roundtable.core.foundation.published import Story
    from roundtable.core.models import open_model

    detail = operator.job(name)
    chosen = model_of(detail, best=best, last=last, number=number)
    path = scratch / "model.safetensors"
    operator.get_artifact(chosen.digest, chosen.size, path)
    model = open_model(path)
    # The file goes, and with it what is mapped from it.
    local = {name: value.clone() for name, value in model.local.items()}
    model = replace(model, vector=model.vector.clone(), local=local)
    records = [json.loads(record) for record in detail.history]
    told = [record for record in records if record.get("round", 0) <= chosen.round]
    return job_from_json(detail.job_config), model, Story(detail.job.name, chosen.round, _silos(told))


def _silos(records: list[dict[str, Any]]) -> int:
    return len({name for record in records for name in record.get("contributors", ())})

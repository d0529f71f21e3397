"""`roundtable task`: one batch of a task, tried and explained before a job is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import json_option, set_option
from roundtable.cli.shared.output import interruptible, print_json, say, say_lines, working
from roundtable.core.errors import RoundtableError

if TYPE_CHECKING:
    from roundtable.client.first_batch.oddities import Oddity
    from roundtable.client.first_batch.trial import Trial
    from roundtable.core.config import JobConfig


@click.group()
def task() -> None:
    """Try out a task before a job runs."""


@task.command("check")
@click.argument("reference", metavar="FILE[:CLASS]")
@click.option(
    "--job",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Job file: batch size, learning rate, parameters, how data are split.  [default: all defaults]",
)
@click.option("--client", type=click.IntRange(0), default=0, show_default=True, help="Simulated client.")
@set_option
@json_option
def check(reference: str, file: Path | None, client: int, overrides: dict[str, Any], as_json: bool) -> int:
    """Try one batch of a task and explain it.

    Opens a simulated client's data, computes loss, gradient, one step and metrics on one batch, and says what
    is odd. Nothing is kept. Exit code 1: something fails.
    """
    from roundtable.simulation.first_trial import try_task

    with interruptible("Nothing was changed."), working(f"trying {reference}"):
        job, trial, odd = try_task(reference, file, overrides, client)
    if as_json:
        print_json(_values(trial, odd))
    else:
        _tell(job, trial, odd)
    return 0 if trial.error is None else 1


def _values(trial: Trial, odd: list[Oddity]) -> dict[str, Any]:
    return {
        "client": trial.client,
        "training_examples": trial.examples,
        "test_examples": trial.test_examples,
        "batch": trial.shapes,
        "classes": trial.classes.scores if trial.classes else None,
        "trained_values": trial.trained,
        "frozen_values": trial.frozen,
        "loss": trial.loss,
        "loss_after_a_step": trial.after,
        "metrics": {name: list(pair) for name, pair in trial.metrics.items()},
        "failed": trial.act if trial.error is not None else None,
        "odd": [{"about": each.about, "says": each.says} for each in odd],
    }


def _tell(job: JobConfig, trial: Trial, odd: list[Oddity]) -> None:
    from roundtable.core.plugins.doors import foreign_trace

    for line in _facts(job, trial):
        say(f"  {line}")
    if not odd:
        say("Nothing odd was found.")
        return
    say("One thing is odd:" if len(odd) == 1 else f"{len(odd)} things are odd:")
    for number, each in enumerate(odd, 1):
        say(f"  {number}. {each.says}.")
    if trial.error is not None and not isinstance(trial.error, RoundtableError):
        say_lines(foreign_trace(trial.error).rstrip())


def _facts(job: JobConfig, trial: Trial) -> Iterator[str]:
    yield f"client: {trial.client}, one of {trial.clients} that are simulated"
    if trial.shapes:
        tested = "no test data" if not trial.test_examples else f"{trial.test_examples:,} to test on"
        known = (
            "a stream of training examples" if trial.examples is None else f"{trial.examples:,} to train on"
        )
        yield f"data: {known}, {tested}; a batch of {job.algorithm.batch_size}: {trial.shapes}"
    if trial.trained or trial.frozen:
        frozen = f", {trial.frozen:,} are frozen" if trial.frozen else ""
        yield f"model: {trial.trained:,} values are trained{frozen}"
    if (found := trial.classes) is not None:
        yield f"labels: {found.lowest} to {found.highest} in this batch, {found.scores} scores for each"
    if trial.loss is not None:
        after = "" if trial.after is None else f", {trial.after:.4g} after one step of SGD on it"
        yield f"loss: {trial.loss:.4g} on the batch{after} (learning_rate = {job.algorithm.learning_rate:g})"
    for name, (value, count) in trial.metrics.items():
        if "." not in name and count:
            yield f"{name}: {value / count:.4g} over {count} of the batch's test examples"

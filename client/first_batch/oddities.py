"""What is odd about a trial, in sentences that name the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roundtable.client.first_batch.trial import Trial
from roundtable.core.config import JobConfig
from roundtable.core.errors import NoExamples, RoundtableError
from roundtable.core.measures.families import is_cell
from roundtable.core.plugins.doors import described

_FAR, _NEAR = 2.0, 0.1
"""A loss above `_FAR` times ln C and one more, or below `_NEAR` times ln C, is not an untrained model's."""
_LEAPS = 3.0
STATE = "state"
"""The word for what goes on from one call to the next outside of the model's state."""
_DOES = {
    "data": "data() does not open this client's data",
    "model": "model() does not make a model",
    "loss": "loss() does not take a batch",
    "gradient": "the loss has no gradient",
    "second loss": "loss() takes a batch, and fails when it is asked again",
    "measured loss": "loss() does not take test data, when the model is in evaluation mode and gradients "
    "are off (torch.is_grad_enabled() says so)",
    "metrics": "metrics() does not take a batch",
}


@dataclass(frozen=True)
class Oddity:
    """One thing that is odd: `about` is a stable word for programs, `says` is for people."""

    about: str
    says: str


def oddities(trial: Trial, job: JobConfig) -> list[Oddity]:
    """What is odd, the gravest first; nothing where all is as it should be."""
    return [Oddity(about, says) for about, says in _all(trial, job)]


def _all(trial: Trial, job: JobConfig) -> Iterator[tuple[str, str]]:
    yield from _failure(trial)
    if trial.tight:
        yield "memory", trial.tight
    yield from _site(trial, job)
    yield from _loss(trial, job)
    yield from _batch_norm(trial, job)
    yield from _weights(trial, job)
    yield from _metrics(trial)


def _failure(trial: Trial) -> Iterator[tuple[str, str]]:
    error, found = trial.error, trial.classes
    if error is None:
        return
    if isinstance(error, NoExamples):
        yield "data", f"{trial.client} has no training examples, and takes no part in training"
        return
    said = str(error) if isinstance(error, RoundtableError) else described(error)
    because = ""
    if trial.act == "loss" and found is not None and (found.highest >= found.scores or found.lowest < 0):
        because = (
            f". The labels of this batch run from {found.lowest} to {found.highest}, and the model gives "
            f"{found.scores} scores: labels must be from 0 to {found.scores - 1}"
        )
        if found.lowest > 0 and found.highest - found.lowest < found.scores:
            because += f"; subtract {found.lowest} from them in data()"
        else:
            because += f"; let model() give {found.highest + 1} scores, or mend the labels in data()"
    yield trial.act, f"{_DOES[trial.act]}: {said}{because}"


def _site(trial: Trial, job: JobConfig) -> Iterator[tuple[str, str]]:
    if not trial.asked_site and trial.clients > 1 and trial.act != "data":
        yield (
            "shard",
            f"data() asks neither site.shard(labels) nor site.index or site.name: {trial.clients} clients "
            "have the same data. `mine = site.shard(labels)` gives the rows of each one's share",
        )
    elif job.simulation.splits and not trial.asked_shard and trial.act != "data":
        yield (
            "partition",
            "data() does not ask site.shard(labels), so that [simulation] partition splits nothing: "
            "ask it, or leave partition out",
        )


def _loss(trial: Trial, job: JobConfig) -> Iterator[tuple[str, str]]:
    if trial.loss is None:
        return
    if not math.isfinite(trial.loss):
        yield (
            "loss",
            f"the untrained model's loss is {trial.loss}: look for values in the data that are not finite",
        )
        return
    odd = list(_scale(trial)) or list(_level(trial))
    yield from odd
    yield from _carried(trial)
    for warning in trial.warned[:3]:
        yield "warning", f"loss() makes PyTorch warn: {' '.join(warning.split())[:300]}"
    after = trial.after
    if after is None or odd:
        return
    if not math.isfinite(after) or after > _LEAPS * abs(trial.loss) + 1.0:
        yield (
            "learning_rate",
            f"one step at learning_rate = {job.algorithm.learning_rate:g} turns the batch's loss from "
            f"{trial.loss:.4g} into {after:.4g}: lower algorithm.learning_rate, scale the inputs, or set "
            "max_gradient_norm",
        )


def _carried(trial: Trial) -> Iterator[tuple[str, str]]:
    carried, names = trial.carried, ""
    if trial.loss_moved:
        differs = f"loss() gives {trial.loss:.4g} and then {trial.again:.4g} of"
    elif carried is not None:
        differs = f"the gradient of loss() moves by {carried.change:.1%} once another client was there, for"
    else:
        return
    if carried is not None and carried.names:
        names = f" (what moved: {', '.join(carried.names[:4])}{', …' if len(carried.names) > 4 else ''})"
    yield (
        STATE,
        f"{differs} the same weights, batch and random numbers. It seems to keep something between calls, as "
        f"a counter or an average in an attribute{names}: simulated clients share that, what is measured "
        "meanwhile moves it, and it does not travel. Register it as a buffer of the model, follow "
        "context.round, or return it with the batch",
    )


def _scale(trial: Trial) -> Iterator[tuple[str, str]]:
    if trial.doubled is None:
        return
    if 1.9 < trial.doubled < 2.1:
        yield (
            "summed_loss",
            "loss() grows with the batch: of the same examples taken twice it is twice as large. It seems to "
            "be a sum, and steps and weights of clients count on the mean over the batch: leave out "
            'reduction = "sum", or divide by the number of examples',
        )
    elif 0.45 < trial.doubled < 0.55:
        yield (
            "summed_loss",
            "loss() shrinks with the batch: of the same examples taken twice it is half as large. A mean "
            "seems to be divided by the number of examples once more",
        )


def _level(trial: Trial) -> Iterator[tuple[str, str]]:
    if trial.classes is None or trial.loss is None:
        return
    usual = math.log(trial.classes.scores)
    said = (
        f"the untrained model's loss is {trial.loss:.4g}; one that knows nothing of "
        f"{trial.classes.scores} classes would have about {usual:.3g} (the logarithm of their number) by "
        "cross-entropy"
    )
    if trial.loss > _FAR * usual + 1.0:
        yield (
            "loss",
            f"{said}: are the inputs scaled, as to 0 … 1, and the last weights small?",
        )
    elif 0.0 <= trial.loss < _NEAR * usual:
        yield "loss", f"{said}: is the answer among the inputs, or the model trained on these data already?"


def _batch_norm(trial: Trial, job: JobConfig) -> Iterator[tuple[str, str]]:
    if not trial.lone or trial.drops_last:
        return
    size = job.algorithm.batch_size
    own = trial.examples is not None and (trial.examples % size == 1 or size == 1)
    who = (
        f"the {trial.examples} examples of {trial.client} leave one for the last batch of {size}: it fails"
        if own
        else f"a client whose examples leave one for the last batch of {size} fails"
    )
    yield (
        "batch_norm",
        f"BatchNorm does not train on a batch of one example: {who}. Set another algorithm.batch_size, use "
        "GroupNorm, or return a DataLoader with drop_last = True from data()",
    )


def _weights(trial: Trial, job: JobConfig) -> Iterator[tuple[str, str]]:
    if trial.frozen and trial.trained and job.model.travel == "all":
        share = trial.frozen / (trial.frozen + trial.trained)
        yield (
            "frozen",
            f"{trial.frozen:,} of the model's values ({share:.0%}) are frozen and travel each round, as "
            '[model] travel = "all" says: "trainable" sends what is trained alone',
        )
    if trial.untouched:
        names = ", ".join(map(repr, trial.untouched[:3])) + (", …" if len(trial.untouched) > 3 else "")
        yield (
            "gradient",
            f"{len(trial.untouched)} tensors that are trained had no part in the loss: {names}. They stay as "
            "they are; freeze them (requires_grad = False), and they do not travel",
        )


def _metrics(trial: Trial) -> Iterator[tuple[str, str]]:
    for name, (value, count) in trial.metrics.items():
        if is_cell(name):
            continue
        if not math.isfinite(value):
            yield "metric", f"metrics(): {name!r} is {value}, which stays so in every sum"
        elif count == 1 and trial.tested > 1:
            yield (
                "mean_metric",
                f"metrics(): {name!r} counts 1 for a batch of {trial.tested}, as a mean would: every batch "
                "and every silo then weighs alike. Return (sum over the batch, number of examples)",
            )

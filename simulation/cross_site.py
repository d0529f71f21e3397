"""Every client's model, and the global one, on every client's test data: whose model would serve whom."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.observability.metric_sums import means, worked_out
from roundtable.core.privacy_table import NoPrivacy, masking_of
from roundtable.core.tensor_spec import DTYPES
from roundtable.simulation.backend import Backend, Failed, Summing, Work, World
from roundtable.simulation.backends.sequential import Sequential
from roundtable.simulation.reporting.cross_table import GLOBAL, CrossTable
from roundtable.simulation.world.natural_names import NaturalNames

MOST = 100
"""Clients: each model is measured at each of them."""


def check_cross_site(world: World) -> None:
    """ConfigError, before round 1, for a job whose clients' models nobody may see or that are not whole."""
    job, count = world.job, world.job.simulation.clients
    if not isinstance(job.privacy, NoPrivacy) or masking_of(job.privacy) is not None:
        raise ConfigError(
            "cross-site evaluation and [privacy]: it shows each client's own model to all others, which is "
            "what noise and masks keep from everybody; leave one of them out"
        )
    staying = (spec for spec in world.layout.tensors if spec.rule == "local")
    if world.algorithm.keeps_own() or any(DTYPES[spec.dtype].is_floating_point for spec in staying):
        raise ConfigError(
            f"cross-site evaluation with algorithm {job.algorithm.name!r} and this [model]: clients measure "
            "a model with a part of their own, so a row would not be of one model"
        )
    if count > MOST:
        raise ConfigError(
            f"cross-site evaluation over {count} clients would measure {count + 1} models at each of them; "
            f"it is for at most {MOST}"
        )


def cross_site(
    world: World, backend: Backend, vector: Tensor, round: int, work: Sequence[Work], names: NaturalNames
) -> CrossTable:
    """Each client trains once from `vector`, as it would in `round`; what it then has is measured everywhere.

    `vector` is [layout.size] as a round begins with. Raises TaskError for a client that cannot train; one
    that cannot measure leaves its cells empty.
    """
    size = world.layout.model.size
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name, model in [(GLOBAL, vector), *_local_models(world, backend, vector, round, work, size)]:
        rows[name] = {}
        for answer in backend.evaluate(round, model, work):
            found = (
                {} if isinstance(answer, Failed) else means(worked_out(answer.metrics, world.job.metrics)[0])
            )
            rows[name][answer.client] = found
        rows[name] = {item.client: rows[name].get(item.client, {}) for item in work}
    return CrossTable(round - 1, rows, world.job.stop, names)


def _local_models(
    world: World, backend: Backend, vector: Tensor, round: int, work: Sequence[Work], size: int
) -> list[tuple[str, Tensor]]:
    """(client, its model as a vector) in the order of `work`."""
    summed = isinstance(backend, Summing) and backend.sums_updates
    trainer: Backend = Sequential(world) if summed else backend
    places = trainer.rows(len(work))
    for answer in trainer.train(round, vector, work, [places[place] for place in range(len(work))]):
        if isinstance(answer, Failed):
            raise TaskError(f"cross-site evaluation: {answer.client} could not train: {answer.detail}")
    models = []
    for place, item in enumerate(work):
        model = vector.clone()
        model[:size] += places[place, :size].to("cpu", torch.float32)
        models.append((item.client, model))
    return models

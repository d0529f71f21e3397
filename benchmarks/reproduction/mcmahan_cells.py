"""Rounds to an accuracy on MNIST, as McMahan et al. (2017) count them in their tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import roundtable as rt
from roundtable.core.config import JobConfig
from roundtable.simulation import simulate

from .cells import HERE
from .mnist_cells import read_mnist, split
from .shares import Examples, Shares

_TRAINED = 60_000


class _Tested(Shares):
    """With the 10,000 test images at the server."""

    test: Examples

    def test_data(self, site: rt.Site) -> Any:
        return self.test.inputs, self.test.labels

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def run(job: JobConfig, options: Mapping[str, Any], data: Path | None) -> tuple[float, dict[str, float]]:
    """The rounds of the best learning rate of the grid, and that rate.

    A rate that has not reached the target in the best one's rounds is given up there. Where none reaches it
    the figure is the job's rounds.
    """
    assert data is not None
    task = _task(job, options["split"], data)
    best, chosen = float(job.rounds), 0.0
    for rate in options["rates"]:
        overrides = {"algorithm.learning_rate": rate, "rounds": int(np.ceil(best))}
        result = simulate(job, task, folder=HERE, overrides=overrides)
        assert job.stop.target is not None
        found = crossed(result.history["central_accuracy"], job.stop.target)
        if found is not None and found < best:
            best, chosen = found, rate
    return best, {"rate": chosen}


def crossed(curve: list[float], target: float) -> float | None:
    """In which round the curve, made monotone, crosses the target: between two by a straight line."""
    before = 0.0
    for number, value in enumerate(curve, 1):
        if value >= target:
            return number - (value - target) / (value - before) if value > before else float(number)
        before = max(before, value)
    return None


def two_hidden() -> nn.Module:
    """Their 2NN of 199,210 parameters."""
    return nn.Sequential(
        *(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    )


def shards(labels: np.ndarray, clients: int, chance: np.random.Generator) -> list[np.ndarray]:
    """Sorted by label and cut into two shards a client, which are dealt out by chance."""
    parts = np.array_split(np.argsort(labels, kind="stable"), 2 * clients)
    dealt = chance.permutation(2 * clients).reshape(clients, 2)
    return [np.sort(np.concatenate([parts[one], parts[other]])) for one, other in dealt]


def _task(job: JobConfig, kind: str, data: Path) -> _Tested:
    images, labels = read_mnist(data)
    every = Examples(torch.from_numpy(images).float().div_(255), torch.from_numpy(labels))
    clients, chance = job.simulation.clients, np.random.default_rng(job.seed)
    trained = labels[:_TRAINED]
    owners = shards(trained, clients, chance) if kind == "shards" else split(trained, kind, clients, chance)
    task = _Tested([every.of(torch.from_numpy(rows)) for rows in owners], two_hidden)
    task.test = every.of(slice(_TRAINED, None))
    return task

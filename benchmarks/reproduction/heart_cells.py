"""FLamby's Fed-Heart-Disease: four hospitals, logistic regression."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import roundtable as rt
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.task import load_task
from roundtable.simulation import simulate

from .cells import HERE

EXAMPLE = HERE.parents[1] / "examples" / "heart"
Heart: Any = type(load_task("heart.py", EXAMPLE))
heart: ModuleType = sys.modules[Heart.__module__]


class OnePlace(Heart):  # type: ignore[misc]
    """Training by Adam in one place: at one hospital, or as FLamby pools all of them."""

    def __init__(self, train: Any) -> None:
        self._train = train

    def data(self, site: rt.Site) -> tuple[Any, Any]:
        return self._train, None

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.001)


def from_published_weights(task: Any, seed: int) -> Any:
    """The task with the initial weights of FLamby's run of that seed: the first layer that torch draws."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = torch.nn.Linear(13, 1).state_dict()

    def model() -> torch.nn.Module:
        layer = torch.nn.Linear(13, 1)
        layer.load_state_dict(weights)
        return layer

    task.model = model
    return task


def hospitals() -> list[Any]:
    """All patients of each hospital."""
    return [heart.read(EXAMPLE / "data" / f"processed.{name}.data") for name in heart.HOSPITALS]


def pooled() -> Any:
    """All training rows, standardised together: FLamby then tests on rows standardised by hospital."""
    kept = [(one, heart.parts(one.diseased)[0]) for one in hospitals()]
    features = torch.cat([one.features[train] for one, train in kept])
    mean, scale = heart.moments(features)
    diseased = torch.cat([one.diseased[train] for one, train in kept])
    return heart.Patients((features - mean) / scale, diseased)


def run(job: JobConfig, options: Mapping[str, Any], data: Path | None) -> tuple[float, dict[str, float]]:
    """(mean accuracy over hospitals, accuracy by hospital) of the last model."""
    halves = [heart.split(one) for one in hospitals()]
    where = options.get("train", "everywhere")
    if where == "nowhere":
        answers = [float(train.diseased.mean() > 0.5) for train, _ in halves]
        right = [(test.diseased == answer) for (_, test), answer in zip(halves, answers, strict=True)]
        return _accuracies(right)
    if where == "everywhere":
        task = Heart()
    elif where == "pooled":
        task = OnePlace(pooled())
    elif where in heart.HOSPITALS:
        task = OnePlace(halves[heart.HOSPITALS.index(where)][0])
    else:
        raise ConfigError(f"options.train = {where!r}: everywhere, pooled, nowhere or a hospital")
    if options.get("weights") == "published":
        task = from_published_weights(task, job.seed)
    result = simulate(job, task, folder=HERE)
    model = task.model()
    model.load_state_dict(result.model.state_dict())
    with torch.no_grad():
        return _accuracies([(model(test.features) > 0) == (test.diseased > 0) for _, test in halves])


def _accuracies(right: list[torch.Tensor]) -> tuple[float, dict[str, float]]:
    single = {name: float(rows.float().mean()) for name, rows in zip(heart.HOSPITALS, right, strict=True)}
    return sum(single.values()) / len(single), single

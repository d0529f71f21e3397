"""A task's loss and metrics that are replayed for clients without being called: to the bit, or not at all."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from simulated_tasks import SIZES, Base, Perceptron, world
from torch import Tensor, nn

from roundtable.core import Site
from roundtable.simulation.backend import Failed, Measured, Work
from roundtable.simulation.backends.sequential import one_thread
from roundtable.simulation.backends.vectorised import recorded_figures
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.shared_evaluation import SharedEvaluation
from roundtable.simulation.world.simulated_clients import Clients

pytestmark = pytest.mark.skipif(load() is None, reason="there are no compiled kernels here")
_HEAT = [1.0]


class Right(Perceptron):
    """How many are right, as most tasks have it."""

    calls = 0

    def data(self, site: Site) -> tuple[Any, Any]:
        train, _ = super().data(site)
        return train, train

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        Right.calls += 1
        return self.figures(model(batch[0]), batch, model)

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"right": ((outputs.argmax(1) == batch[1]).sum(), len(batch[1]))}


class CellsAndCounts(Right):
    """Sums of several types, and counts that are tensors."""

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        guess, labels = outputs.argmax(1), batch[1]
        cells = {f"n{i}": ((guess == i) & (labels == i)) for i in range(4)}
        found = {name: (cell.sum(), cell.numel()) for name, cell in cells.items()}
        found["first"] = (torch.where(labels == 0, outputs[:, 0].double(), 0.0).sum(), (labels == 0).sum())
        found["top"] = (outputs.topk(2).values.sum().view(1), float(len(labels)))
        return found | {"weight": (torch.tensor([0.5, 1.0, 2.0, 1.0])[labels].sum(), 3)}


class ReadsValues(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"most": (outputs.max().item(), 1)}


class Branches(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"most": (outputs.sum() if outputs.sum() > 0.0 else outputs.max(), 1)}


class Numpy(Right):
    """The same number for rows in any order."""

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"ones": (int((batch[1].numpy() == 1).sum()), len(batch[1]))}


class Listed(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"ones": (outputs.sum(), 1 + batch[1].tolist().count(1))}


class Masks(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"some": (outputs[batch[1] > 0].sum(), len(batch[1]))}


class CountsCalls(Right):
    def model(self) -> nn.Module:
        self.asked = 0
        return super().model()

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        self.asked += 1
        return {"right": ((outputs.argmax(1) == batch[1]).sum(), len(batch[1]))}


class Keeps(Right):
    def model(self) -> nn.Module:
        self.kept: list[Tensor] = []
        return super().model()

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        self.kept.append(outputs.argmax(1))
        return {"right": ((self.kept[-1] == batch[1]).sum(), len(batch[1]))}


class Adds(Right):
    """To a tensor of its own."""

    def model(self) -> nn.Module:
        self.total = torch.zeros(())
        return super().model()

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        self.total += 1.0
        return {"right": (outputs.sum() + 0.0 * self.total, len(batch[1]))}


class Draws(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"noisy": ((outputs + torch.rand_like(outputs)).sum(), len(batch[1]))}


class DrawsInPython(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        chosen = [*random.sample(range(10), 10), int(np.random.randint(1))]
        return {"noisy": (outputs.sum() + chosen[-1], len(batch[1]))}


class Penalised(Right):
    """Reads the weights, which are others in the next round."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + sum(p.square().sum() for p in model.parameters())


class Elsewhere(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"moved": (model(batch[0] + 1.0).sum(), len(batch[1]))}


class InPlace(Right):
    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"positive": (outputs.relu_().sum(), len(batch[1]))}


class HasState(Right):
    """As a metric of a library keeps it in an object of its own."""

    def model(self) -> nn.Module:
        self.metric = _Running()
        return super().model()

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"running": (self.metric.update(outputs.sum()), len(batch[1]))}


class _Running:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, value: Tensor) -> Tensor:
        self.seen.append(value)
        return torch.stack(self.seen).sum()


REPLAYED = [Right, CellsAndCounts]
ASKED = [ReadsValues, Branches, Numpy, Listed, Masks, CountsCalls, Keeps, Adds, Draws, DrawsInPython]
ASKED += [Penalised, Elsewhere, InPlace, HasState]


def measured(backend: SharedEvaluation, round: int = 1, shift: float = 0.0) -> list[Measured | Failed]:
    place = backend.world
    work = [Work(place.names[i], i) for i in range(len(SIZES))]
    with one_thread():
        return list(backend.evaluate(round, place.initial.vector + shift, work))


def made(task: Base, monkeypatch: pytest.MonkeyPatch, often: int = 1) -> SharedEvaluation:
    monkeypatch.setattr(recorded_figures, "_OFTEN", often)
    place = world(task)
    return SharedEvaluation(place, Clients(place))


@pytest.mark.parametrize(
    ("task", "size"),
    [
        *((task, None) for task in (*REPLAYED, *ASKED)),
        *((task, 5) for task in (*REPLAYED, Numpy, Keeps, Draws)),
    ],
)
def test_figures_are_the_tasks_to_the_bit(
    task: type[Base], size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, calls = [], []
    for often in (1, 1 << 30):
        backend = made(task(), monkeypatch, often)
        if size is not None:
            job = backend.world.job
            table = job.evaluation.model_copy(update={"batch_size": size})
            backend.world = place = type(backend.world)(
                job.model_copy(update={"evaluation": table}), backend.world.task, backend.world.initial
            )
            assert place.job.evaluation_batch == size
        rounds = [measured(backend, number, 0.25 * number) for number in range(2)]
        Right.calls = 0
        rounds.append(measured(backend, 3, 1.0))
        calls.append(Right.calls)
        found.append(rounds)
    if task is not HasState:
        assert found[0] == found[1]
        assert all(isinstance(answer, Measured) for answers in found[0] for answer in answers)
    batches = sum(-(-n // (size or 100)) for n in SIZES)
    assert calls[1] == batches
    assert calls[0] == (-(-SIZES[0] // (size or 100)) if task in REPLAYED else batches)


class Heated(Right):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * _HEAT[0]


class Thresholded(Right):
    threshold = torch.zeros(())

    def figures(self, outputs: Tensor, batch: Any, model: nn.Module) -> dict[str, Any]:
        return {"above": ((outputs[:, 0] > self.threshold).sum(), len(batch[1]))}


def test_what_is_set_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(Heated(), monkeypatch)
    cold = measured(backend)
    monkeypatch.setattr(sys.modules[__name__], "_HEAT", [2.0])
    for one, other in zip(measured(backend), cold, strict=True):
        assert isinstance(one, Measured)
        assert isinstance(other, Measured)
        assert one.metrics["loss"][0] == pytest.approx(2.0 * other.metrics["loss"][0])


def test_what_is_set_on_the_task_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Thresholded()
    backend = made(task, monkeypatch)
    before = measured(backend)
    task.threshold = torch.tensor(0.1)
    after, Right.calls = measured(backend), 0
    assert after != before
    assert measured(backend) == after
    assert Right.calls == 1
    assert after == measured(made(task, monkeypatch, 1 << 30))


class Mislabelled(Right):
    def data(self, site: Site) -> tuple[Any, Any]:
        (x, labels), test = super().data(site)
        if site.index == 3:
            labels = labels.clone()
            labels[0] = 9
            test = (x, labels)
        return (x, labels), test


def test_values_that_the_task_cannot_do_with_are_one_clients_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulated_tasks.SIZES", [7, 12, 1, 7])
    found = measured(made(Mislabelled(), monkeypatch))
    assert [type(answer) for answer in found] == [Measured, Measured, Measured, Failed]
    assert found[:3] == measured(made(Mislabelled(), monkeypatch, 1 << 30))[:3]

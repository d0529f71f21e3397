"""Clients evaluated one after the other on a model that is put in place once: nobody notices the others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from simulated_tasks import SIZES, Base, Perceptron, world
from torch import Tensor, nn

from roundtable.client import evaluate
from roundtable.core import Site, initial_state
from roundtable.simulation.backend import Failed, Measured, Work, World
from roundtable.simulation.backends.sequential import Sequential, one_thread
from roundtable.simulation.world.simulated_clients import Clients


class TrainsAndTests(Perceptron):
    """The training data serve as test data."""

    def data(self, site: Site) -> tuple[Any, Any]:
        train, _ = super().data(site)
        return train, train


class DrawsNumbers(TrainsAndTests):
    """From all three global generators."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        return {"chance": (random.random() + float(np.random.rand()) + float(torch.rand(())), 1)}


class Counts(TrainsAndTests):
    """Its model changes whenever it is asked."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 4))
        model.register_buffer("seen", torch.zeros(()))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        model.seen.add_(1.0)  # type: ignore[operator,union-attr]
        return super().loss(model, batch) + model.seen  # type: ignore[operator]


class ForgetsItsMode(TrainsAndTests):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        model[1].train()  # type: ignore[index]
        return {}


class Halved(TrainsAndTests):
    """Client 1 has no data, and batches are changed in place."""

    def data(self, site: Site) -> tuple[Any, Any]:
        if site.index == 1:
            raise ValueError("column 'age' is missing")
        return super().data(site)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(0.5)
        return super().loss(model, batch)


def evaluated(
    place: World, clients: Clients, local: dict[str, Tensor] | None = None
) -> list[Measured | Failed]:
    work = [Work(place.names[i], i, local if i == 2 else None) for i in range(len(SIZES))]
    backend = Sequential(place, clients)
    with one_thread():
        return list(backend.evaluate(1, place.initial.vector, work))


@pytest.mark.parametrize("task", [TrainsAndTests, DrawsNumbers, Counts, ForgetsItsMode, Halved])
@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["data made anew", "data held"])
def test_each_client_is_measured_as_if_alone(task: type[Base], budget: int) -> None:
    place = world(task())
    clients = Clients(place, budget)
    model = initial_state(place.task, place.job.seed)
    first, again = evaluated(place, clients), evaluated(place, clients)
    assert [a for a in again if isinstance(a, Measured)] == [a for a in first if isinstance(a, Measured)]
    for index, answer in enumerate(again):
        if isinstance(answer, Failed):
            assert (task, index) == (Halved, 1), answer.detail
            assert "column 'age'" in answer.detail
            continue
        with one_thread():
            test = Clients(place).data(index)[1]
            alone = evaluate(place.task, model, test, place.layout, place.initial.vector)
        assert answer == Measured(place.names[index], alone)
        assert alone["loss"][1] == SIZES[index]


def test_a_clients_own_tensors_are_its_alone() -> None:
    place = world(TrainsAndTests(), model='local = ["2.*"]')
    clients = Clients(place)
    plain = evaluated(place, clients)
    own = evaluated(place, clients, {"2.weight": torch.full((8,), 3.0)})
    assert [a == b for a, b in zip(plain, own, strict=True)] == [True, True, False, True]


def test_data_are_made_where_chance_is_not_seeded() -> None:
    class Random(Base):
        def data(self, site: Site) -> tuple[Any, Any]:
            drawn = torch.randn(5, 6), torch.randint(0, 4, (5,))
            return drawn, drawn

        def model(self) -> nn.Module:
            return nn.Linear(6, 4)

    place = world(Random())
    losses = [
        answer.metrics["loss"] for answer in evaluated(place, Clients(place)) if isinstance(answer, Measured)
    ]
    assert len(set(losses)) == len(SIZES)

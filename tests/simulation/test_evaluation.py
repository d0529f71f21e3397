"""Clients evaluated one after the other on a model that is put in place once: nobody notices the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from simulated_tasks import SIZES, Attention, Base, Convolution, Perceptron, Tokens, world
from torch import Tensor, nn

from roundtable.client import evaluate
from roundtable.core import JobConfig, Site, initial_state
from roundtable.simulation import simulate
from roundtable.simulation.backend import Failed, Measured, Work, World
from roundtable.simulation.backends.sequential import Sequential, one_thread
from roundtable.simulation.backends.vectorised import shared_evaluation
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.recording import Unrecordable, record
from roundtable.simulation.backends.vectorised.row_forward import ROWS, check_rows
from roundtable.simulation.backends.vectorised.shared_evaluation import SharedEvaluation
from roundtable.simulation.world.simulated_clients import Clients


class OwnTests(Base):
    """The training data serve as test data."""

    def data(self, site: Site) -> tuple[Any, Any]:
        train, _ = super().data(site)
        return train, train


class TrainsAndTests(OwnTests, Perceptron):
    pass


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


class Images(OwnTests, Convolution):
    """The kernels do not do all of it."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 1, 1, dilation=2), *super().model())


class Sentences(OwnTests, Attention):
    """Its transposed matrices are the kernels' too."""


class Recurrent(OwnTests, Tokens):
    pass


class Remembers(TrainsAndTests):
    """Its loss reads what the last pass has left in the model."""

    def model(self) -> nn.Module:
        return _Remembering(nn.Linear(6, 4))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + model.last  # type: ignore[operator]


class _Remembering(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.last = found.abs().mean()
        return found


class Mixes(TrainsAndTests):
    """A row's outputs are relative to the batch."""

    def model(self) -> nn.Module:
        return _Centred(nn.Linear(6, 4))


class _Centred(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Noisy(TrainsAndTests):
    def model(self) -> nn.Module:
        return _Noisy(nn.Linear(6, 4))


class _Noisy(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Swaps(TrainsAndTests):
    """Its metrics are of other weights, of other inputs, and of outputs that it changes."""

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        x, labels = batch
        halved = {name: 0.5 * value for name, value in model.state_dict().items()}
        other = torch.func.functional_call(model, halved, (x,))
        outputs = model(x).sub_(1.0).relu_()
        with torch.enable_grad():
            slope = torch.autograd.grad(model(x.requires_grad_()).sum(), x)[0]
        x.requires_grad_(False)
        figures = {
            "other": other,
            "moved": model(x + 1.0),
            "changed": outputs,
            "again": model(x),
            "slope": slope,
        }
        return {name: (float(value.abs().sum()), len(labels)) for name, value in figures.items()}


SHARED = [Images, Sentences, Recurrent, Remembers, Mixes, Noisy, Swaps]


def evaluated(
    place: World,
    clients: Clients,
    local: dict[str, Tensor] | None = None,
    kind: type[Sequential] = Sequential,
    which: Sequence[int] = range(len(SIZES)),
) -> list[Measured | Failed]:
    work = [Work(place.names[i], i, local if i == 2 else None) for i in which]
    backend = kind(place, clients)
    with one_thread():
        return list(backend.evaluate(1, place.initial.vector, work))


@pytest.mark.parametrize("kind", [Sequential, SharedEvaluation])
@pytest.mark.parametrize("task", [TrainsAndTests, DrawsNumbers, Counts, ForgetsItsMode, Halved, *SHARED])
@pytest.mark.parametrize("budget", [0, 1 << 20], ids=["data made anew", "data held"])
def test_each_client_is_measured_as_if_alone(task: type[Base], budget: int, kind: type[Sequential]) -> None:
    """To the bit one after the other; where they share passes within rounding, and the same with anyone."""
    place = world(task())
    clients = Clients(place, budget)
    model = initial_state(place.task, place.job.seed)
    first, again = (evaluated(place, clients, kind=kind) for _ in range(2))
    assert [a for a in again if isinstance(a, Measured)] == [a for a in first if isinstance(a, Measured)]
    others = [evaluated(place, clients, kind=kind, which=which) for which in ([3], [2, 0], [1])]
    assert {a.client: a for some in others for a in some if isinstance(a, Measured)} == {
        a.client: a for a in again if isinstance(a, Measured)
    }
    for index, answer in enumerate(again):
        if isinstance(answer, Failed):
            assert (task, index) == (Halved, 1), answer.detail
            assert "column 'age'" in answer.detail
            continue
        with one_thread():
            test = Clients(place).data(index)[1]
            alone = evaluate(place.task, model, test, place.layout, place.initial.vector)
        close = 0.0 if kind is Sequential else 1e-5
        assert answer.metrics.keys() == alone.keys()
        for name, (total, count) in alone.items():
            assert answer.metrics[name] == (pytest.approx(total, rel=close, abs=close), count)
        assert alone["loss"][1] == SIZES[index]


class Replaces(TrainsAndTests):
    """What training would set on its model is set by the test."""

    def model(self) -> nn.Module:
        model = _Scaled(nn.Linear(6, 4))
        model.register_buffer("centre", torch.zeros(4))
        return model


class _Scaled(nn.Sequential):
    heat = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - self.centre) / self.heat


@pytest.mark.parametrize("name", ["centre", "heat", "weight"])
def test_what_training_sets_anew_on_a_model_is_measured(name: str) -> None:
    place = world(Replaces())
    clients = Clients(place)
    found = []
    for kind in (SharedEvaluation, Sequential):
        backend = kind(place, clients)
        work = [Work(place.names[i], i) for i in range(len(SIZES))]
        with one_thread():
            before = list(backend.evaluate(1, place.initial.vector, work))
            model: Any = backend.module
            if name == "weight":
                model[0].weight = nn.Parameter(torch.zeros(4, 6))
            else:
                setattr(model, name, torch.zeros(4) if name == "centre" else 3.0)
            found.append(list(backend.evaluate(2, place.initial.vector + 0.5, work)))
        assert found[-1] != before
    for mine, theirs in zip(*found, strict=True):
        assert isinstance(mine, Measured)
        assert isinstance(theirs, Measured)
        assert mine.metrics["loss"] == (pytest.approx(theirs.metrics["loss"][0]), theirs.metrics["loss"][1])


def test_how_many_rows_share_a_pass_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    place = world(TrainsAndTests())
    clients = Clients(place)
    together = evaluated(place, clients, kind=SharedEvaluation)
    for rows, size in ((1, 0), (20, 0), (1, 25 * 32)):
        monkeypatch.setattr(shared_evaluation, "_ROWS_TOGETHER", rows)
        monkeypatch.setattr(shared_evaluation, "_BYTES_TOGETHER", size)
        assert evaluated(place, clients, kind=SharedEvaluation) == together


@pytest.mark.parametrize(
    ("task", "joins", "passes"),
    [
        (TrainsAndTests, True, 0),
        (Images, False, 4),
        (Mixes, False, 4),
        (Remembers, False, 4),
        (Noisy, None, 8),
    ],
)
def test_passes_are_shared_where_that_is_the_same(task: type[Base], joins: bool | None, passes: int) -> None:
    """Four clients' loss and metrics: eight passes alone, one a client, or none but the kernels'."""

    class Asks(task):  # type: ignore[misc,valid-type]
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
            return {"right": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}

    if load() is None and joins:
        pytest.skip("there are no compiled kernels here")
    place = world(Asks())
    backend = SharedEvaluation(place, Clients(place))
    work = [Work(place.names[i], i) for i in range(len(SIZES))]
    seen: list[int] = []
    with one_thread():
        list(backend.evaluate(1, place.initial.vector, work))
        backend.module.get_submodule("0").register_forward_hook(lambda *_: seen.append(1))
        list(backend.evaluate(1, place.initial.vector, work))
    assert (None if backend._outputs is None else backend._outputs.joins) is joins
    assert len(seen) == passes


ROWWISE = {
    "layers": lambda x: torch.relu(x @ torch.ones(6, 5) + torch.ones(5)).softmax(1),
    "norm": lambda x: nn.functional.layer_norm(x * 2.0 - x.mean(1, keepdim=True), (6,)),
    "attention": lambda x: torch.bmm(x.view(ROWS, 3, 2), x.view(ROWS, 3, 2).transpose(1, 2)).sum((1, 2)),
    "pieces": lambda x: (x.view(ROWS * 2, 3) @ torch.ones(3, 3) + torch.ones(3)).view(ROWS, 6),
}
MIXED = {
    "a mean over rows": lambda x: x - x.mean(0),
    "a softmax over rows": lambda x: x.softmax(0),
    "rows on columns": lambda x: x @ x.t(),
    "another order": lambda x: x.flip(0),
    "a sum along rows": lambda x: x.cumsum(0),
    "what differs from row to row": lambda x: x + torch.arange(float(ROWS)).view(ROWS, 1),
    "a bias for each row": lambda x: torch.addmm(torch.ones(ROWS, 5).cumsum(0), x, torch.ones(6, 5)),
    "rows as columns": lambda x: x.t().reshape(ROWS, 6) * 1.0,
    "weights that rows meet": lambda x: torch.ones(ROWS, ROWS).tril() @ x,
    "the last row": lambda x: x + x[-1],
    "all rows": lambda x: x * x.sum(),
}


@pytest.mark.parametrize("name", [*ROWWISE, *MIXED])
def test_what_mixes_rows_is_told_from_its_operations(name: str) -> None:
    function = (ROWWISE | MIXED)[name]
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    recording = record(lambda x: [function(x)], [x])
    moved = function(torch.cat([x[:1] + 1.0, x[:-1]]))[1:]
    alike = moved.shape[1:] == function(x).shape[1:] and torch.allclose(moved, function(x)[:-1], atol=1e-6)
    assert alike is (name in ROWWISE), "the example itself"
    if name in ROWWISE:
        check_rows(recording)
    else:
        with pytest.raises(Unrecordable, match="row"):
            check_rows(recording)


def test_a_clients_own_tensors_are_its_alone() -> None:
    place = world(TrainsAndTests(), model='local = ["2.*"]')
    clients = Clients(place)
    plain = evaluated(place, clients)
    own = evaluated(place, clients, {"2.weight": torch.full((8,), 3.0)})
    assert [a == b for a, b in zip(plain, own, strict=True)] == [True, True, False, True]
    shared = evaluated(place, clients, {"2.weight": torch.full((8,), 3.0)}, SharedEvaluation)
    for mine, theirs in zip(shared, own, strict=True):
        assert isinstance(mine, Measured)
        assert isinstance(theirs, Measured)
        assert mine.metrics["loss"] == pytest.approx(theirs.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "tables",
    [{"aggregation": {"validation": {"max_norm": 20.0}}}, {"round": {"mode": "buffered", "buffer": 3}}],
    ids=["left out", "not in the buffer yet"],
)
def test_own_tensors_count_with_the_update(tables: dict[str, Any]) -> None:
    """A client whose update is not in the model goes on from, and is measured with, what it had before."""

    class Outlier(TrainsAndTests):
        def data(self, site: Site) -> tuple[Any, Any]:
            (x, labels), _ = super().data(site)
            return (x * (100.0 if site.index == 3 else 1.0), labels), (x, labels)

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch) * batch[0].abs().max()

    job = world(Outlier(), model='local = ["0.*"]').job
    job = JobConfig.model_validate(job.model_dump(exclude_unset=True) | tables | {"rounds": 1})
    found = simulate(job, Outlier(), progress=False)
    record = found.history.records[0]
    assert record.contributors == ("client-0", "client-1", "client-2")
    assert len(record.client_metrics) == len(SIZES)
    place = replace(world(Outlier(), model='local = ["0.*"]'), initial=found.model)
    begun = [each.metrics for each in evaluated(place, Clients(place)) if isinstance(each, Measured)]
    as_begun = [record.client_metrics[name] == begun[i] for i, name in enumerate(place.names)]
    assert as_begun == [False, False, False, True]


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

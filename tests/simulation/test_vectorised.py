"""Recorded steps against the sequential backend: the same clients, the same weights within rounding."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from simulated_tasks import ALGORITHMS, TASKS, Base, Dropout, Partial, Perceptron, moved, run, world
from torch import Tensor, nn

from roundtable.core import ArrayTask, Site, initial_state
from roundtable.simulation.backend import Failed, Trained, Work, World
from roundtable.simulation.backends.sequential import Sequential, one_thread
from roundtable.simulation.backends.vectorised import Vectorised, why_not

CONTROLLED = 'name = "scaffold"\noption = 1\nmomentum = 0.5\nweight_decay = 0.05'
FAIR = 'name = "qfedavg"\nq = 0.5'
SETTINGS = ALGORITHMS | {"controlled": CONTROLLED, "fair": FAIR}
# Without compiled kernels the update takes one of two ways.
CASES = [(name, True) for name in SETTINGS]
CASES += [(name, False) for name in ("fedprox", "prox-clipped", "controlled")]


@pytest.mark.parametrize(("name", "compiler"), CASES, ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_recorded_clients_equal_sequential_ones(
    task: type[Base], name: str, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr("roundtable.simulation.backends.vectorised.recorded_steps.load", lambda: None)
    place = world(task(), SETTINGS[name])
    vectorised = Vectorised(place, device="cpu")
    expected, wanted = run(Sequential(place), place)
    found, rows = run(vectorised, place)
    assert vectorised.refused is None, vectorised.refused
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(rows, wanted, rtol=2e-4, atol=2e-6)
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, Trained)
        assert isinstance(theirs, Trained)
        assert (mine.client, mine.examples, mine.steps) == (theirs.client, theirs.examples, theirs.steps)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_frozen_weights_are_those_of_the_round() -> None:
    """They need not be the initial ones: a job may start from another's model, and noise falls on all."""
    place = moved(world(Partial(), ALGORITHMS["prox-decayed"]))
    _, rows = run(Vectorised(place, device="cpu"), place)
    torch.testing.assert_close(rows, run(Sequential(place), place)[1], rtol=2e-4, atol=2e-6)


def test_a_second_round_and_any_order_give_the_same_bits() -> None:
    place = world(Perceptron(), "momentum = 0.9")
    backend = Vectorised(place, device="cpu")
    first, again = run(backend, place)[1], run(backend, place)[1]
    assert torch.equal(first, again)
    work = [Work(place.names[index], index) for index in (3, 1)]
    rows = torch.empty(2, place.layout.size)
    with one_thread():
        list(backend.train(2, place.initial.vector, work, rows.unbind()))
    assert torch.equal(rows, first[[3, 1]])


def test_no_global_generator_is_moved() -> None:
    place = world(Dropout())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run(Vectorised(place, device="cpu"), place)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
@pytest.mark.parametrize("task", ["BatchNorm", "Dropout"])
def test_measuring_before_the_first_step_changes_nothing_in_training(task: str, kind: Any) -> None:
    """q-FedAvg with q = 0 sends Δ/η of FedAvg: statistics, chance and mode are as if nothing was measured;
    and what is measured is the same after an evaluation, which leaves the module in its own mode."""
    named: dict[str, type[Base]] = {"BatchNorm": BatchNorm, "Dropout": Dropout}
    places = [world(named[task](), name) for name in ("", 'name = "qfedavg"\nq = 0.0', FAIR)]
    plain, (same, fair) = places[0], places[1:]
    _, wanted = run(Sequential(plain), plain)
    found, rows = run(kind(same), same)
    trained = [number for number, answer in enumerate(found) if isinstance(answer, Trained)]
    assert len(trained) >= 2
    updates = rows[trained, : plain.layout.size] * same.job.algorithm.rate(2)
    torch.testing.assert_close(updates, wanted[trained], rtol=2e-4, atol=2e-6)
    backend = kind(fair)
    before = run(backend, fair)[1]
    list(backend.evaluate(2, fair.initial.vector, [Work(fair.names[0], 0)]))
    assert torch.equal(run(backend, fair)[1][trained], before[trained])


def test_matrix_gradients_are_added_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundtable.simulation.backends.vectorised.recorded_steps.load", lambda: None)
    place = world(Perceptron())
    backend = Vectorised(place, device="cpu")
    run(backend, place)
    assert backend._steps is not None
    sources = [program.source for program in backend._steps._programs.values()]
    assert all(source.count("addmm_(") == 2 for source in sources), "both Linear layers"


class BatchNorm(Base):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


class Cumulative(Base):
    """Its statistics are weighed by how often they moved."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))


class Doubling(Base):
    def model(self) -> nn.Module:
        class Counting(nn.Linear):
            def __init__(self) -> None:
                super().__init__(6, 4)
                self.register_buffer("count", torch.ones((), dtype=torch.int64))

            def forward(self, x: Tensor) -> Tensor:
                self.count.mul_(2)
                return super().forward(x)

        return Counting()


class ReadsValues(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * 2 if loss > 1.0 else loss


class RollsDice(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1.0 + random.random())


class PeeksAtData(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weight = torch.from_numpy(batch[0].detach().numpy().copy()).mean()
        return super().loss(model, batch) * weight


class CountsInNumpy(Perceptron):
    """The same for rows in any order, as two recordings of one client's only batch would have them."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * int((batch[1].numpy() == 1).sum())


class Lists(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + max(batch[1].tolist()))


class Compares(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1.0 if torch.equal(batch[1], batch[1].clamp(max=2)) else 2.0)


class Masks(Perceptron):
    """As padded sequences do: only some rows of a batch have a loss; its shape does not tell how many."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        wanted = batch[1] != 3
        return nn.functional.cross_entropy(model(batch[0])[wanted], batch[1][wanted], reduction="sum")


class Chooses(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        rows = torch.nonzero(batch[1] != 3).flatten()
        return nn.functional.cross_entropy(model(batch[0])[rows], batch[1][rows], reduction="sum")


class Hooked(Perceptron):
    def model(self) -> nn.Module:
        model = super().model()
        next(model.parameters()).register_hook(lambda gradient: 0.1 * gradient)
        return model


class SparseRows(Base):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 4, sparse=True))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[1]), batch[1])


class OwnOptimizer(Perceptron):
    def optimizer(self, parameters: Any, context: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=context.learning_rate / 10)


@pytest.mark.parametrize(
    ("task", "model", "reason"),
    [
        (Cumulative, "", "reads a tensor's value"),
        (Doubling, "", "works with 'count', which stays at each client and is no float"),
        (BatchNorm, 'integers = "average"', "int64"),
        (ReadsValues, "", "reads a tensor's value"),
        (RollsDice, "", "depend on the data or on chance"),
        (PeeksAtData, "", "reads a tensor's value into Python (numpy)"),
        (CountsInNumpy, "", "reads a tensor's value"),
        (Lists, "", "reads a tensor's value"),
        (Compares, "", "reads a tensor's value"),
        (Masks, "", "a boolean mask"),
        (Chooses, "", "nonzero"),
        (Hooked, "", "has a hook on its gradient"),
        (SparseRows, "", "sparse tensors"),
        (OwnOptimizer, "", "optimizer of its own"),
    ],
)
def test_what_cannot_be_recorded_is_named_and_runs_sequentially(
    task: type[Base], model: str, reason: str
) -> None:
    place = world(task(), model=model)
    backend = Vectorised(place, device="cpu")
    random.seed(1)
    found, rows = run(backend, place)
    assert backend.refused is not None
    assert reason in backend.refused
    assert backend.refused in backend.description
    expected, wanted = run(Sequential(place), place)
    assert [type(answer) for answer in found] == [type(answer) for answer in expected]
    trained = [number for number, answer in enumerate(expected) if isinstance(answer, Trained)]
    assert trained
    assert torch.equal(rows[trained], wanted[trained])


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ("", ""),
        ("momentum = 0.9\nweight_decay = 0.01\nmax_gradient_norm = 0.5", ""),
        ('name = "fedbn"', ""),
        ('name = "fedprox"\nmu = 0.3', 'local = ["2.*"]'),
        ("momentum = 0.9", 'local = ["0.weight"]\nbuffers = "local"'),
        ("", 'buffers = "drop"\nintegers = "drop"'),
        ('name = "ditto"\npull = 0.1', ""),
        (CONTROLLED, ""),
        ('name = "fedbabu"\ntuning_steps = 1', ""),
        (
            'name = "fedbabu"\ntuning_steps = 1\nmomentum = 0.9\nweight_decay = 0.1\nmax_gradient_norm = 0.5',
            "",
        ),
        (FAIR, 'local = ["0.weight"]\nbuffers = "local"'),
    ],
)
def test_what_stays_at_clients_is_what_it_is_sequentially(
    algorithm: str, model: str, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm's counter and statistics, and weights of a client's own, over two rounds and in any order."""
    if not compiler:
        monkeypatch.setattr("roundtable.simulation.backends.vectorised.recorded_steps.load", lambda: None)
    place = world(BatchNorm(), algorithm, model=model)
    recorded, plain = Vectorised(place, device="cpu"), Sequential(place)
    kept: dict[str, Mapping[str, Tensor]] = {}
    for number, order in ((1, (0, 1, 2)), (2, (2, 0, 1))):
        work = [Work(place.names[index], index, kept.get(place.names[index])) for index in order]
        found: list[dict[str, Any]] = []
        # Of a client whose last batch has one row, BatchNorm makes a failure.
        rows = [torch.zeros(3, place.layout.sent.size) for _ in range(2)]
        for backend, out in zip((recorded, plain), rows, strict=True):
            with one_thread():
                answers = list(backend.train(number, place.initial.vector, work, out.unbind()))
            found.append({answer.client: answer.local for answer in answers if isinstance(answer, Trained)})
        assert recorded.refused is None, recorded.refused
        torch.testing.assert_close(*rows, rtol=2e-4, atol=2e-6)
        mine, kept = found
        assert mine.keys() == kept.keys()
        assert len(kept) >= 2
        for client, tensors in kept.items():
            assert mine[client].keys() == tensors.keys()
            for name, value in tensors.items():
                same = {"rtol": 2e-4, "atol": 2e-6} if value.is_floating_point() else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(mine[client][name], value, **same)
    own = {name for tensors in kept.values() for name in tensors}
    assert ("1.num_batches_tracked" in own) == ("drop" not in model)
    assert ("0.weight" in own) == ("0.weight" in model)


def test_batch_norm_without_its_counter_is_caught_when_it_writes_its_statistics() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            return y - self.mean

    class Running(Base):
        def model(self) -> nn.Module:
            return Bare()

    place = world(Running())
    backend = Vectorised(place, device="cpu")
    _, rows = run(backend, place)
    assert backend.refused is not None
    assert "changes a buffer" in backend.refused
    assert torch.equal(rows, run(Sequential(place), place)[1])


def test_an_array_task_is_refused_before_anything_runs() -> None:
    class Arrays(ArrayTask):
        def weights(self) -> dict[str, Any]:
            return {"w": torch.zeros(2).numpy()}

    assert "ArrayTask" in str(why_not(world(Arrays()), staying=True))


@pytest.mark.parametrize("rate", [1e30, float(2**70)])
def test_training_that_diverges_is_that_clients_failure(rate: float) -> None:
    # Without normalisation: where it is, whether there is overflow is a matter of the order of products.
    place = world(Dropout(), "")
    job = place.job.model_copy(
        update={"algorithm": place.job.algorithm.model_copy(update={"learning_rate": rate})}
    )
    place = World(job, place.task, place.initial)
    answers, _ = run(Vectorised(place, device="cpu"), place)
    assert any(isinstance(answer, Failed) and answer.kind == "invalid_update" for answer in answers)


class Settled(Perceptron):
    """All clients but the first know their labels beforehand: their losses are hardly more than rounding."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def data(self, site: Site) -> tuple[Any, Any]:
        (inputs, labels), test = super().data(site)
        if site.index:
            inputs = 80.0 * inputs
            with torch.no_grad():
                labels = initial_state(self, 0)(inputs).argmax(1)  # type: ignore[operator]
        return (inputs, labels), test


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2), (2, 1, 3, 0)])
def test_who_comes_first_decides_nothing(order: tuple[int, ...]) -> None:
    """In one process a client meets a shape of batch before all others, in another after: the same bits."""
    place = world(Settled())
    straight = run(Vectorised(place, device="cpu"), place)[1]
    backend, rows = Vectorised(place, device="cpu"), torch.empty_like(straight)
    with one_thread():
        for index in order:
            list(backend.train(2, place.initial.vector, [Work(place.names[index], index)], [rows[index]]))
    assert torch.equal(rows, straight)


class Picky(Perceptron):
    """Batches of one example cannot be recorded."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * float(loss.detach()) / float(loss.detach()) if len(batch[0]) == 1 else loss


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 1, 0)])
def test_a_client_that_cannot_be_recorded_leaves_the_others_as_they_are(order: tuple[int, ...]) -> None:
    place = world(Picky())
    backend, rows = Vectorised(place, device="cpu"), torch.empty(4, place.layout.size)
    with one_thread():
        for index in order:
            list(backend.train(2, place.initial.vector, [Work(place.names[index], index)], [rows[index]]))
    plain = run(Vectorised(world(Perceptron()), device="cpu"), place)[1]
    alone = run(Sequential(place), place)[1]
    # Client 2 has one example alone; the sizes of the others, 7, 12 and 5, leave batches of 3, 4 and 1.
    recorded = [torch.equal(rows[index], plain[index]) for index in range(4)]
    assert recorded == [True, True, False, False]
    assert torch.equal(rows[2:], alone[2:])
    assert "some clients not recorded because it reads a tensor's value" in backend.description

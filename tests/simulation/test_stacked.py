"""Stacked clients against the sequential backend: the same clients, the same weights within rounding."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_tasks import (
    ALGORITHMS,
    SIZES,
    Attention,
    Base,
    Convolution,
    Dropout,
    Partial,
    Perceptron,
    Tokens,
    moved,
    run,
    world,
)
from torch import Tensor, nn

from roundtable.core import Site
from roundtable.simulation.backend import Failed, Trained, Work, World
from roundtable.simulation.backends.sequential import Sequential, one_thread
from roundtable.simulation.backends.stacked import Stacked
from roundtable.simulation.backends.stacked.schedule import turns
from roundtable.simulation.backends.stacked.stack import Stack
from roundtable.simulation.choose_backend import make_backend


def stacked(place: World, device: str = "cpu", **budgets: int) -> Stacked:
    return Stacked(place, device=device, **budgets)


def check(backend: Stacked, place: World, rtol: float = 2e-4, atol: float = 2e-6) -> None:
    """All clients of a round against the sequential backend."""
    expected, wanted = run(Sequential(place), place)
    answers, rows = run(backend, place)
    found = {answer.client: answer for answer in answers}
    assert set(found) == {answer.client for answer in expected}
    for row, truth, theirs in zip(rows, wanted, expected, strict=True):
        mine = found[theirs.client]
        assert type(mine) is type(theirs), mine
        if isinstance(mine, Trained) and isinstance(theirs, Trained):
            assert (mine.examples, mine.steps) == (theirs.examples, theirs.steps)
            assert mine.loss == pytest.approx(theirs.loss, rel=max(rtol, 1e-4))
            torch.testing.assert_close(row, truth, rtol=rtol, atol=atol)
            assert truth.abs().max() > 1e-3


CASES = [(Perceptron, name) for name in ALGORITHMS]
CASES += [(task, name) for task in (Convolution, Attention, Partial) for name in ("fedavg", "prox-clipped")]


@pytest.mark.parametrize(("task", "name"), CASES)
def test_stacked_clients_equal_sequential_ones(task: type[Base], name: str) -> None:
    place = moved(world(task(), ALGORITHMS[name]))
    backend = stacked(place)
    check(backend, place)
    assert backend.refused is None, backend.refused


@pytest.mark.gpu
@pytest.mark.parametrize(("task", "name"), CASES)
def test_stacked_clients_equal_sequential_ones_on_a_gpu(task: type[Base], name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    place = moved(world(task(), ALGORITHMS[name]))
    backend = stacked(place, "cuda")
    check(backend, place, rtol=1e-2, atol=1e-4)  # Convolutions are rounded to TF32 there.
    assert backend.refused is None, backend.refused


def test_attention_is_stacked_and_not_looped_over(recwarn: pytest.WarningsRecorder) -> None:
    place = world(Attention())
    run(stacked(place), place)
    assert not [w for w in recwarn if "batching rule" in str(w.message)]


def test_little_memory_means_smaller_stacks_and_the_same_result() -> None:
    place = world(Perceptron(), ALGORITHMS["momentum"])
    small, large = stacked(place, budget=1, data_budget=1), stacked(place)
    first, second = run(small, place)[1], run(large, place)[1]
    assert small._most == 1
    assert large._most > len(SIZES)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)
    two = stacked(place, budget=2 * large._stack.bytes_each)  # type: ignore[union-attr]
    torch.testing.assert_close(run(two, place)[1], second, rtol=1e-5, atol=1e-7)
    assert two._most == 2


def test_a_stack_that_does_not_fit_is_halved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = Stack.begin

    def full(self: Stack, count: int, *rest: Any) -> None:
        if count > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        begin(self, count, *rest)

    monkeypatch.setattr(Stack, "begin", full)
    place = world(Perceptron())
    backend = stacked(place)
    with caplog.at_level(logging.WARNING):
        check(backend, place)
    assert backend._most == 1
    assert "no memory for 4 clients at once" in caplog.text


def test_updates_are_summed_where_they_are() -> None:
    place = world(Perceptron())
    backend = Stacked(place, device="cpu")
    assert backend.sums_updates
    rows = backend.rows(len(SIZES))
    assert rows.shape == (len(SIZES), 0)
    work = [Work(place.names[index], index) for index in (3, 0, 1, 2)]
    with one_thread():
        list(backend.train(2, place.initial.vector, work, rows.unbind()))
    wanted = run(Sequential(place), place)[1]
    total = backend.total({0: 0.5, 3: 0.25, 1: 0.25})
    torch.testing.assert_close(total, torch.tensor([0.5, 0.25, 0, 0.25]) @ wanted, rtol=1e-4, atol=1e-6)


class Unreadable(Perceptron):
    def data(self, site: Site) -> tuple[Any, Any]:
        if site.index == 3:
            raise OSError("the disk is gone")
        return super().data(site)


def test_a_client_that_fails_leaves_its_row_to_the_one_asked_instead() -> None:
    place = world(Unreadable())
    backend = Stacked(place, device="cpu")
    rows = backend.rows(3).unbind()
    work = {index: Work(place.names[index], index) for index in (3, 0, 1, 2)}
    with one_thread():
        answers = list(backend.train(2, place.initial.vector, [work[3], work[0], work[1]], rows))
        answers += backend.train(2, place.initial.vector, [work[2]], rows[:1])
    failed = [answer.client for answer in answers if isinstance(answer, Failed)]
    assert (len(answers), failed) == (4, [place.names[3]])
    wanted = run(Sequential(world(Perceptron())), world(Perceptron()))[1]
    total = backend.total({0: 0.5, 1: 0.25, 2: 0.25})
    torch.testing.assert_close(total, torch.tensor([0.5, 0.25, 0.25, 0]) @ wanted, rtol=1e-4, atol=1e-6)


class BatchNorm(Base):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 4))


class ReadsValues(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * 2 if loss > 1.0 else loss


class _Wrong(torch.autograd.Function):
    """Doubles what it is given, and in a stack triples it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return 3 * x, in_dims[0]


class Different(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return _Wrong.apply(super().loss(model, batch))  # type: ignore[no-untyped-call]


class Counts(Base):
    def model(self) -> nn.Module:
        model = nn.Linear(6, 4)
        model.register_buffer("calls", torch.zeros(()), persistent=False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        model.calls.add_(1)  # type: ignore[operator]
        return super().loss(model, batch)


class SetsItsBuffer(Base):
    def model(self) -> nn.Module:
        model = nn.Linear(6, 4)
        model.register_buffer("centre", torch.zeros(4))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        model.centre = model(batch[0]).detach().mean(0)
        return super().loss(model, batch) + (model(batch[0]) - model.centre).square().mean()  # type: ignore[operator]


class KeepsTheLast(Perceptron):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.last = super().loss(model, batch)
        return self.last


class Hooked(Perceptron):
    def model(self) -> nn.Module:
        model = super().model()
        next(model.parameters()).register_hook(lambda gradient: 0.1 * gradient)
        return model


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Hooked, "has a hook on its gradient"),
        (Tokens, "no form of aten::lstm.input for many clients"),
        (ReadsValues, "reads a tensor's value into Python"),
        (Different, "first loss is"),
        (Counts, "changes a buffer"),
        (SetsItsBuffer, "sets something anew on the model"),
        (KeepsTheLast, "keeps something on the task"),
        (BatchNorm, "num_batches_tracked"),
    ],
)
def test_what_cannot_be_stacked_is_named_and_runs_all_the_same(
    task: type[Base], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = world(task())
    backend = stacked(place)
    check(backend, place)
    assert reason in (backend.refused or "")
    assert str(backend.refused) in backend.description
    caplog.clear()
    assert run(backend, place) and not caplog.records  # noqa: PT018 - it has been said


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, parts: Any) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts[0])

    def __getitem__(self, row: int) -> Any:
        return tuple(part[row] for part in self._parts)


class Mixed(Perceptron):
    """Client 0 has tensors; 1 a data set of its own, 2 nothing, 3 a mistake."""

    def data(self, site: Site) -> Any:
        train, test = super().data(site)
        if site.index == 3:
            raise ValueError("column 'age' is missing")
        if site.index == 2:
            return (train[0][:0], train[1][:0]), test
        return (_Rows(train) if site.index == 1 else train), test


class Lengths(Tokens):
    """Client 2 has longer texts than the others."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(11, 5), nn.Linear(5, 4))

    def data(self, site: Site) -> Any:
        (tokens, labels), test = super().data(site)
        return (torch.cat([tokens, tokens], 1) if site.index == 2 else tokens, labels), test


@pytest.mark.parametrize("task", [Mixed, Lengths])
def test_clients_with_other_data_run_alone(task: type[Base]) -> None:
    place = world(task())
    backend = stacked(place)
    check(backend, place)
    assert backend.refused is None


def test_bad_values_of_one_client_are_its_own_failure() -> None:
    class Bad(Perceptron):
        def data(self, site: Site) -> Any:
            (inputs, labels), test = super().data(site)
            return (inputs * float("nan") if site.index == 1 else inputs, labels), test

    place = world(Bad())
    check(stacked(place), place)
    failed = [answer for answer in run(stacked(place), place)[0] if isinstance(answer, Failed)]
    assert [(answer.client, answer.kind) for answer in failed] == [(place.names[1], "invalid_update")]
    assert "at step 1 of round 2" in failed[0].detail


class Thinned(Base):
    """What dropout leaves of 4,000 ones, in the loss."""

    inputs = (1,)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.25))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model[1](torch.ones(4000)).mean() + 0.0 * model[0](batch[0]).sum()  # type: ignore[index]


def test_dropout_is_drawn_anew_for_every_client_and_the_same_again() -> None:
    place = world(Thinned(), "steps = 1")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    backend = stacked(place)
    first = {a.client: a.loss for a in run(backend, place)[0] if isinstance(a, Trained)}
    again = {a.client: a.loss for a in run(backend, place)[0] if isinstance(a, Trained)}
    assert torch.equal(torch.get_rng_state(), before)
    assert backend.refused is None, backend.refused
    assert first == again
    assert len(set(first.values())) == len(SIZES)
    # Standard deviation (0.25 / 0.75 / 4000)^½ = 0.009.
    assert all(abs(loss - 1.0) < 0.05 for loss in first.values())
    assert "dropout" in backend.description


def test_a_task_with_dropout_is_checked_without_it() -> None:
    place = world(Dropout())
    backend = stacked(place)
    answers, rows = run(backend, place)
    assert backend.refused is None
    assert all(isinstance(answer, Trained) for answer in answers)
    assert rows.isfinite().all()


def test_other_rounds_take_other_batches_and_a_lower_rate() -> None:
    place = world(Perceptron(), "learning_rate_decay = 0.5")
    backend = stacked(place)
    for round in (1, 3):
        wanted = run(Sequential(place), place, round)[1]
        torch.testing.assert_close(run(backend, place, round)[1], wanted, rtol=2e-4, atol=2e-6)
    work = [Work(place.names[2], 2)]
    rows = torch.empty(1, place.layout.size)
    list(backend.train(3, place.initial.vector, work, rows.unbind()))
    torch.testing.assert_close(rows[0], wanted[2], rtol=2e-4, atol=2e-6)


@given(
    sizes=st.lists(st.lists(st.integers(1, 13), min_size=1, max_size=3), min_size=1, max_size=6),
    batch_size=st.integers(1, 5),
)
def test_every_client_takes_its_own_batches_in_their_order(sizes: list[list[int]], batch_size: int) -> None:
    chance, first = np.random.default_rng(0), 0
    orders: list[list[np.ndarray]] = []
    for epochs in sizes:
        orders.append([first + chance.permutation(size) for size in epochs])
        first += max(epochs)
    taken: list[list[list[int]]] = [[] for _ in orders]
    for turn in turns(orders, batch_size):
        assert (np.diff(turn.clients) > 0).all()
        for client, rows in zip(turn.clients, turn.rows, strict=True):
            taken[client].append(rows.tolist())
    for mine, epochs_of in zip(taken, orders, strict=True):
        expected = [
            rows[start : start + batch_size].tolist()
            for rows in epochs_of
            for start in range(0, len(rows), batch_size)
        ]
        assert mine == expected


@pytest.mark.parametrize("wanted", ["auto", "vectorised"])
def test_a_gpu_gets_stacks(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    place = world(Perceptron())
    simulation = place.job.simulation.model_copy(update={"backend": wanted})
    job = place.job.model_copy(update={"simulation": simulation})
    backend, _ = make_backend(World(job, place.task, place.initial))
    assert isinstance(backend, Stacked)
    assert backend.device.type == "cuda"


@pytest.mark.parametrize(
    ("task", "workers"), [("Perceptron", 1), ("Perceptron", 2), ("Convolution", 1), ("Text", 1)]
)
def test_a_simulation_ends_with_the_same_model(run: Any, task: str, workers: int) -> None:
    """Means of updates that stay where they are, in one process, with clients that drop out."""
    settings = {"simulation__dropouts": {"dropout": 0.2}, "cohort__minimum": 1}
    reference = run(task, **settings)
    found = run(task, **settings, simulation__backend="stacked", simulation__workers=workers)
    torch.testing.assert_close(found.model.vector, reference.model.vector, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        torch.tensor(found.history["train_loss"]), torch.tensor(reference.history["train_loss"])
    )

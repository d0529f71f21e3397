"""Steps on compiled kernels: each operation against torch's own, and what they leave to torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from autograd_twin import Anything, classified, stepped
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.client.training.batches import Batch
from roundtable.core import Layout
from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised import recorded_steps as steps_module
from roundtable.simulation.backends.vectorised.compiled_step import CompiledProgram
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.program import StepProgram
from roundtable.simulation.backends.vectorised.recorded_steps import Steps
from roundtable.simulation.backends.vectorised.recorded_work import Manner
from roundtable.simulation.backends.vectorised.recording import ValueLayout

pytestmark = pytest.mark.skipif(load() is None, reason="there is no C++ compiler here")


def batch_of(count: int = 7, inputs: int = 19, classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, inputs, generator=generator)
    return x, torch.randint(0, classes, (count,), generator=generator)


def stack(*middle: nn.Module, inputs: int = 19, width: int = 33, classes: int = 5) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(inputs, width), *middle, nn.Linear(width, classes))


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(),
        nn.ELU(0.7),
        nn.SELU(),
        nn.LeakyReLU(0.2),
        nn.Hardtanh(-0.5, 0.8),
        nn.ReLU6(),
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
        nn.LayerNorm(33),
        nn.LayerNorm(33, elementwise_affine=False),
        nn.GroupNorm(3, 33),
        nn.GroupNorm(3, 33, affine=False),
    ],
    ids=str,
)
def test_a_stack_of_layers_runs_on_kernels_alone(activation: nn.Module) -> None:
    assert stepped(stack(activation), batch_of()).compiled == 1.0


@pytest.mark.parametrize("count", [1, 2, 6, 10, 13, 16, 29, 64])
@pytest.mark.parametrize("width", [1, 3, 16, 50])
def test_products_of_any_size(count: int, width: int) -> None:
    model = stack(nn.Tanh(), width=width, inputs=40)
    assert stepped(model, batch_of(count, inputs=40)).compiled == 1.0


@pytest.mark.parametrize(
    "update",
    [
        LocalStep(weight_decay=0.1),
        LocalStep(pull=0.5),
        LocalStep(pull=0.5, weight_decay=0.1),
        LocalStep(momentum=0.8),
        LocalStep(max_norm=0.1),
        LocalStep(max_norm=1e6),
        LocalStep(0.8, 0.1, 0.5, 0.1),
    ],
    ids=str,
)
def test_every_way_to_update(update: LocalStep) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(23, 6, padding_idx=2)
            self.norm = nn.LayerNorm(6)
            self.out = nn.Linear(6, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.norm(self.table(tokens)).mean(1))

    torch.manual_seed(4)
    tokens = torch.randint(0, 23, (7, 4), generator=torch.Generator().manual_seed(1))
    program = stepped(Words(), (tokens, batch_of()[1]), update=update)
    assert program.compiled > 0.9, "all but the expansion of the mean's gradient"


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: F.mse_loss(model(batch[0]), batch[2]),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[2], reduction="sum") * 0.1,
        lambda model, batch: ((model(batch[0]) - batch[2]) ** 2).mean(),
        lambda model, batch: (model(batch[0]).exp() / 3.0 - 2.0 * batch[2] + 1.0).sum(1).mean(),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], ignore_index=1),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 7,
        lambda model, batch: (model(batch[0]) * batch[2][:1] - batch[2][:, :1]).square().sum(0)[2],
        lambda model, batch: torch.bmm(model(batch[0])[:, None], batch[2][:, :, None]).mean(),
    ],
)
def test_losses(loss: Callable[[nn.Module, Any], Tensor]) -> None:
    target = torch.randn(7, 5, generator=torch.Generator().manual_seed(2))
    assert stepped(stack(nn.Tanh()), (*batch_of(), target), loss).compiled > 0.5


def test_shared_weights_are_updated_by_the_sum() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(19, 19)
            self.out = nn.Linear(19, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(self.inner(x).tanh()))

    torch.manual_seed(5)
    assert stepped(Twice(), batch_of()).compiled == 1.0


@pytest.mark.parametrize("update", [LocalStep(), LocalStep(pull=0.5), LocalStep(momentum=0.8)], ids=str)
def test_large_products_are_left_to_torch(update: LocalStep) -> None:
    model = stack(nn.ReLU(), inputs=1024, width=1024)
    program = stepped(model, batch_of(40, inputs=1024), update=update)
    assert program.compiled < 1.0
    assert ("addmm_(" in program.source) == update.plain


def test_values_that_are_not_finite_stay_so() -> None:
    x, y = batch_of()
    x[0, 0] = float("nan")
    model = stack(nn.ReLU(), nn.LayerNorm(33), nn.GELU())
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(classified), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    steps.begin(layout.flatten(model.state_dict()), LocalStep())
    assert isinstance(steps.prepare((x, y), Manner(LocalStep())), CompiledProgram)
    assert torch.isnan(steps.take((x, y), Manner(LocalStep()), 0.05))
    assert torch.isnan(steps.weights).any()


def test_a_label_that_does_not_exist_is_an_error() -> None:
    x, y = batch_of()
    model = stack(nn.ReLU())
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(classified), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    steps.begin(layout.flatten(model.state_dict()), LocalStep())
    steps.take((x, y), Manner(LocalStep()), 0.05)
    for wrong in (5, -1, 1 << 40):
        y[3] = wrong
        with pytest.raises(IndexError, match="out of range"):
            steps.take((x, y), Manner(LocalStep()), 0.05)


def test_batches_that_lie_otherwise_get_a_program_of_their_own() -> None:
    x, y = batch_of(8, inputs=8, classes=5)
    model = stack(nn.ReLU(), inputs=8)
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(classified), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    losses = []
    for batch in (x, x.t().contiguous().t()):
        steps.begin(layout.flatten(model.state_dict()), LocalStep())
        losses.append(float(steps.take((batch, y), Manner(LocalStep()), 0.05)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(steps._programs) == 2


@pytest.mark.parametrize("apart", [False, True], ids=["side by side", "apart"])
def test_batches_that_the_kernels_gather_give_what_single_ones_give(apart: bool) -> None:
    x, y = batch_of(23)
    if apart:
        x, y = (torch.stack([part, part], 1)[:, 1] for part in (x, y))
    assert x.is_contiguous() != apart
    model = stack(nn.ReLU(), nn.LayerNorm(33))
    layout = Layout.of(model.state_dict())
    vector = layout.flatten(model.state_dict()).clone()
    orders = [torch.randperm(23), torch.randperm(23)[:10]]
    rows = [*orders[0].split(5), *orders[1].split(5)]
    batches = [Batch(1, len(some), (x[some], y[some])) for some in rows]
    found = []
    update = LocalStep(pull=0.1)
    manner = Manner(update)
    for gathered in (True, False):
        steps = Steps(Anything(classified), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
        steps.begin(vector, update)
        if gathered:
            assert steps.takes_rows((x, y), rows[0], manner)
            losses, sizes = steps.take_rows((x, y), orders, 5, lambda _: manner, 0.05)
        else:
            losses, sizes = steps.take_all(batches, lambda _: manner, 0.05)
        assert sizes == [5, 5, 5, 5, 3, 5, 5]
        found.append((losses, steps.weights))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    y[13] = 9
    with pytest.raises(IndexError, match="out of range"):
        steps.take_rows((x, y), orders, 5, lambda _: manner, 0.05)


def test_a_change_is_the_same_with_kernels_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack(nn.ReLU())
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(classified), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    vector, rows = torch.randn(layout.size), torch.empty(2, layout.size)
    steps.weights.normal_()
    for library in (load(), None):
        monkeypatch.setattr(steps_module, "load", lambda found=library: found)
        assert steps.change(vector, rows[0])
        assert torch.equal(rows[0], steps.weights - vector)
        for number, finite in ((3e38, True), (float("inf"), False), (float("nan"), False)):
            steps.weights[-2:] = number
            assert steps.change(vector, rows[1]) == finite, "a sum above the largest number is not an error"
            steps.weights[-2:] = 1.0


def test_kernels_that_err_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = load()
    assert library is not None
    wrong = replace(library, maps={**library.maps, "tanh": library.maps["sigmoid"]})
    monkeypatch.setattr(steps_module, "load", lambda: wrong)
    model = stack(nn.Tanh())
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(classified), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    steps.begin(layout.flatten(model.state_dict()), LocalStep())
    with caplog.at_level(logging.WARNING, "roundtable.simulation"):
        program = steps.prepare(batch_of(), Manner(LocalStep()))
    assert type(program) is StepProgram
    assert "without the compiled kernels" in caplog.text


def test_memory_is_shared_by_values_that_never_meet() -> None:
    model = stack(*(nn.Tanh() for _ in range(20)))
    program = stepped(model, batch_of())
    made = [ValueLayout((7, 33), (33, 1), 0, 0, torch.float32).size for _ in range(42)]
    assert program._block.numel() < 0.7 * sum(made)

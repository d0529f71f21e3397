"""Low-rank factors that are as small as a client's rank while it trains: what is swapped, and put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import override

from roundtable.client.first_batch.step_memory import step_memory
from roundtable.core import JobConfig, Layout
from roundtable.core.algorithms.factors.factor_pairs import FactorPair, factor_pairs
from roundtable.core.algorithms.factors.own_size import of_own_size
from roundtable.core.task import Site, Task
from roundtable.simulation import simulate


class Adapted(nn.Module):
    """A layer as peft makes it of a linear one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(24, 20).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(24, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, 20, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]
        self.scaling = {"default": 2.0}
        self.disable_adapters = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))
        return found


class Tied(nn.Module):
    """Two layers, and the second's up projection once more under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(16), Adapted(16)
        self.again = nn.Linear(16, 20, bias=False)
        self.again.weight = self.second.lora_B["default"].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x).sum() + self.second(x).sum() + self.again.weight.sum()
        return found


class Toy(Task):
    """Targets of rank 20; AdamW, whose steps a wrong gradient moves far."""

    def model(self) -> nn.Module:
        return nn.Sequential(Adapted(16), nn.Tanh(), nn.Linear(20, 24).requires_grad_(False), Adapted(16))

    def data(self, site: Site) -> Any:
        chance = torch.Generator().manual_seed(site.index)
        x = torch.randn(32, 24, generator=chance)
        both = x, torch.roll(x, 1, 1)[:, :20]
        return both, both

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    @override
    def optimizer(self, parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@contextmanager
def with_zeros(
    module: nn.Module,
    pairs: Sequence[FactorPair],
    ranks: Sequence[int],
    fresh: Sequence[tuple[Tensor, Tensor]] = (),
) -> Iterator[None]:
    """Factors as large as the task's, whose rows and columns behind the rank are zero."""
    if fresh:
        padded = [
            (pad(down, (0, 0, 0, pair.rank - len(down))), pad(up, (0, pair.rank - len(down))))
            for pair, (down, up) in zip(pairs, fresh, strict=True)
        ]
        with of_own_size(module, pairs, [pair.rank for pair in pairs], padded):
            yield
        return
    with torch.no_grad():
        for pair, rank in zip(pairs, ranks, strict=True):
            module.get_parameter(pair.names[0])[rank:] = 0
            module.get_parameter(pair.names[1])[:, rank:] = 0
    yield


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({"name": "flora"}, "flora"),
        ({"name": "flexlora", "max_gradient_norm": 0.1}, "own_ranks"),
        ({"name": "hetlora", "gamma": 0.5, "pruning_weight": 0.01}, "own_ranks"),
    ],
    ids=lambda each: each if isinstance(each, str) else each["name"],
)
def test_small_factors_learn_what_those_with_zeros_would(
    own: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobConfig.model_validate(
        {
            "task": "toy",
            "rounds": 3,
            "cohort": {"size": 3},
            "algorithm": {"batch_size": 8, "learning_rate": 0.01, "ranks": {"client-0": 2, "client-1": 5}}
            | own,
            "simulation": {"clients": 3, "backend": "sequential"},
        }
    )
    small = simulate(job, Toy(), progress=False)
    monkeypatch.setattr(f"roundtable.core.algorithms.factors.{place}.of_own_size", with_zeros)
    whole = simulate(job, Toy(), progress=False)
    for pair in factor_pairs(small.model.layout):
        factors = [pair.factors(each.model.vector[None], 0) for each in (small, whole)]
        products = [up @ down for down, up in factors]
        torch.testing.assert_close(*products, rtol=1e-4, atol=1e-5)
        assert products[0].norm() > 0.1
    for one, other in zip(small.history, whole.history, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["train_merge_error"] == pytest.approx(other["train_merge_error"], rel=1e-3, abs=1e-5)


def shapes(model: nn.Module) -> list[list[int]]:
    return [list(each.shape) for each in model.parameters() if each.requires_grad]


def test_parameters_are_small_inside_and_back_whatever_fails() -> None:
    model = Tied()
    pairs = factor_pairs(Layout.of(model))
    before = dict(model.named_parameters(remove_duplicate=False))
    begun = {name: value.detach().clone() for name, value in before.items()}
    with suppress(ZeroDivisionError), of_own_size(model, pairs, [2, 3]):
        assert shapes(model) == [[2, 24], [20, 2], [3, 24], [20, 3]]
        assert model.again.weight is model.second.lora_B["default"].weight
        model(torch.ones(3, 24)).backward()
        with torch.no_grad():
            for each in model.parameters():
                if each.requires_grad:
                    assert each.grad is not None
                    assert each.grad.shape == each.shape
                    each.add_(1.0)
        raise ZeroDivisionError
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is value for name, value in before.items())
    for layer, rank in (("first", 2), ("second", 3)):
        down, up = (f"{layer}.lora_{each}.default.weight" for each in "AB")
        assert torch.equal(after[down][:rank], begun[down][:rank] + 1)
        assert torch.equal(after[up][:, :rank], begun[up][:, :rank] + 1)
        assert not after[down][rank:].any()
        assert not after[up][:, rank:].any()


def test_memory_is_counted_of_the_small_ones() -> None:
    task, model = Toy(), Toy().model()
    pairs = factor_pairs(Layout.of(model))
    batch, _ = task.data(Site("s"))
    whole = step_memory(task, model, batch, task.optimizer)
    inside = []

    def change(fake: nn.Module) -> None:
        inside.append(of_own_size(fake, pairs, [2, 2]))
        inside[0].__enter__()

    small = step_memory(task, model, batch, task.optimizer, change)
    inside[0].__exit__(None, None, None)
    assert small.gradients == whole.gradients // 8
    assert whole.optimizer // 8 <= small.optimizer < whole.optimizer // 7
    assert small.activations < whole.activations

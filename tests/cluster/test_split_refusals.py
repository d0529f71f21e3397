"""Models that ranks would split otherwise than one process computes them: each is refused in the plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.cluster.parallel.anatomy import dissect
from roundtable.cluster.parallel.forward_trace import fake_model, trace
from roundtable.cluster.parallel.tensor_parallel import TensorParallel, find_tensor_parallel
from roundtable.cluster.plan.model_probe import cannot_run, probe_model
from roundtable.cluster.tools.verify import Block
from roundtable.core import Task
from roundtable.core.errors import LayoutError

WIDTH = 8


class Layer(Block):
    def __init__(self, before: Callable[[Tensor], Tensor] = torch.positive) -> None:
        super().__init__(WIDTH, 2)
        self._before = before

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._before(x))


class Decoder(nn.Module):
    def __init__(self, *layers: nn.Module, order: Callable[[Any], Any] = list) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(layers or [Layer() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16)
        self._order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self._order(self.layers):
            x = layer(x)
        return self.head(self.norm(x))


class Texts(Task):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make

    def model(self) -> nn.Module:
        return self._make()

    def data(self, site: Any) -> Any:
        tokens = torch.arange(36).view(4, 9) % 16
        return (tokens[:, :-1], tokens[:, 1:]), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def split(make: Callable[[], nn.Module]) -> tuple[TensorParallel, nn.Module]:
    task = Texts(make)
    mode, model = fake_model(task)
    return find_tensor_parallel(model, dissect(model), trace(task, mode, model, task.data(None)[0])), model


def shifted(x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 1, -1))


def counted(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]


def centred(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def mixed(layer: Callable[[Tensor], Tensor]) -> nn.Module:
    return Decoder(*(Layer(layer) for _ in range(2)))


class Gathering(Decoder):
    """Its head reads what all layers gave."""

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.table(x), torch.zeros(())
        for layer in self.layers:
            x = layer(x)
            found = found + x.mean(1, keepdim=True)
        return self.head(self.norm(x + found))


def repeated() -> nn.Module:
    layer = Layer()
    return Decoder(layer, layer, Layer())


def one_norm() -> nn.Module:
    model = Decoder()
    model.norm = model.layers[0].norm
    return model


PLACES = r"layers.0 \(Layer\): what .* depends on other places"
UNSPREAD: list[tuple[Callable[[], nn.Module], str]] = [
    (partial(mixed, shifted), PLACES),
    (partial(mixed, counted), PLACES),
    (partial(mixed, centred), PLACES),
    (Gathering, r"what layers.0 gives is read by other code"),
    (repeated, "blocks are not called once each"),
    (partial(Decoder, order=reversed), "blocks are not called once each"),
    (one_norm, r"layers.0.norm.weight and norm.weight are one parameter"),
]


@pytest.mark.parametrize(("make", "said"), UNSPREAD)
def test_a_sequence_is_not_shared_out_where_ranks_would_see_less_of_it(
    make: Callable[[], nn.Module], said: str
) -> None:
    plan, model = split(make)
    assert not plan.refusal(model, 2), "layers are split all the same"
    assert re.search(said, plan.no_sequence)


def test_a_sequence_is_shared_out_where_each_place_is_computed_by_itself() -> None:
    plan, _ = split(partial(mixed, torch.tanh))
    assert not plan.no_sequence
    assert len(plan.norms) == 4


def tied(change: Callable[[Any], None], packed: bool = False) -> nn.Module:
    layers: list[Any] = [Layer() for _ in range(2)]
    for layer in layers:
        layer.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    if packed:
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True) for _ in range(2)]
    model = Decoder(*layers)
    change(model)
    return model


def bias_of_both(model: Any) -> None:
    model.layers[0].mlp[2].bias = model.layers[0].mlp[0].bias


def bias_of_norm(model: Any) -> None:
    model.layers[0].mlp[2].bias = model.norm.bias


def bias_of_packed(model: Any) -> None:
    model.layers[1].self_attn.in_proj_bias = model.layers[0].self_attn.in_proj_bias


def weights_alike(model: Any) -> None:
    model.layers[1].mlp[0].weight = model.layers[0].mlp[0].weight
    model.layers[1].mlp[2].bias = model.layers[0].mlp[2].bias


@pytest.mark.parametrize(
    ("change", "packed", "said"),
    [
        (bias_of_both, False, "layers.0.mlp.0.bias and layers.0.mlp.2.bias are one parameter"),
        (bias_of_norm, False, "layers.0.mlp.2.bias and norm.bias are one parameter"),
        (
            bias_of_packed,
            True,
            "in_proj_bias are one parameter, of which ranks would hold some of several parts",
        ),
        (weights_alike, False, ""),
    ],
)
def test_one_parameter_that_ranks_would_hold_in_two_ways_is_refused(
    change: Callable[[Any], None], packed: bool, said: str
) -> None:
    plan, model = split(partial(tied, change, packed))
    refusal = plan.refusal(model, 2)
    assert said in refusal
    assert bool(said) == bool(refusal)


def test_runs_of_blocks_that_a_pass_leaves_out_or_repeats_are_not_checkpointed_together() -> None:
    short = Texts(partial(Decoder, order=lambda layers: layers[:3]))
    again = Texts(partial(Decoder, order=lambda layers: [layers[0], *layers]))
    left, repeated = (cannot_run(task, dissect(task.model()), task.data(None)[0]) for task in (short, again))
    assert left == "checkpointing = 'sqrt' runs all blocks, and layers.3 is not called; use 'every'"
    assert "layers.0 runs again before layers.1 has run" in repeated


def test_what_no_layout_carries_is_said_in_the_plan() -> None:
    class Turned(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    task = Texts(Turned)
    with pytest.raises(LayoutError, match=r"'turn' has dtype torch.complex64.*view_as_real"):
        probe_model(task, task.data(None)[0], device="cpu")

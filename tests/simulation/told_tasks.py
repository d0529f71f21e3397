"""Tasks whose methods ask for a context and say what they were told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from roundtable.core import Site, Task, torch_generator
from roundtable.core.algorithms.round_context import Context

NAME = "told"
EXAMPLES = {f"client-{index}": 10 + 6 * (index % 4) for index in range(4)}


class ToldWhenMeasured(Task):
    """Only what measures the model asks."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def data(self, site: Site) -> tuple[Any, Any]:
        count, chance = EXAMPLES[site.name], torch_generator(11, site.index)
        inputs, labels = torch.randn(count + 4, 6, generator=chance), torch.arange(count + 4) % 3
        return (inputs[:count], labels[:count]), (inputs[count:], labels[count:])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any, context: Context) -> dict[str, tuple[float, int]]:  # type: ignore[override]
        assert context.job == NAME
        assert context.device.type == "cpu"
        return {
            "of_round": (context.round, 1),
            "steps": (context.steps or 0, 1),
            "stream": (context.seed("x") % 97, 1),
            "site": (int(context.site.removeprefix("client-")), 1),
        }


class Told(ToldWhenMeasured):
    """The loss depends on the round's stream, and on its number of steps."""

    def loss(self, model: nn.Module, batch: Any, context: Context) -> Tensor:  # type: ignore[override]
        if model.training:
            examples = EXAMPLES[context.site]
            assert context.steps == 2 * -(-examples // 8), (context.steps, examples)
        factor = torch.rand(1, generator=context.generator("factor")).item()
        return super().loss(model, batch) * (0.5 + factor)

"""Counts the operations that training on one example takes, on fake tensors: the base of utilisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from roundtable.cluster.parallel.forward_trace import fake_model, quietly
from roundtable.core.task import Task

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class ExampleCost:
    """Operations of one training example: `flops` forward and backward, without what checkpointing repeats.

    `tokens` is the length of its sequence of tokens, 0 where it has none. `method` is counted, operator by
    operator, or 6N: six operations for each parameter and position of the model's output (Kaplan et al.
    2020, section 2.1), where the backward pass cannot run on fake tensors.
    """

    flops: float
    tokens: int
    method: Literal["counted", "6N"]


def count_work(task: Task, batch: Any) -> ExampleCost:
    """The cost of `batch`, whose values do not matter, divided by its examples."""
    mode, model = fake_model(task)
    fakes = tree_map_only(Tensor, mode.from_tensor, batch)
    leaves = [leaf for leaf in tree_leaves(fakes) if isinstance(leaf, Tensor) and leaf.dim()]
    examples = len(leaves[0]) if leaves else 1
    seen = _Shapes(model)
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    try:
        with quietly(), mode, counter:
            task.loss(model, fakes).backward()  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - code that wants values may raise anything
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return ExampleCost(6.0 * trained * max(1, seen.positions // examples), seen.tokens, "6N")
    finally:
        seen.remove()
    return ExampleCost(counter.get_total_flops() / examples, seen.tokens, "counted")


class _Shapes:
    """Hooks that note the length of sequences: of tokens into an embedding, of vectors out of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens = self.positions = 0
        self._handles = [
            part.register_forward_pre_hook(self._embedded)
            for part in model.modules()
            if isinstance(part, nn.Embedding)
        ]
        self._handles.append(model.register_forward_hook(self._after_forward))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _embedded(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() == 2:
            self.tokens = max(self.tokens, inputs[0].shape[1])

    def _after_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.dim():
            self.positions = output.numel() // output.shape[-1]


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of attention on a CPU, which torch's counter does not know."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Twice the forward pass, as for any product: what a kernel computes again is not the model's work."""
    return 2 * int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


_CPU_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

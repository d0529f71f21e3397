"""The tensors of a batch, or of what a model makes of it, wherever they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle


def changed(
    batch: Any, change: Callable[[Tensor], Tensor], others: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The batch with each tensor as `change` gives it, in mappings, tuples, lists and named tuples.

    Lengths of packed sequences stay, as kernels want them in the host's memory. `others` gives what takes the
    place of what is none of these.
    """
    again = partial(changed, change=change, others=others)
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, PackedSequence):
        order, back = (
            None if one is None else change(one) for one in (batch.sorted_indices, batch.unsorted_indices)
        )
        return PackedSequence(change(batch.data), batch.batch_sizes, order, back)
    if isinstance(batch, MutableMapping):
        # Of its own kind, as those of transformers' tokenizers are.
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = again(value)
        return made
    if isinstance(batch, (tuple, list)):
        values = [again(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return others(batch)


def moved(batch: Any, device: torch.device | None) -> Any:
    """A batch on the device, itself where that is the CPU; objects of other kinds are moved by their `to`."""
    if device is None or device.type == "cpu":
        return batch

    def others(value: Any) -> Any:
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return changed(batch, lambda tensor: tensor.to(device, non_blocking=True), others)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)


def examples_in(batch: Any) -> int:
    """Examples in a collated batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return examples_in(parts[0]) if isinstance(parts, (tuple, list)) and parts else 1


def give_float32(model: nn.Module) -> RemovableHandle:
    """Has a model that runs in two bytes give float32: a loss computed of less has three digits, and so has
    every gradient after it.
    """
    return model.register_forward_hook(lambda module, inputs, output: tree_map_only(Tensor, _widened, output))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

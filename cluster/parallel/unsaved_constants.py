"""Tensors that a model's code makes and no state dict holds: on every rank what they are in a real model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.cluster.parallel.meta_init import without_weights
from roundtable.core.task import Task, initial_state


@dataclass(frozen=True)
class Constant:
    """A tensor of a module that no state dict holds: a buffer that is not saved, or a plain attribute."""

    name: str
    holder: dict[str, Any]
    key: str

    @property
    def value(self) -> Tensor:
        """The tensor."""
        tensor: Tensor = self.holder[self.key]
        return tensor


def constants(model: nn.Module) -> Iterator[Constant]:
    """The tensors that the model's code makes, and no artifact brings: rotary tables, masks."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for key in sorted(module._non_persistent_buffers_set):
            if isinstance(module._buffers.get(key), Tensor):
                yield Constant(prefix + key, module._buffers, key)
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield Constant(prefix + key, vars(module), key)


def drawn_constants(task: Task, model: nn.Module) -> list[str]:
    """Names of the constants of a model on meta that are not what they would be in a real one.

    They are made of parameters, which have no values there, or of random numbers, which were drawn after
    other parameters' than in a real one. Those that differ under another seed are taken for the latter.
    """
    with without_weights(1):
        other = {each.name: each.value for each in constants(task.model())}
    return [
        each.name
        for each in constants(model)
        if each.value.is_meta or each.name not in other or not torch.equal(each.value, other[each.name])
    ]


def shared_constants(task: Task, model: nn.Module, seed: int, device: torch.device) -> Mapping[str, Tensor]:
    """The values of such constants, on the CPU of every rank: rank 0 makes the real model. Collective."""
    names = drawn_constants(task, model)
    if not names:
        return {}
    values: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        made = initial_state(task, seed)
        assert isinstance(made, nn.Module)
        values = {each.name: each.value.detach() for each in constants(made) if each.name in names}
    shapes = {each.name: each.value for each in constants(model)}
    for name in names:
        whole = values.get(name, torch.empty(shapes[name].shape, dtype=shapes[name].dtype))
        data = whole.contiguous().reshape(-1).view(torch.uint8).to(device)
        dist.broadcast(data, 0)
        values[name] = data.cpu().view(whole.dtype).view(whole.shape)
    return values


def set_constants(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Puts values in the place of the model's constants of these names."""
    for each in constants(model):
        if each.name in values:
            each.holder[each.key] = values[each.name].clone()

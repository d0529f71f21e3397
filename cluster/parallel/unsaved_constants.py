"""What a model's code makes and no state dict holds: on every rank what it is in a real model.

Tensors, arrays and numbers, by themselves or in lists, tuples and dicts: rotary tables, masks, permutations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from roundtable.cluster.parallel.meta_init import plain_attributes, without_weights
from roundtable.core.errors import TaskError
from roundtable.core.seeds import derive_seed
from roundtable.core.task import Task, initial_state

_NUMBERS = (bool, int, float, str, np.number, np.bool_)
_SETS = (set, frozenset)


@dataclass(frozen=True)
class Constant:
    """Data of a module that no state dict holds: a buffer that is not saved, or a plain attribute."""

    name: str
    holder: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """The tensor, array or number, or a container of such."""
        return self.holder[self.key]

    @property
    def is_meta(self) -> bool:
        """Whether a tensor of it has no values."""
        return any(
            isinstance(leaf, Tensor) and leaf.is_meta for leaf in filter(_is_data, tree_leaves(self.value))
        )


def constants(model: nn.Module) -> Iterator[Constant]:
    """What the model's code makes, and no artifact brings."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for key in sorted(module._non_persistent_buffers_set):
            if isinstance(module._buffers.get(key), Tensor):
                yield Constant(prefix + key, module._buffers, key)
        for key, value in plain_attributes(module):
            if any(map(_is_data, tree_leaves(value))):
                yield Constant(prefix + key, vars(module), key)


def empty_constants(model: nn.Module, kind: Any) -> None:
    """Gives tensors without values memory, of the type that `kind` says of each."""
    for each in constants(model):
        if each.is_meta:
            each.holder[each.key] = tree_map_only(
                Tensor, lambda x: torch.empty(x.shape, dtype=kind(x)) if x.is_meta else x, each.value
            )


def drawn_constants(task: Task, model: nn.Module, seed: int = 0) -> list[str]:
    """Names of the constants of a model on meta, under the job's seed, that are others in a real one.

    They are made of parameters, which have no values there, or of torch's random numbers, which were drawn
    after other parameters' than in a real one. Those that differ under another seed are taken for the latter.
    """
    with without_weights(derive_seed(seed, "model"), of_torch=1):
        other = {each.name: each.value for each in constants(task.model())}
    return [
        each.name
        for each in constants(model)
        if each.is_meta or each.name not in other or not _alike(each.value, other[each.name])
    ]


def shared_constants(task: Task, model: nn.Module, seed: int, device: torch.device) -> Mapping[str, Any]:
    """The values of such constants, on the CPU of every rank: rank 0 makes the real model. Collective.

    Raises TaskError where the real model has none of such a name, or one made of other parts.
    """
    names = drawn_constants(task, model, seed)
    if not names:
        return {}
    here = {each.name: each.value for each in constants(model)}
    first = dist.get_rank() == 0
    told: list[Any] = []
    data: list[Tensor] = []
    if first:
        made = initial_state(task, seed)
        assert isinstance(made, nn.Module)
        real = {each.name: each.value for each in constants(made)}
        told = [[_told(leaf, data) for leaf in tree_leaves(real.get(name))] for name in names]
    text = json.dumps(told).encode()
    told = json.loads(_sent(torch.frombuffer(bytearray(text), dtype=torch.uint8), device).numpy().tobytes())
    values: dict[str, Any] = {}
    for name, leaves in zip(names, told, strict=True):
        own, form = tree_flatten(here[name])
        if len(own) != len(leaves):
            raise TaskError(
                f"{name} has {len(own)} parts where weights have no values yet, as on a cluster's ranks, and "
                f"{len(leaves)} in a real model; make it of shapes alone, or register it as a buffer"
            )
        values[name] = tree_unflatten(
            [_read(leaf, place, data, device) for leaf, place in zip(leaves, own, strict=True)], form
        )
    return values


def set_constants(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Puts values in the place of the model's constants of these names."""
    for each in constants(model):
        if each.name in values:
            each.holder[each.key] = tree_map_only(Tensor, Tensor.clone, values[each.name])


def _is_data(leaf: object) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray, *_NUMBERS, *_SETS)) and not isinstance(leaf, nn.Parameter)


def _alike(one: Any, other: Any) -> bool:
    """Whether two constants are the same; of what is no data only the place counts."""
    (leaves, form), (others, shape) = tree_flatten(one), tree_flatten(other)
    return form == shape and all(map(_same, leaves, others))


def _same(one: Any, other: Any) -> bool:
    if not _is_data(one):
        return not _is_data(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not other.is_meta and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return type(one) is type(other) and (one == other or one != one)


def _told(leaf: Any, data: list[Tensor]) -> Any:
    """A leaf in JSON: [kind, value]; what is in an array goes to `data`, None is what is no data."""
    if not _is_data(leaf):
        return None
    if isinstance(leaf, Tensor):
        data.append(leaf.detach().contiguous())
        return ["tensor", [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]]
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.hasobject:
            return None
        data.append(torch.from_numpy(np.frombuffer(leaf.tobytes(), dtype=np.uint8).copy()))
        return ["array", [leaf.dtype.str, list(leaf.shape), isinstance(leaf, np.generic)]]
    if isinstance(leaf, _SETS):
        return ["set", sorted(leaf)] if all(isinstance(each, _NUMBERS) for each in leaf) else None
    return ["number", leaf] if isinstance(leaf, _NUMBERS) else None


def _read(told: Any, own: Any, data: list[Tensor], device: torch.device) -> Any:
    """The leaf that rank 0 told of, `own` where it is no data. Collective for arrays."""
    if told is None:
        return own
    kind, about = told
    if kind == "set":
        return type(own)(about) if isinstance(own, _SETS) else set(about)
    if kind == "number":
        return about
    flat = _sent(data.pop(0).reshape(-1).view(torch.uint8) if data else None, device)
    if kind == "tensor":
        dtype, shape = about
        return flat.view(getattr(torch, dtype)).view(shape)
    dtype, shape, single = about
    array = np.frombuffer(flat.numpy().tobytes(), dtype=np.dtype(dtype)).reshape(shape).copy()
    return array[()] if single else array


def _sent(data: Tensor | None, device: torch.device) -> Tensor:
    """Rank 0's bytes on every rank, in CPU memory. Collective."""
    size = torch.tensor([0 if data is None else len(data)], device=device)
    dist.broadcast(size, 0)
    if data is None or dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    there = data.to(device)
    if len(there):
        dist.broadcast(there, 0)
    return there.cpu()

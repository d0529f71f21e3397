"""What a training step needs of memory, by a pass on tensors that have shapes and take no memory.

The step of the task itself is counted: forward, backward, and its optimizer's. What an algorithm adds (a
constant, a second model), gradients of single examples under DP-SGD and what kernels take for themselves are
not, so that the figure is rather too small.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from roundtable.client.batch_tensors import moved
from roundtable.client.training.training_loop import Optimizer
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import Task

_CPU = torch.device("cpu")
_MOST_REAL = 64 << 20
_ATEN = torch.ops.aten
_PUT = {_ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
_INDEXING = {_ATEN.index.Tensor, *_PUT}


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one process. `activations` are what stands at most in the forward pass, its temporaries among
    them, `peak` all at the fullest moment: less than the sum, as gradients grow while activations shrink.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    peak: int


class NotEstimated(Exception):
    """The task's step does not run on tensors without values."""


Optimizers = Callable[[Sequence[nn.Parameter]], Optimizer]


def step_memory(
    task: Task,
    module: nn.Module,
    batch: Any,
    optimizer: Optimizers,
    change: Callable[[Any], None] = lambda module: None,
    device: torch.device = _CPU,
) -> StepMemory:
    """The step of a batch, None for one that has no tensors, of the module with a `change` to a copy of it,
    as `device` would take it: its kernels keep other tensors. The batch is copied there, wherever it is.

    Nothing of the module changes. Raises NotEstimated, with the reason, where the step does not run so.
    """
    with quietly(), isolated_randomness(0, device):
        try:
            return _counted(task, module, moved(batch, device), optimizer, change, device)
        except Exception as error:
            raise NotEstimated(f"{type(error).__name__}: {error}") from error


def _counted(
    task: Task,
    module: nn.Module,
    batch: Any,
    optimizer: Optimizers,
    change: Callable[[Any], None],
    device: torch.device,
) -> StepMemory:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        fake = copy.deepcopy(module)
    with mode:
        _move(fake, device)
    change(fake.train())
    parameters = [each for each in fake.parameters() if each.requires_grad]
    live = _Live(mode, [*fake.parameters(), *fake.buffers()])
    with mode, live:
        forward = 0
        if batch is None:
            for each in parameters:
                each.grad = torch.empty_like(each)
        else:
            loss = task.loss(fake, batch)
            forward = live.most
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        passed, before = live.most, live.now
        live.most = live.now
        made = optimizer(parameters)
        made.step()
        state = live.now - before
    return StepMemory(
        weights=bytes_of(module),
        gradients=sum(each.grad.nbytes for each in parameters if each.grad is not None),
        optimizer=state,
        activations=forward,
        peak=bytes_of(module) + max(passed + state, live.most),
    )


def _move(module: nn.Module, device: torch.device) -> None:
    """Puts its tensors on the device, those that it has at two places too; `to` would keep the old ones'."""
    there = dict[int, Tensor]()
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device.type == device.type:
                    continue
                if id(tensor) not in there:
                    new = torch.empty_like(tensor, device=device)
                    again = nn.Parameter(new, tensor.requires_grad)
                    there[id(tensor)] = again if isinstance(tensor, nn.Parameter) else new
                tensors[name] = there[id(tensor)]  # type: ignore[assignment]


def bytes_of(module: nn.Module) -> int:
    """Of a module's parameters and buffers, those that share memory once."""
    storages = (each.untyped_storage() for each in (*module.parameters(), *module.buffers()))
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def _numbered(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Masks whose values are there as numbers: how many they choose decides a shape."""
    found: list[Tensor | None] = []
    for each in indices:
        if each is None or isinstance(each, FakeTensor) or each.dtype != torch.bool:
            found.append(each)
        else:
            with unset_fake_temporarily():
                found += each.nonzero().unbind(1)
    return found


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of what operations give, as long as somebody has it.

    What is made of real tensors alone stays real, as masks of a batch are, which some models look at: as long
    as it is small.
    """

    def __init__(self, mode: FakeTensorMode, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._known = {each.untyped_storage()._cdata for each in known}
        self.now = 0
        self.most = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if given and not any(isinstance(leaf, FakeTensor) for leaf in given):
            with unset_fake_temporarily():
                output = func(*args, **kwargs)
            output = tree_map_only(Tensor, self._small, output)
        else:
            if func in _INDEXING:
                args = (args[0], _numbered(args[1]), *args[2:])
            output = func(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._count(leaf.untyped_storage())
        return output

    def _small(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.nbytes <= _MOST_REAL else self._mode.from_tensor(tensor)

    def _count(self, storage: Any) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._known:
            self._known.add(place)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


@contextmanager
def quietly() -> Iterator[None]:
    """What is tried may fail, and torch logs the traceback of an operation whose shapes do not fit."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)

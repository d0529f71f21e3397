"""Activation checkpointing: of each, every k-th or listed blocks, of runs of them, or of all but products."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _checkpoint_without_reentrant_generator,
    create_selective_checkpoint_contexts,
)

from roundtable.cluster.parallel.strategy import Strategy
from roundtable.core.errors import TaskError

_ATEN = torch.ops.aten
COSTLY = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def run_length(blocks: int) -> int:
    """Blocks in a run of square-root checkpointing (Chen et al. 2016, section 3: about √n runs of √n)."""
    return max(1, math.isqrt(blocks))


def checkpoint_blocks(model: nn.Module, blocks: Sequence[str], strategy: Strategy) -> None:
    """Checkpoints whole blocks, runs of them, or all in them but matrix products; nothing where it is off."""
    if strategy.checkpointing == "none":
        return
    _without_caches(model)
    if strategy.checkpointing == "sqrt":
        length = run_length(len(blocks))
        for first in range(0, len(blocks), length):
            _BlockRun([(name, model.get_submodule(name)) for name in blocks[first : first + length]])
        return
    options: dict[str, Any] = {"context_fn": _host_drawn_alike}
    if strategy.checkpointing == "selective":
        options["context_fn"] = _selectively
    for name in strategy.checkpointed(blocks):
        parent, _, key = name.rpartition(".")
        owner = model.get_submodule(parent)
        owner._modules[key] = checkpoint_wrapper(model.get_submodule(name), **options)


def _without_caches(model: nn.Module) -> None:
    """Has models of transformers keep no keys and values for later tokens, as that library does itself.

    A block that is computed again would add its own a second time.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def _keep_costly(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operation in COSTLY
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _HostDraws:
    """Python's and NumPy's random numbers of a pass that is run again: torch puts back its own alone."""

    def __init__(self) -> None:
        self._before = _host_generators()

    @contextmanager
    def again(self) -> Generator[None]:
        """The pass is run again inside, with the same numbers."""
        now = _host_generators()
        _set_host_generators(self._before)
        try:
            yield
        finally:
            _set_host_generators(now)


def _host_generators() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _host_drawn_alike() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a checkpoint's first pass and of its second."""
    return nullcontext(), _HostDraws().again()


def _selectively() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, second = create_selective_checkpoint_contexts(_keep_costly)  # type: ignore[no-untyped-call]
    return first, _both(_HostDraws().again(), second)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Generator[None]:
    with one, other:
        yield


class _BlockRun:
    """A run of blocks of which only the first one's input is kept.

    It works by hooks, as torch's composable `checkpoint` does for one module: the model calls its blocks
    itself, and their names stay.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        self._names, self._blocks = zip(*blocks, strict=True)
        self._again = False
        self._rest: tuple[Any, ...] = ()
        self._options: dict[str, Any] = {}
        self._passed: Tensor | None = None
        self._run: Generator[None, None, None] | None = None
        for index, block in enumerate(self._blocks):
            # Outside of the hooks of tensor parallelism, which run again with the block.
            block.register_forward_pre_hook(
                partial(self._before, index), prepend=index == 0, with_kwargs=True
            )
            block.register_forward_hook(partial(self._after, index))

    def _forward(self, x: Any, *rest: Any, **options: Any) -> Any:
        for block in self._blocks:
            x = block(x, *rest, **options)
        return x

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), self._repeating(_HostDraws())

    @contextmanager
    def _repeating(self, drawn: _HostDraws) -> Generator[None]:
        self._again = True
        try:
            with drawn.again():
                yield
        finally:
            self._again = False

    def _before(self, index: int, block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._again or not torch.is_grad_enabled():
            return
        if index == 0:
            if self._run is not None:
                raise self._apart(f"{self._names[0]} runs again before {self._names[-1]} has run")
            self._rest, self._options = inputs[1:], options
            self._run = _checkpoint_without_reentrant_generator(
                self._forward,
                True,
                self._contexts,
                "default",
                False,
                # The hooks of the last block, those of its shards among them, are to run as well.
                False,
                *inputs,
                **options,
            )
            next(self._run)
        elif not self._follows(inputs, options):
            raise self._apart(f"{self._names[index]} gets something else than the block before it gives")

    def _apart(self, what: str) -> TaskError:
        return TaskError(
            f"checkpointing = 'sqrt' runs {self._names[0]} to {self._names[-1]} in a row, and {what}; use "
            "'every'"
        )

    def _follows(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> bool:
        same = bool(inputs) and _alike((inputs[1:], options), (self._rest, self._options))
        return same and self._passed is not None and _alike(inputs[0], self._passed)

    def _after(self, index: int, block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._again or self._run is None:
            return
        self._passed = output if isinstance(output, Tensor) else None
        if index == len(self._blocks) - 1:
            self._passed = None
            next(self._run, None)
            self._run = None


def _alike(one: Any, other: Any) -> bool:
    """Whether two arguments are the same: tensors by their memory, so that two equal slices of one are."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or _view(one) == _view(other)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and type(one) is type(other):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    plain = isinstance(one, (int, float, str)) and type(one) is type(other)
    return one is other or (plain and bool(one == other))


def _view(tensor: Tensor) -> tuple[Any, ...]:
    """Identifies a view of a tensor's memory, fake or real."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    place = local.untyped_storage()._cdata, local.storage_offset(), local.dtype
    return *place, tuple(local.shape), local.stride(), tensor.requires_grad

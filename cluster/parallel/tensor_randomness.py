"""Random numbers of ranks that share layers: the same for activations that all have, others for shards.

All tensor-parallel ranks take the same stream. A draw for a tensor that is a shard, of heads, of features or
of the sequence, is seeded by that stream's next number and the rank: dropout inside of model-parallel regions
differs by rank, outside it does not (Shoeybi et al. 2019, Megatron-LM, section 3). What a tensor is follows
from the last split layer that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from roundtable.cluster.parallel.forward_trace import draws
from roundtable.cluster.parallel.tensor_parallel import TensorParallel
from roundtable.core.seeds import derive_seed, seed_torch


class ShardedRegions:
    """Follows a pass of a model: `sharded` says whether activations are shards at this point of it.

    A block that is computed again for its backward pass begins anew.
    """

    def __init__(self, plan: TensorParallel, *, sequence: bool) -> None:
        self.sharded = False
        self._plan = plan
        self._sequence = sequence

    def follow(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Adds hooks to a model, or to a pipeline's stage, with these of the repeated blocks."""
        plan, sequence = self._plan, self._sequence
        present = dict(model.named_modules())
        for name, style in plan.styles.items():
            if name in present and style != "attention":
                after = {"column": True, "row": sequence}.get(style, False)
                present[name].register_forward_hook(partial(self._left, after))
        for name in plan.inner:
            if name in present:
                heads = plan.styles.get(name) == "attention"
                present[name].register_forward_pre_hook(partial(self._entered, heads))
                present[name].register_forward_hook(partial(self._left, sequence))
        for name in blocks:
            present[name].register_forward_pre_hook(partial(self._entered, sequence), prepend=True)
            present[name].register_forward_hook(partial(self._left, sequence and name != blocks[-1]))
        model.register_forward_pre_hook(partial(self._entered, False), prepend=True)
        model.register_forward_hook(partial(self._left, False))

    def _entered(self, sharded: bool, module: nn.Module, inputs: Any) -> None:
        self.sharded = sharded

    def _left(self, sharded: bool, module: nn.Module, inputs: Any, output: Any) -> None:
        self.sharded = sharded


class TensorRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The context of passes on rank `rank` of the tensor-parallel ones.

    A draw is a function of the default generators alone: what checkpointing computes again is the same.
    """

    def __init__(self, regions: ShardedRegions, rank: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._regions = regions
        self._rank = rank
        self._device = device

    def begin(self) -> None:
        """Before a micro-batch: what its loss draws is for what all ranks have."""
        self._regions.sharded = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._regions.sharded or not draws(func, args, kwargs):
            return func(*args, **kwargs)
        drawn = int(torch.randint(1 << 62, ()))
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            seed_torch(derive_seed(drawn, "tensor rank", self._rank), self._device)
            return func(*args, **kwargs)

"""Activations that wait in the host's memory from the forward pass to the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

# Smaller tensors stay where they are: their copies would take longer than they are worth.
_LEAST = 1 << 12


class OffloadedActivations(saved_tensors_hooks):
    """Within it, what autograd keeps is copied into CPU memory, and back when the backward pass asks for it.

    Weights stay: who gathers them frees them too. `moved` counts bytes.
    """

    def __init__(self, *, pinned: bool) -> None:
        """`pinned` memory is copied without waiting for it."""
        self.moved = 0

        def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
            if _stays(tensor):
                return tensor
            waiting = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            waiting.copy_(tensor, non_blocking=pinned)
            self.moved += waiting.nbytes
            return tensor.device, waiting

        def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            device, waiting = kept
            return waiting.to(device, non_blocking=pinned, copy=True)

        super().__init__(pack, unpack)


def _stays(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return isinstance(base, (nn.Parameter, DTensor)) or tensor.nbytes < _LEAST

"""Lets optimizers that treat each entry by itself step on a rank's own parts, by fused kernels if there are.

For a DTensor every operation of a step is dispatched anew, which for some hundred parameters takes longer
than the arithmetic. What looks at whole tensors (a trust ratio, factored moments) keeps its DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from roundtable.cluster.parallel.strategy import FUSED


def localise(optimizer: torch.optim.Optimizer) -> None:
    """Puts this rank's part in the place of each DTensor in the optimizer's groups; before its first step."""
    for group in optimizer.param_groups:
        group["params"] = [_part(parameter) for parameter in group["params"]]


def whole_of(parameter: Tensor) -> Tensor:
    """The model's parameter that an optimizer's is, or is a part of."""
    whole: Tensor = getattr(parameter, "whole", parameter)
    return whole


def state_of(parameter: Tensor, value: Tensor) -> Tensor:
    """An optimizer's state of a part as a DTensor like its parameter, over the same memory."""
    whole = whole_of(parameter)
    if whole is parameter or value.shape != parameter.shape or value.dim() == 0:
        return value
    assert isinstance(whole, DTensor)
    # `from_local` would copy what waits in the host's memory to the mesh's devices.
    meta = TensorMeta(whole.shape, whole.stride(), value.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, meta)
    return DTensor(value, spec, requires_grad=False)  # type: ignore[no-untyped-call]


@torch.no_grad()
def hand_over(optimizer: torch.optim.Optimizer) -> None:
    """Hands the gradients of the model's parameters to their parts; before each step."""
    for group in optimizer.param_groups:
        for part in group["params"]:
            whole = whole_of(part)
            if whole is part:
                continue
            here = _local(whole)
            if here.data_ptr() != part.data_ptr():
                # FSDP2 pads uneven shards at the first forward pass, in new memory.
                part.data = here
            part.grad = None if whole.grad is None else _local(whole.grad)


def drop_gradients(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Forgets the gradients of the model's parameters, and those of their parts."""
    for parameter in parameters:
        parameter.grad = None
    for group in optimizer.param_groups:
        for part in group["params"]:
            part.grad = None


def asks_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step can be called off by a flag on the device: in torch's fused kernels."""
    if type(optimizer) not in FUSED or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    # A first step of SGD that is called off would leave its momentum without a value.
    return type(optimizer) is not torch.optim.SGD or not any(g["momentum"] for g in optimizer.param_groups)


def _part(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    part = nn.Parameter(_local(parameter).detach(), parameter.requires_grad)
    part.whole = parameter  # type: ignore[attr-defined]
    return part


def _local(tensor: Tensor) -> Tensor:
    # Its own attribute, as `to_local` takes a detour through autograd.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

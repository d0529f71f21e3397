"""Makes models whose parameters take no memory, and gives them memory later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, and real buffers.

    Buffers that are not saved (rotary tables, masks) come from the code alone and could not be restored.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            moved = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            parameter = moved
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta), torch.random.fork_rng(devices=[]):
        yield


def allocate(module: nn.Module, device: torch.device) -> None:
    """Gives every parameter on the meta device memory, and moves buffers; values come from elsewhere."""

    def place(tensor: Tensor) -> Any:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    module._apply(place)  # type: ignore[no-untyped-call]

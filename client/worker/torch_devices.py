"""The devices of this machine, as `[limits] device` names them."""

from __future__ import annotations

import os

import torch

from roundtable.core.errors import ResourceError


def choose_device(name: str) -> torch.device:
    """The torch device of `[limits] device`; ResourceError for a GPU that this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ResourceError(
            f"[limits] device = {name!r} is not a device; write auto, cpu, cuda or cuda:1"
        ) from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ResourceError(
            f"[limits] device = {name!r}: this machine has {count} CUDA devices that torch can use; "
            'check the driver, or set device = "cpu"'
        )
    return device


def list_devices() -> list[str]:
    """Lists the devices of this machine, without initialising them."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] + [f"cpu:{os.cpu_count()}"]

"""Bounds training's use of a silo's GPUs: `[policy] max_gpus` and `max_gpu_memory`.

The number is what the training process can see at all. The memory bounds torch's allocator there, which
then fails as it does on a smaller device; the CUDA context and libraries' own workspaces, some hundred
megabytes, come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def shown_gpus(most: int | None, device: str, environment: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """(changes to the training process's environment, the name of `[limits] device` in that process).

    With `device` = cuda:K it is the K-th device and those that follow, at most `most` of them.
    """
    if most is None:
        return {}, device
    named = device.startswith("cuda:")
    first = int(device.removeprefix("cuda:")) if named else 0
    shown = gpu_names(range(first, first + most), environment)
    return {VISIBLE: ",".join(shown)}, "cuda:0" if named else device


def gpu_names(devices: Sequence[int], environment: Mapping[str, str]) -> list[str]:
    """The names for child processes of devices with these numbers in this process."""
    listed = environment.get(VISIBLE)
    if listed is None:
        return [str(device) for device in devices]
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return [names[device] for device in devices if device < len(names)]


def memory_fraction(most: int, total: int) -> float:
    """`most` bytes as a share of a device's `total`, at most 1."""
    return min(1.0, most / total)


def bound_gpu_memory(most: int | None, device: torch.device) -> None:
    """Lets this process hold no more than `most` bytes of that device's memory; of no effect for a CPU."""
    if most is not None and device.type == "cuda":
        # torch takes no device without a number here, as "auto" and "cuda" name the one that is current.
        index = torch.cuda.current_device() if device.index is None else device.index
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_fraction(most, total), index)

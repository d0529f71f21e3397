"""Peak operations a second of devices, as their makers publish them: the base of model-FLOPs utilisation."""

from __future__ import annotations

import torch

from roundtable.client.policy.cluster_table import ClusterTable

# (name as torch gives it, bfloat16 on tensor cores, float32 without them), dense, operations a second; the
# first name that is part of the device's counts. Published figures; those given "with sparsity" are halved.
# The NVL cards' have one source only.
_PEAKS = (
    ("H200 NVL", 835e12, 60e12),
    ("H200", 989e12, 67e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("L40S", 362e12, 91.6e12),
    ("L4", 121e12, 30.3e12),
    ("A10", 125e12, 31.2e12),
)


def peak_flops(table: ClusterTable, device: torch.device, precision: str) -> float:
    """Operations a second of one device at the precision of a plan; 0 where it is not known.

    `peak_flops` in `[cluster]` comes before the table of known devices; a CPU is in no table.
    """
    if table.peak_flops is not None:
        return table.peak_flops
    if device.type != "cuda":
        return 0.0
    return known_peak(torch.cuda.get_device_name(device), precision)


def known_peak(name: str, precision: str) -> float:
    """From the table; 0 for a device that it does not have."""
    words = f" {name.replace('-', ' ')} "
    for known, half, single in _PEAKS:
        if f" {known} " in words:
            # Products in TF32 take twice as long as those of two-byte types on the same cores.
            return {"bfloat16": half, "float16": half, "tf32": half / 2}.get(precision, single)
    return 0.0

"""What makers publish of devices and of the links between them: the base of utilisation, and of plans for
hardware on which nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roundtable.client.policy.cluster_table import ClusterTable


@dataclass(frozen=True)
class Published:
    """A device's peaks: operations a second, dense, in bfloat16 on tensor cores and in float32 without
    them; bytes a second of its memory, and in one direction of its link to the others of its node, to
    those of other nodes, and to the host's memory. `name` is part of the name as torch gives it,
    `reached` the share of the operations that large products in training reach.
    """

    name: str
    half: float
    single: float
    memory: float
    within: float
    between: float
    host: float
    reached: float = 0.55

    def products(self, precision: str) -> float:
        """Operations a second in a precision: TF32 takes twice as long as types of two bytes."""
        two = {"bfloat16": self.half, "float16": self.half, "tf32": self.half / 2}
        return two.get(precision, self.single)


# The first name that is part of a device's counts. NVIDIA's data sheets; figures given "with sparsity" are
# halved, bandwidths given for both directions of NVLink and PCIe too. Between nodes: one adapter for each
# device as in DGX H100 and H200 (400 Gb/s) and DGX A100 (200 Gb/s); for the rest eight share 100 Gb/s. The
# NVL cards' have one source only. What is reached was set so that the published steps of
# tests/cluster/test_published_marks.py come out (A100: Megatron-LM, H100: torchtitan); elsewhere as on
# H100.
_PEAKS = (
    Published("H200 NVL", 835e12, 60e12, 4.8e12, 450e9, 50e9, 64e9),
    Published("H200", 989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
    Published("H100 NVL", 835e12, 60e12, 3.9e12, 300e9, 50e9, 64e9),
    Published("H100 PCIe", 756e12, 51e12, 2.0e12, 64e9, 50e9, 64e9),
    Published("H100", 989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9),
    Published("A100", 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 32e9, 0.75),
    Published("L40S", 362e12, 91.6e12, 0.864e12, 32e9, 1.5625e9, 32e9),
    Published("L4", 121e12, 30.3e12, 0.3e12, 32e9, 1.5625e9, 32e9),
    Published("A10", 125e12, 31.2e12, 0.6e12, 32e9, 1.5625e9, 32e9),
)
# Which of them a plan for other hardware means, by the least memory in GiB.
_BY_MEMORY = ((130, "H200"), (60, "H100"), (40, "L40S"), (0, "A10"))


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
    found = published(name)
    return found.products(precision) if found is not None else 0.0


def published(name: str) -> Published | None:
    """What is published of a device by its name; None for one that the table does not have."""
    words = f" {name.replace('-', ' ')} "
    return next((known for known in _PEAKS if f" {known.name} " in words), None)


def usual_device(memory: int) -> Published:
    """The device that is meant where only its memory, in bytes, is said."""
    name = next(name for least, name in _BY_MEMORY if memory >= least << 30)
    found = published(name)
    assert found is not None
    return found


def known_names() -> str:
    """The devices of the table, in words."""
    return ", ".join(known.name for known in _PEAKS)

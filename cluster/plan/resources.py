"""What a plan may use of the silo's cluster: nodes, devices and the memory of each."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from typing_extensions import override

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.core.errors import ConfigError
from roundtable.core.machine.process_facts import group_limit, physical_memory
from roundtable.core.quantities import format_bytes

GpuProducts = Literal["bfloat16", "float16", "float32"]
NEWEST: GpuProducts = "bfloat16"


@dataclass(frozen=True)
class Resources:
    """What a plan may use. `memory` is one device's, in bytes; `device` is cuda or cpu, `gpu_name` its name.

    `gpus` is the type that GPUs among them multiply fastest: bfloat16 from Ampere on, float16 on Volta and
    Turing, float32 before. Those that are not here to be asked are taken for new ones. `host_memory` is a
    node's, in bytes; 0 where it is not known.
    """

    nodes: int
    devices: int
    memory: int
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: GpuProducts = "bfloat16"
    host_memory: int = 0
    gpu_name: str = ""

    @property
    def fast(self) -> GpuProducts:
        """The type that the devices multiply fastest: float32 on a CPU."""
        return "float32" if self.device == "cpu" else self.gpus

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices

    @override
    def __str__(self) -> str:
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        plural = "s" if self.devices > 1 else ""
        return f"{nodes}{self.devices} {self.device} device{plural} with {format_bytes(self.memory)} each"

    def with_world(self, world: int) -> Resources:
        """As many devices in all, over whole nodes where that goes up, else on one."""
        if world % self.devices == 0:
            return replace(self, nodes=world // self.devices)
        if world < self.devices:
            return replace(self, nodes=1, devices=world)
        raise ConfigError(
            f"a world of {world} is not a whole number of nodes with {self.devices} devices each; "
            "set nodes and devices in [cluster]"
        )


def find_resources(table: ClusterTable) -> Resources:
    """The silo's resources, with `auto` resolved on this machine; ConfigError for devices that it lacks."""
    gpus = torch.cuda.device_count() if table.backend != "gloo" else 0
    if table.backend == "nccl" and not gpus:
        raise ConfigError('[cluster] backend = "nccl" needs CUDA devices, and torch finds none here')
    device: Literal["cuda", "cpu"] = "cuda" if gpus else "cpu"
    devices = table.devices if table.devices != "auto" else gpus or 1
    if gpus and devices > gpus and table.launch == "torchrun":
        raise ConfigError(f"[cluster] devices = {devices}: this machine has {gpus} CUDA devices")
    memory, products = table.memory, NEWEST
    if gpus and (memory == "auto" or table.precision == "auto"):
        least, products = _asked_of_gpus(gpus)
        memory = least if memory == "auto" else memory
    elif memory == "auto":
        memory = _memory_of_cpu() // devices
    host = _memory_of_cpu() if table.host_memory == "auto" else table.host_memory
    return Resources(table.nodes, devices, memory, device, products, host)


def allowed_resources(table: ClusterTable, policy: PolicyTable) -> Resources:
    """The resources of `find_resources`, within the GPUs and GPU memory that the silo's policy allows."""
    if policy.max_gpus == 0:
        return find_resources(table.model_copy(update={"backend": "gloo"}))
    present = find_resources(table)
    if present.device != "cuda":
        return present
    devices = min(present.devices, policy.max_gpus or present.devices)
    return replace(
        present, devices=devices, memory=min(present.memory, policy.gpu_memory_bytes or present.memory)
    )


@cache
def _asked_of_gpus(count: int) -> tuple[int, GpuProducts]:
    """(bytes of the smallest, what the oldest multiplies fast) of so many devices.

    They are asked in a process of its own. To ask would begin CUDA here: that takes memory of each device for
    the agent's whole life, and freezes the number of devices that torch finds, so that none that goes or
    comes would be seen.
    """
    script = (
        f"import torch; of = [torch.cuda.get_device_properties(i) for i in range({count})]; "
        "print(min(one.total_memory for one in of), min(one.major for one in of))"
    )
    asked = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(
            f"the memory of {count} CUDA devices could not be asked ({last[:200]}); set [cluster] memory"
        )
    memory, major = map(int, asked.stdout.split())
    return memory, NEWEST if major >= 8 else "float16" if major == 7 else "float32"


def _memory_of_cpu() -> int:
    total, limit = physical_memory(), group_limit()
    assert total is not None, "groups of ranks are refused elsewhere"
    return total if limit is None else min(total, limit)

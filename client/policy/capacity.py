"""What a silo has for jobs, within what its agent.toml allows: the coordinator gives no more of it away."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from roundtable.client.policy.config import AgentConfig
from roundtable.core.machine.process_facts import physical_memory


class SiloCapacity(NamedTuple):
    """How many jobs at a time, GPUs, bytes of main memory and of free disk; 0 where that cannot be told."""

    jobs: int
    gpus: int
    memory: int
    disk: int


def capacity_of(config: AgentConfig) -> SiloCapacity:
    """What this machine has, within [limits] and [policy]."""
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device.startswith("cuda:"):
        gpus = min(gpus, 1)
    if config.policy.max_gpus is not None:
        gpus = min(gpus, config.policy.max_gpus)
    memory = config.policy.memory_bytes or physical_memory() or 0
    return SiloCapacity(config.jobs, gpus, memory, _free_disk(config.state))


def _free_disk(folder: Path) -> int:
    try:
        return max(1, shutil.disk_usage(folder).free)
    except OSError:
        return 0

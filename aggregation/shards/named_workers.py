"""Who combines blocks of columns, by the name that the coordinator's file gives."""

from __future__ import annotations

from concurrent.futures import Future
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch

from roundtable.aggregation.rows.row_passes import ShardOrder, ShardWorkers
from roundtable.aggregation.shards.shard_processes import ShardCommand, ShardProcesses
from roundtable.core.errors import ConfigError
from roundtable.core.machine.process_facts import cores


class OwnThreads:
    """Nobody beside this process, whose threads work on each block together."""

    def ready(self) -> int:
        return 0

    def give(self, order: ShardOrder, values: torch.Tensor) -> Future[np.ndarray]:
        raise AssertionError("nobody is ready")

    def close(self) -> None:
        return


def shard_workers(where: Literal["threads", "processes", "ray"], count: int | None) -> ShardWorkers:
    """The workers, not started yet: `count` of them, or one for each core. ConfigError for Ray where there is
    none."""
    if where == "threads":
        return OwnThreads()
    module = "roundtable.aggregation.shards"
    if where == "processes":
        numbers = range(1, (count or cores()) + 1)
        return ShardProcesses(
            [ShardCommand(f"combining process {number}", f"{module}.shard_worker") for number in numbers]
        )
    if find_spec("ray") is None:
        raise ConfigError(
            'combine = "ray" needs Ray: pip install "roundtable-fl[ray]", or set combine = "threads"',
            key=("combine",),
        )
    return ShardProcesses([ShardCommand("the Ray cluster", f"{module}.ray_driver", (str(count or 0),))])

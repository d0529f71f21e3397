"""Process groups in tests: a function on each of so many ranks, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
# Ranks are forked off a process that has torch imported already.
_context.set_forkserver_preload(["cluster_cases"])


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 240.0) -> list[Any]:
    """What the function returns on each rank; the first rank's traceback where one raises."""
    with tempfile.TemporaryDirectory() as folder:
        queue = _context.SimpleQueue()
        ranks = [
            _context.Process(target=_rank, args=(function, rank, world, folder, queue, arguments))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        found: dict[int, Any] = {}
        try:
            for _ in ranks:
                rank, result, trace = queue.get()
                if trace:
                    raise AssertionError(f"rank {rank}:\n{trace}")
                found[rank] = result
        finally:
            for process in ranks:
                if len(found) < world:
                    process.kill()
                process.join(timeout)
        return [found[rank] for rank in range(world)]


def _rank(
    function: Callable[..., Any], rank: int, world: int, folder: str, queue: Any, arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)})
    try:
        store = dist.FileStore(str(Path(folder) / "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        queue.put((rank, function(rank, *arguments), ""))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever a rank raises is the test's to see
        queue.put((rank, None, traceback.format_exc()))

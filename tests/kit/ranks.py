"""Process groups in tests: a function on each of so many ranks, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

_context = multiprocessing.get_context("forkserver")


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 240.0) -> list[Any]:
    """What the function returns on each rank; AssertionError with the first traceback where one raises.

    The function is of a module of tests/kit: no rank finds those of the tests themselves.
    """
    _start_forkserver()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            _context.Process(target=_rank, args=(function, rank, world, folder, sending, arguments))
            for rank, (_, sending) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, sending in pipes:
            # So that a rank's death ends its pipe.
            sending.close()
        waiting = {receiving: rank for rank, (receiving, _) in enumerate(pipes)}
        results: dict[int, Any] = {}
        try:
            while waiting:
                ready = connection.wait(list(waiting), timeout)
                assert ready, f"ranks {sorted(waiting.values())} said nothing for {timeout} s"
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    results[rank] = _received(pipe, rank, ranks[rank])
        finally:
            for process in ranks:
                if len(results) < world:
                    process.kill()
                process.join(timeout)
        return [results[rank] for rank in range(world)]


def _received(pipe: Any, rank: int, process: Any) -> Any:
    try:
        result, trace = pickle.loads(pipe.recv_bytes())  # noqa: S301 - the test's own ranks wrote it
    except EOFError:
        process.join()
        raise AssertionError(f"rank {rank} died with exit code {process.exitcode}") from None
    if trace:
        raise AssertionError(f"rank {rank}:\n{trace}")
    return result


@cache
def _start_forkserver() -> None:
    """Ranks are forked off a process that has torch imported already.

    That process finds modules by the environment alone: it does not know of this process's sys.path.
    """
    _context.set_forkserver_preload(["cluster_cases"])
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
        forkserver.ensure_running()


def _rank(
    function: Callable[..., Any], rank: int, world: int, folder: str, pipe: Any, arguments: tuple[Any, ...]
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
        _say(pipe, function(rank, *arguments), "")
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever a rank raises is the test's to see
        _say(pipe, None, traceback.format_exc())


def _say(pipe: Any, result: Any, trace: str) -> None:
    # Sent as objects, tensors would lie in memory of this process, which may be gone before they are read.
    pipe.send_bytes(pickle.dumps((result, trace)))

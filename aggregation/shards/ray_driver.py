"""The process between `ShardProcesses` and a Ray cluster: it hands each block to an actor of the cluster.

A process of its own, because Ray ends the process that speaks to a cluster when that is lost for a minute,
and a coordinator must not end with it. Blocks go to the nodes through the object store, orders and results
beside them. An actor whose arithmetic gives other bits than this machine (another processor, no compiled
kernels) gets no blocks. When an actor is lost, this process ends: the next one finds what is there then.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from roundtable.aggregation.rows.column_work import (
    AroundCells,
    ColumnWork,
    Combination,
    GramCells,
    NormCells,
    OrderStatistic,
)
from roundtable.aggregation.rows.kernels import WORTH_COMPILING
from roundtable.aggregation.rows.matrix import CELL
from roundtable.aggregation.rows.row_passes import ShardOrder
from roundtable.aggregation.rows.sorting_networks import merge_exchange
from roundtable.aggregation.shards.shard_worker import LANES, Order, answer, opened, serve
from roundtable.core.errors import ResourceError
from roundtable.core.workers.frames import Channel, PeerGone

_PROBED_ROWS = 7
_SECONDS = 120.0
"""After so long an actor will give no answer any more."""


def main() -> None:
    """Serves one process until it closes the connection; second argument: the most actors, or 0."""
    channel = _Shared(opened().connection)
    ray = import_module("ray")
    with contextlib.suppress(PeerGone):
        try:
            actors = _start(ray, int(sys.argv[2]))
        except Exception as error:  # noqa: BLE001 - Ray's errors have many bases; all mean: no cluster
            detail = str(error).strip().splitlines() or [type(error).__name__]
            channel.send({"op": "refused", "detail": detail[0]})
            return
        free: SimpleQueue[Any] = SimpleQueue()
        for actor in actors * LANES:
            free.put(actor)
        channel.send({"op": "ready", "lanes": LANES * len(actors)})
        with ThreadPoolExecutor(LANES * len(actors)) as threads:

            def take(lane: int, order: Order) -> None:
                threads.submit(answer, channel, lane, partial(_made_by, ray, free, channel, order))

            serve(channel, take)


class ShardHost:
    """What runs in an actor."""

    def __init__(self, path: list[str]) -> None:
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        torch.set_num_threads(1)

    def fingerprint(self) -> str:
        """Of this node's arithmetic."""
        return arithmetic()

    def made_of(
        self, order: Mapping[str, Any], arrays: Mapping[str, np.ndarray], values: np.ndarray
    ) -> np.ndarray:
        """The order's result for a block."""
        return ShardOrder.from_plain(order, arrays).made_of(torch.from_numpy(values.copy()))


class _Shared(Channel):
    """A channel to which several threads send."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._sending = threading.Lock()

    @override
    def send(self, *arguments: Any, **named: Any) -> None:
        with self._sending:
            super().send(*arguments, **named)


def arithmetic() -> str:
    """A digest of what this machine makes of a fixed block: equal where the bits of all works are."""
    values = torch.from_numpy(
        np.random.default_rng(7).standard_normal((_PROBED_ROWS, 2 * CELL + 100), dtype=np.float32)
    )
    factors = np.linspace(-1.0, 2.0, _PROBED_ROWS)
    mixing = np.outer(factors, factors[::-1]) + 0.1
    network = np.array(merge_exchange(_PROBED_ROWS), dtype=np.int32)
    probes: tuple[tuple[ColumnWork, tuple[np.ndarray, ...]], ...] = (
        (GramCells(), ()),
        (NormCells(), ()),
        (AroundCells(1), ()),
        (Combination(factors), ()),
        (OrderStatistic(network, 0, 1, 5), ()),
        (OrderStatistic(network, 1, 0, 3), (mixing,)),
    )
    found = hashlib.blake2b()
    for work, steps in probes:
        found.update(ShardOrder(work, steps, WORTH_COMPILING).made_of(values).tobytes())
    return found.hexdigest()


def _start(ray: Any, most: int) -> list[Any]:
    """Actors that calculate as this machine does, in turn over the nodes. ResourceError without one."""
    address = os.environ.get("RAY_ADDRESS")
    dashboard = False if address is None else None
    ray.init(address=address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    cores = sorted(
        (turn, node["NodeID"]) for node in nodes for turn in range(int(node["Resources"].get("CPU", 0)))
    )
    affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    host = ray.remote(ShardHost)
    actors = [
        host.options(num_cpus=1, scheduling_strategy=affinity(node, soft=False)).remote(sys.path)
        for _, node in cores[: most or None]
    ]
    own = arithmetic()
    asked = [actor.fingerprint.remote() for actor in actors]
    told = ray.get(asked, timeout=_SECONDS)
    alike = [actor for actor, found in zip(actors, told, strict=True) if found == own]
    for actor in actors:
        if actor not in alike:
            ray.kill(actor)
    if not alike:
        raise ResourceError(
            f"none of {len(actors)} cores on {len(nodes)} Ray nodes calculates with this machine's bits: "
            "give the cluster nodes with this processor, a C++ compiler and the same versions"
        )
    return alike


def _made_by(ray: Any, free: SimpleQueue[Any], channel: Channel, order: Order) -> np.ndarray:
    """The answer of the actor that is free next."""
    plain, arrays, values = order
    actor = free.get()
    try:
        block = ray.put(values.numpy())
        result: np.ndarray = ray.get(actor.made_of.remote(plain, arrays, block), timeout=_SECONDS)
    except ray.exceptions.RayTaskError:
        free.put(actor)
        raise
    except BaseException:
        channel.connection.shutdown(socket.SHUT_RDWR)
        raise
    free.put(actor)
    return np.array(result)

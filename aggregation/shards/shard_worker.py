"""A worker process of `ShardProcesses`; `main` is called with the socket's descriptor as first argument.

It maps the memory in which blocks lie, and answers each order with its result. It ends when its socket does,
so that it never outlives whoever started it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.rows.row_passes import ShardOrder
from roundtable.core.machine.process_facts import prefer_to_be_killed
from roundtable.core.machine.stop_signals import leave_signals_to_owner
from roundtable.core.workers.frames import Channel, PeerGone
from roundtable.core.workers.shared_vectors import SharedFloats

LANES = 2
"""Blocks of a worker: one that it works on, and one that is filled meanwhile."""

Order = tuple[dict[str, Any], dict[str, np.ndarray], torch.Tensor]
"""An order in its plain form, and the block [rows, width]."""


def main() -> None:
    """Serves one process until it closes the connection."""
    channel = opened()
    with contextlib.suppress(PeerGone):
        channel.send({"op": "ready", "lanes": LANES})
        serve(channel, lambda lane, order: answer(channel, lane, lambda: _made_of(order)))


def opened() -> Channel:
    """The connection to whoever started this process, which from now on is ready to be told what to do."""
    # Ctrl-C goes to the whole terminal; whoever started this ends it by closing the socket.
    leave_signals_to_owner()
    prefer_to_be_killed()
    torch.set_num_threads(1)
    return Channel(socket.socket(fileno=int(sys.argv[1])))


def serve(channel: Channel, take: Callable[[int, Order], None]) -> None:
    """Hands on each order as it comes, with its lane. Raises PeerGone at the end."""
    memories: dict[int, SharedFloats] = {}
    while True:
        message, tensors, descriptors = channel.receive()
        lane = message["lane"]
        if message["op"] == "memory":
            memories[lane] = SharedFloats(descriptors[0], 1, message["floats"])
            memories[lane].close()
            continue
        arrays = {name: tensor.numpy() for name, tensor in tensors[0].items()}
        values = block_in(memories[lane], message["dtype"], *message["shape"])
        take(lane, (message["order"], arrays, values))


def answer(channel: Channel, lane: int, made: Callable[[], np.ndarray]) -> None:
    """Sends what `made` gives. An error is told: whoever ordered tries it as well, and says what it is."""
    try:
        result = made()
    except Exception as error:  # noqa: BLE001 - see above
        channel.send({"op": "failed", "lane": lane, "detail": f"{type(error).__name__}: {error}"})
        return
    channel.send({"op": "done", "lane": lane}, [{"result": torch.from_numpy(result)}])


def block_in(memory: SharedFloats, dtype: str, rows: int, width: int) -> torch.Tensor:
    """The block [rows, width] of float32 or float64 values at the memory's beginning."""
    floats = memory.tensor.view(-1)
    flat = floats[: floats.numel() // 2 * 2].view(torch.float64) if dtype == "float64" else floats
    return flat[: rows * width].view(rows, width)


def _made_of(order: Order) -> np.ndarray:
    plain, arrays, values = order
    return ShardOrder.from_plain(plain, arrays).made_of(values)

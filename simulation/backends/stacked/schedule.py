"""Who takes which step together: clients whose next batches have the same size.

A short last batch is never filled up: the mean over a filled one would only be that of the short one for
losses that are means over examples, and nobody can tell. So clients with short batches of one size take
that step together, after the full ones of the epoch, and the others wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Turn:
    """A step of `clients`, places in the stack in ascending order, on `rows` [clients, batch size]."""

    clients: np.ndarray
    rows: np.ndarray


def turns(orders: Sequence[Sequence[np.ndarray]], batch_size: int) -> Iterator[Turn]:
    """All steps of a stack of clients, each client's in its own order.

    `orders[client][epoch]` are the rows of an epoch in the order in which they are to be used; clients
    may have different numbers of epochs.
    """
    for epoch in range(max(map(len, orders), default=0)):
        present = np.array([client for client, epochs in enumerate(orders) if len(epochs) > epoch])
        mine = [orders[client][epoch] for client in present]
        lengths = np.array([len(rows) for rows in mine])
        rows, starts = np.concatenate(mine), np.cumsum(lengths) - lengths
        full, rest = lengths // batch_size, lengths % batch_size
        for step in range(full.max()):
            here = np.flatnonzero(full > step)
            begin = starts[here] + step * batch_size
            yield Turn(present[here], rows[begin[:, None] + np.arange(batch_size)])
        for size in np.unique(rest[rest > 0]):
            here = np.flatnonzero(rest == size)
            begin = (starts + full * batch_size)[here]
            yield Turn(present[here], rows[begin[:, None] + np.arange(size)])

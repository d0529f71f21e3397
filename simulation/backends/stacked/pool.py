"""Clients' training data on the device, so that a batch of many clients is one lookup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Parts = Sequence[Tensor]


def kind_of(parts: Parts) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """What examples must have in common to lie in one pool: shape and type of each part."""
    return tuple((part.shape[1:], part.dtype) for part in parts)


class Pool:
    """One tensor for each part of an example; clients' rows lie one after the other.

    Who has been uploaded stays, until more than `budget` bytes would be held: then all go but those who
    are needed at once, and these are held however large they are.
    """

    def __init__(self, parts: Parts, device: torch.device, budget: int) -> None:
        """For examples like those of `parts`, which are not added."""
        self.kind = kind_of(parts)
        self._device = device
        self._limit = budget // max(1, sum(part[:1].nbytes for part in parts))
        self._parts = [torch.empty((0, *part.shape[1:]), dtype=part.dtype, device=device) for part in parts]
        self._places: dict[int, tuple[int, int]] = {}
        self._used = 0

    def count(self, index: int) -> int | None:
        """How many examples client `index` has; None if it is not held."""
        place = self._places.get(index)
        return None if place is None else place[1]

    def hold(self, indices: Sequence[int], load: Callable[[int], Parts]) -> list[int]:
        """Holds these clients at once, loading who is missing; the first row of each, until the next call."""
        missing = {index: load(index) for index in indices if index not in self._places}
        if self._used + _rows(missing.values()) > self._limit:
            self._places, self._used = {}, 0
            missing = {index: missing[index] if index in missing else load(index) for index in indices}
        if missing:
            self._upload(missing)
        return [self._places[index][0] for index in indices]

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The examples of `rows`, int64 of any shape: each part [*rows.shape, …]."""
        flat = rows.reshape(-1)
        return tuple(part.index_select(0, flat).view(*rows.shape, *part.shape[1:]) for part in self._parts)

    def _upload(self, clients: dict[int, Parts]) -> None:
        start, stop = self._used, self._used + _rows(clients.values())
        room = len(self._parts[0])
        if stop > room:
            more = max(stop, min(2 * room, self._limit)) - room
            self._parts = [torch.cat([part, part.new_empty(more, *part.shape[1:])]) for part in self._parts]
        for number, part in enumerate(self._parts):
            rows = torch.cat([parts[number] for parts in clients.values()])
            part[start:stop].copy_(pinned(rows, self._device), non_blocking=True)
        for index, parts in clients.items():
            self._places[index] = (self._used, len(parts[0]))
            self._used += len(parts[0])


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """In memory that the device can fetch from while this process goes on."""
    return values.pin_memory() if device.type == "cuda" else values


def _rows(clients: Iterable[Parts]) -> int:
    return sum(len(parts[0]) for parts in clients)

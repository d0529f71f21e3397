"""Where vectors as large as the model go in a round: into memory, unless a driver has files for them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from roundtable.aggregation.taking import ColumnSink, blocks_of


class PlacedVector(ColumnSink, Protocol):
    """A vector [d] that is written block by block."""

    def end(self) -> Tensor:
        """What was taken, [d]; empty where nobody needs it here any more."""


class VectorPlaces(Protocol):
    """Has places for vectors that a round makes, and is told what of the old ones has been read."""

    def model(self, columns: int) -> PlacedVector:
        """For the new model, as silos get it."""

    def state(self, columns: int) -> PlacedVector:
        """For a vector that the next round goes on from: `end` gives it, in memory or mapped."""

    def keep(self, vector: Tensor) -> Tensor:
        """Takes a new model that is in memory as a whole; returns it, or nothing where it is elsewhere."""

    def passed(self, part: Tensor) -> None:
        """A part of the old model or state has been read, and its pages can go; it may be read again."""


class MemoryVector:
    """A vector in memory, of the type and in the place of what it takes."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._vector = torch.empty(0)

    def begin(self) -> None:
        self._vector = torch.empty(0)

    def take(self, start: int, values: Tensor) -> None:
        if start == 0:
            self._vector = torch.empty(self._columns, dtype=values.dtype, device=values.device)
        self._vector[start : start + len(values)] = values

    def end(self) -> Tensor:
        return self._vector


class InMemory:
    """Everything in memory."""

    def model(self, columns: int) -> MemoryVector:
        return MemoryVector(columns)

    def state(self, columns: int) -> MemoryVector:
        return MemoryVector(columns)

    def keep(self, vector: Tensor) -> Tensor:
        return vector

    def passed(self, part: Tensor) -> None:
        return


def placed(vector: Tensor, place: PlacedVector) -> Tensor:
    """Hands a whole vector over, block by block; returns what became of it."""
    place.begin()
    for start, values in blocks_of(vector):
        place.take(start, values)
    return place.end()

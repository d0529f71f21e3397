"""A vector that is written in runs, one behind the other, each in a way of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from roundtable.core.encodings.codec import Codec
from roundtable.core.encodings.encoding import BLOCK_ELEMENTS, GRID, ByteSource, VectorReader
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import TensorSpec

_AT_A_TIME = 8 * GRID


class ValueRun(Protocol):
    """Values of a run in order, as many at a time as somebody asks for."""

    def read(self, out: Tensor) -> None:
        """The next values."""


class RunReader:
    """A VectorReader over (values, run) in order; a run is not begun before its first value is asked for."""

    def __init__(self, runs: Iterator[tuple[int, ValueRun]]) -> None:
        self._runs = runs
        self._left = 0
        self._run: ValueRun | None = None

    def read(self, out: Tensor) -> None:
        at = 0
        while at < len(out):
            while not self._left:
                self._left, self._run = next(self._runs)
            count = min(self._left, len(out) - at)
            assert self._run is not None
            self._run.read(out[at : at + count])
            at, self._left = at + count, self._left - count


class BufferedRun:
    """A run of `count` values of a reader that is asked for whole grids; at most 64 K of them are held."""

    def __init__(self, reader: VectorReader, count: int) -> None:
        self._reader = reader
        self._left = count
        self._held = torch.empty(0)

    def read(self, out: Tensor) -> None:
        at = 0
        while at < len(out):
            if not len(self._held):
                self._held = torch.empty(min(self._left, _AT_A_TIME))
                self._reader.read(self._held)
                self._left -= len(self._held)
            count = min(len(self._held), len(out) - at)
            out[at : at + count] = self._held[:count]
            at, self._held = at + count, self._held[count:]


class HeldRun:
    """A run of values that are there already."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def read(self, out: Tensor) -> None:
        out.copy_(self._values[: len(out)])
        self._values = self._values[len(out) :]


def whole_run(codec: Codec, source: ByteSource, count: int) -> Tensor:
    """So many values of a run at once."""
    values = torch.empty(count)
    codec.decode(source.read(codec.size(count)), values)
    return values


def codec_run(codec: Codec, values: Tensor, first: int, key: int) -> Iterable[np.ndarray]:
    """The bytes of a run, in blocks; `first`, a multiple of GRID, tells its draws from those of others."""
    for at in range(0, len(values), BLOCK_ELEMENTS):
        yield codec.encode(values[at : at + BLOCK_ELEMENTS], first + at, key)


def tensors_of(chain: str, layout: Layout | None, elements: int | None = None) -> tuple[TensorSpec, ...]:
    """The tensors of a vector that are not empty; EncodingError without a layout of so many values."""
    if layout is None or (elements is not None and layout.size != elements):
        count = "" if elements is None else f" of {elements} values"
        raise EncodingError(f"{chain} looks at each tensor, and no layout{count} was given to it")
    return tuple(spec for spec in layout.averaged if spec.size)

"""What an encoding is: how a flat float32 vector becomes bytes for the journey, and what it declares.

An encoding is made of a *chain* of stages, `topk(ratio=0.05) | int8`, parsed once (`chain.py`) and put
together for a layout (`assembly.py`). Whoever combines it with masks, noise or rules reads its `Traits`
and refuses by them: nothing is silently different.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.seeds import derive_seed

BLOCK_ELEMENTS = 1 << 20
"""Values that are encoded at a time: a stream begins before the last block is encoded."""

GRID = 8192
"""Readers are asked for whole multiples of so many values, but for a vector's end."""

LARGEST_BLOCK = 4096
"""Values that may share a scale; divides GRID."""

Memory = MutableMapping[str, Tensor]
"""What an encoding keeps at the client from one update to the next, by name: empty before the first."""


@dataclass(frozen=True)
class StreamKey:
    """Names the randomness of one update: the same key gives the same bytes, wherever an upload is resumed.

    Both ends know it: `seed` is the job's, (round, attempt) the step that was asked for.
    """

    seed: int = 0
    client: str = ""
    round: int = 0
    attempt: int = 0

    @property
    def own(self) -> int:
        """63 bits of this client's own."""
        return derive_seed(self.seed, self.round, self.attempt, self.client, "encoding")

    @property
    def cohort(self) -> int:
        """63 bits that all clients of the step have in common."""
        return derive_seed(self.seed, self.round, self.attempt, "encoding")


NO_KEY = StreamKey()
"""For encodings that draw nothing."""


@dataclass(frozen=True)
class Traits:
    """What an encoding C says of itself, for whoever combines it with something.

    error: `exact`: C(x) = x to float32; `unbiased`: E C(x) = x, with E‖C(x)−x‖² ≤ worst²·‖x‖²; `bounded`:
    biased with ‖C(x)−x‖ ≤ worst·‖x‖; `contractive` ones have worst < 1 and are safe under error feedback.
    worst: that factor for a vector of d values; infinite where there is none.
    lengthens: the largest ‖C(x)‖/‖x‖; infinite where there is none. Privacy that clips before encoding
    pays it. support: which values are sent: `all`; `own`: each client's own choice, which tells of its
    data; `seeded`: each client's, from its key; `cohort`: the same for all clients of a step.
    feedback: whether error feedback is on unless a job says otherwise. scaled: whether values that are sent
    also stand for those that are not, and are multiplied by d/k for it; rescaled: whether they are lengthened
    to the norm of all. by_round: whether it changes with the round. size_tells: whether how many bytes an
    update has depends on its values.
    """

    error: Literal["exact", "unbiased", "bounded"]
    worst: Callable[[int], float] = lambda elements: 0.0
    lengthens: Callable[[int], float] = lambda elements: math.inf
    support: Literal["all", "own", "seeded", "cohort"] = "all"
    feedback: bool = False
    scaled: bool = False
    rescaled: bool = False
    by_round: bool = False
    size_tells: bool = False

    def contractive(self, elements: int) -> bool:
        """Whether ‖C(x)−x‖² ≤ (1−δ)‖x‖² with a δ > 0 for every x: what error feedback needs."""
        return self.error != "unbiased" and self.worst(elements) < 1.0


class ByteSource(Protocol):
    """Bytes in order, of an update that lies somewhere."""

    def read(self, count: int) -> memoryview:
        """The next `count` bytes; EncodingError where there are fewer. Valid until the next call."""

    def skip(self, count: int) -> None:
        """Passes over bytes; EncodingError where there are fewer."""


class VectorReader(Protocol):
    """Decodes an update in order, a few values at a time, and refuses what is none."""

    def read(self, out: Tensor) -> None:
        """Decodes the next values into `out`, contiguous float32: a multiple of GRID, or the rest."""


class Encoding(ABC):
    """One way to write a float32 vector as bytes.

    `chain` is its canonical text; `dense_dtype` is set where the bytes are a plain little-endian array,
    which can be mapped and read as it lies. `keeps` names what it keeps in a client's memory.
    """

    chain: str
    traits: Traits
    dense_dtype: torch.dtype | None = None
    keeps: tuple[str, ...] = ()

    def over(self, layout: Layout) -> Encoding:
        """This encoding of vectors of a layout. Some look at tensors and work over a layout alone."""
        return self

    def in_round(self, round: int) -> Encoding:
        """This encoding of the vectors of a round (from 1), where nobody gives a key that names it."""
        return self

    @abstractmethod
    def size_bound(self, elements: int) -> int:
        """The most bytes that a vector of so many values takes: what a receiver accepts at all."""

    def encoded_size(self, elements: int) -> int | None:
        """Exactly how many bytes; None where that depends on the values."""
        return self.size_bound(elements)

    @abstractmethod
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        """The bytes of a float32 vector, in blocks; each is valid until the next.

        Those of ours encode a vector on a GPU there, to the same bytes (but for `lowrank`, whose products
        round otherwise), and only bytes come to the CPU. `memory` is what this encoding keeps at the client,
        changed in place. Raises EncodingError for values that are not finite, or too large for it.
        """

    @abstractmethod
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        """Decodes such bytes in order. Allocates no more than a block, whatever the bytes claim."""

    def decode(self, data: memoryview | bytes, out: Tensor, key: StreamKey = NO_KEY) -> None:
        """Writes the vector that `data` encodes into `out`; EncodingError if it does not fit."""
        source = HeldBytes(data)
        expected, size = self.encoded_size(out.numel()), source.left
        if expected is not None and size != expected:
            raise EncodingError(f"{self.chain} of {out.numel()} elements is {expected} bytes, got {size}")
        self.reader(source, out.numel(), key).read(out)
        if source.left:
            raise EncodingError(f"{source.left} bytes follow the last value of the update ({self.chain})")


class HeldBytes:
    """A ByteSource over bytes in memory."""

    def __init__(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        self._data = view.cast("B") if view.nbytes else memoryview(b"")
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that have not been read."""
        return len(self._data) - self._at

    def read(self, count: int) -> memoryview:
        self.skip(count)
        return self._data[self._at - count : self._at]

    def skip(self, count: int) -> None:
        if count > self.left:
            raise EncodingError(f"the update ends {count - self.left} bytes too early")
        self._at += count


def check_vector(vector: Tensor) -> Tensor:
    """The vector as encodings take it; EncodingError for anything but flat float32."""
    if vector.dtype != torch.float32 or vector.dim() != 1:
        raise EncodingError(f"only flat float32 vectors are encoded, not {vector.dtype} {list(vector.shape)}")
    return vector.detach().contiguous()

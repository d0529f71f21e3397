"""A round's fragment of a model: some of its layers, and the others another time (Streaming DiLoCo)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.composed.runs import BufferedRun, RunReader, ValueRun, tensors_of
from roundtable.core.encodings.encoding import (
    NO_KEY,
    ByteSource,
    Encoding,
    Memory,
    StreamKey,
    Traits,
    VectorReader,
    check_vector,
)
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import TensorSpec
from roundtable.core.toml_tables import Table

STAGE = "fragments"
MOST_FRAGMENTS = 1024
_HEAD = struct.Struct("<I")


class FragmentTable(Table):
    """Parameters of fragments."""

    count: int = Field(ge=1, le=MOST_FRAGMENTS, description="fragments that a model is cut into")
    order: Literal["strided", "sequential"] = Field(
        "strided",
        description="which layers are together: each count-th one, or neighbours",
    )

    @property
    def stage(self) -> str:
        """The stage of a chain that these are the parameters of."""
        return f"{STAGE}(count={self.count}, order={self.order})"


def written_before(stage: str, chain: str) -> str:
    """A chain with this stage of fragments first, in the place of one that is there."""
    first, _, rest = chain.partition(" | ")
    return f"{stage} | {(rest or 'float32') if first.startswith(STAGE) else chain}"


class Fragments:
    """The tensors of a layout's vector, layer by layer in `table.count` fragments.

    A layer is what has one name up to its first number (`blocks.3`), or, without one, of one module. Layer l
    of L, in the order of the model, is in fragment l mod P if strided, else in ⌊l P / L⌋ (Douillard et al.
    2025, section 2.3 and figure 2). Raises EncodingError for a model of fewer layers than fragments.
    """

    def __init__(self, table: FragmentTable, tensors: Sequence[TensorSpec]) -> None:
        self.table = table
        self.tensors = tuple(tensors)
        layers = list(dict.fromkeys(layer_of(spec.name) for spec in tensors))
        if len(layers) < table.count:
            raise EncodingError(
                f"{table.stage}: the model has {len(layers)} layers ({', '.join(layers[:5])}"
                f"{', …' if len(layers) > 5 else ''}), which do not make {table.count} fragments: set fewer"
            )
        strided = table.order == "strided"
        numbers = {
            layer: at % table.count if strided else at * table.count // len(layers)
            for at, layer in enumerate(layers)
        }
        self.numbers = tuple(numbers[layer_of(spec.name)] for spec in tensors)

    def due(self, round: int) -> int:
        """The number, from 0, of the fragment that a round (from 1) sends."""
        return (round - 1) % self.table.count

    def places(self, number: int) -> list[slice]:
        """Where the fragment's values lie in the vector, in order; what is side by side is one."""
        found: list[slice] = []
        for spec, own in zip(self.tensors, self.numbers, strict=True):
            if own != number or not spec.size:
                continue
            if found and found[-1].stop == spec.offset:
                found[-1] = slice(found[-1].start, spec.offset + spec.size)
            else:
                found.append(slice(spec.offset, spec.offset + spec.size))
        return found

    def size(self, number: int) -> int:
        """How many values a fragment has."""
        return sum(place.stop - place.start for place in self.places(number))

    def layout(self, number: int) -> Layout:
        """The layout of a fragment's values alone, one tensor after the other."""
        specs, at = [], 0
        for spec, own in zip(self.tensors, self.numbers, strict=True):
            if own == number:
                specs.append(replace(spec, offset=at))
                at += spec.size
        return Layout(tuple(specs))


def layer_of(name: str) -> str:
    """The layer that a tensor of this name belongs to."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


class Fragmented(Encoding):
    """Of a vector the values of the round's fragment, as `inner` writes them; the others are zero.

    Which fragment is due follows from the round, of the key or of `in_round`; its number is written first,
    for whoever reads a model's change and does not know the round. The traits are those of `inner`, of
    vectors that are zero outside of the fragment. Beside what `inner` holds, the fragment's values are held.
    """

    def __init__(
        self,
        chain: str,
        table: FragmentTable,
        inner: Encoding,
        layout: Layout | None = None,
        round: int = 0,
    ) -> None:
        self.chain = chain
        self.table = table
        self.inner = inner
        self.keeps = inner.keeps
        self._layout = layout
        self._round = round
        # All clients of a round send the same fragment.
        support = "cohort" if inner.traits.support == "all" else inner.traits.support
        self.traits: Traits = replace(inner.traits, support=support)

    @override
    def over(self, layout: Layout) -> Fragmented:
        return Fragmented(self.chain, self.table, self.inner, layout, self._round)

    @override
    def in_round(self, round: int) -> Fragmented:
        return Fragmented(self.chain, self.table, self.inner, self._layout, round)

    @cached_property
    def fragments(self) -> Fragments:
        """How the layout's vector is cut. Raises EncodingError without a layout, or with too few layers."""
        tensors = tensors_of(self.chain, self._layout, None)
        return Fragments(self.table, tensors)

    @override
    def size_bound(self, elements: int) -> int:
        if self._layout is None:
            return _HEAD.size + self.inner.size_bound(elements)
        return _HEAD.size + max(self._inner(n).size_bound(self._size(n)) for n in range(self.table.count))

    @override
    def encoded_size(self, elements: int) -> int | None:
        if not self._round:
            return None
        number = self.fragments.due(self._round)
        size = self._inner(number).encoded_size(self._size(number))
        return None if size is None else _HEAD.size + size

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        values = check_vector(vector)
        tensors_of(self.chain, self._layout, len(values))
        number = self.fragments.due(self._known(key))
        parts = [values[place] for place in self.fragments.places(number)]
        yield memoryview(_HEAD.pack(number))
        whole = parts[0] if len(parts) == 1 else torch.cat([values[:0], *parts])
        yield from self._inner(number).encode(whole, key)

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        tensors_of(self.chain, self._layout, elements)
        return RunReader(self._runs(source, key))

    def _runs(self, source: ByteSource, key: StreamKey) -> Iterator[tuple[int, ValueRun]]:
        number = int(_HEAD.unpack(source.read(_HEAD.size))[0])
        if number >= self.table.count:
            raise EncodingError(f"the update is of fragment {number}, and there are {self.table.count}")
        round = self._round or key.round
        if round and number != self.fragments.due(round):
            raise EncodingError(
                f"the update is of fragment {number}, and in round {round} fragment "
                f"{self.fragments.due(round)} is due"
            )
        size = self._size(number)
        held = BufferedRun(self._inner(number).reader(source, size, key), size)
        for spec, own in zip(self.fragments.tensors, self.fragments.numbers, strict=True):
            yield spec.size, held if own == number else _ZEROS

    def _known(self, key: StreamKey) -> int:
        round = self._round or key.round
        if not round:
            raise EncodingError(f"{self.chain} sends the fragment of a round, and no round was given")
        return round

    def _size(self, number: int) -> int:
        return self.fragments.size(number)

    def _inner(self, number: int) -> Encoding:
        return self.inner.over(self.fragments.layout(number))


class _Zeros:
    """A run of zeros."""

    def read(self, out: Tensor) -> None:
        out.zero_()


_ZEROS = _Zeros()

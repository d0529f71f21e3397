"""A model as what changed since another one, for whoever holds that one already.

    8 bytes   length of the head, little-endian
    head      what stands before the vector in the new model's file
    body      the difference of the two vectors, encoded

What a model holds beside its vector does not change from round to round: it is the base's. Adding what was
decoded to the base gives the new model's bits on every machine, and its digest shows that it did.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor

from roundtable.core.encodings import GRID, Encoding
from roundtable.core.encodings.encoding import ByteSource, HeldBytes
from roundtable.core.errors import EncodingError
from roundtable.core.models import MAX_HEADER, Model, model_head, open_model

NAME_LENGTH = 32
"""Characters of a digest that name a model in a `Hop`: 128 bits."""
_AT_A_TIME = 128 * GRID
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Hop:
    """From one model to the next: the artifact `delta` turns the model `base` into `model`.

    Models are named by the first half of their digests, so that an engine's snapshot, which keeps everything
    that it mentions from being deleted, mentions the deltas alone.
    """

    base: str
    model: str
    delta: str

    @classmethod
    def between(cls, base: str, model: str, delta: str) -> Hop:
        return cls(base[:NAME_LENGTH], model[:NAME_LENGTH], delta)


def published(
    encoding: Encoding,
    held: Tensor,
    exact: Tensor,
    out: Tensor | None = None,
    passed: Callable[[Tensor], object] = lambda part: None,
) -> tuple[Tensor, bytes]:
    """held + C(exact − held) [d], which is what silos hold next, and the bytes of C(exact − held).

    What C leaves out stays in the difference, which the next round sends: the difference is the memory
    of error feedback (Seide et al. 2014), and needs none of its own. `out`, which may be `exact`, takes the
    result; `passed` is called with parts of `held` once they have been read. EncodingError for values that C
    does not take.
    """
    difference = torch.empty_like(exact) if out is None else out
    for made, new, old in _parts(difference, exact, held):
        torch.sub(new, old, out=made)
        passed(old)
    data = b"".join(bytes(block) for block in encoding.encode(difference))
    reader = encoding.reader(HeldBytes(data), len(difference))
    for made, old in _parts(difference, held):
        reader.read(made)
        made += old
        passed(old)
    return difference, data


def _parts(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same stretch of each, one after the other."""
    return zip(*(torch.split(vector, _AT_A_TIME) for vector in vectors), strict=True)


def delta_blocks(model: Model, data: bytes) -> Iterator[bytes]:
    """The artifact that makes `model` of its base; `data` is the encoded difference."""
    head = model_head(model)
    yield _LENGTH.pack(len(head)) + head
    yield data


class DeltaBytes(ByteSource, Protocol):
    """A delta's bytes in order, which may still be arriving, and how many are to come."""

    @property
    def left(self) -> int:
        """Bytes that have not been read."""


def apply_delta(encoding: Encoding, base: Path, delta: DeltaBytes, out: Path) -> str:
    """Writes the model that `delta` makes of the model file `base` to `out`; returns its digest.

    EncodingError for a delta of another model or encoding; whether the result is what was announced its
    digest says, also where the base was damaged.
    """
    old = open_model(base)
    hasher = blake3()
    with out.open("wb") as target:
        for block in _new_bytes(encoding, old, base, _head(delta), delta):
            hasher.update(block)
            target.write(block)
    return hasher.hexdigest()


def _head(delta: DeltaBytes) -> bytes:
    size = _LENGTH.unpack(delta.read(_LENGTH.size))[0] if delta.left >= _LENGTH.size else 0
    if not 0 < size <= min(MAX_HEADER + _LENGTH.size, delta.left):
        raise EncodingError(
            f"this is no difference of models: its head would have {size} bytes, and {delta.left} follow"
        )
    return bytes(delta.read(size))


def _new_bytes(
    encoding: Encoding, old: Model, base: Path, head: bytes, source: DeltaBytes
) -> Iterable[bytes | memoryview]:
    yield head
    encoding = encoding.over(old.layout)
    elements = old.layout.size
    expected = encoding.encoded_size(elements)
    if expected is not None and expected != source.left:
        raise EncodingError(
            f"a difference of {elements} values in {encoding.chain} has {expected} bytes, not {source.left}"
        )
    reader = encoding.reader(source, elements)
    for start in range(0, elements, _AT_A_TIME):
        block = torch.empty(min(_AT_A_TIME, elements - start))
        reader.read(block)
        yield block.add_(old.vector[start : start + _AT_A_TIME]).numpy().data.cast("B")
    if source.left:
        raise EncodingError(f"{source.left} bytes follow the last value of the difference")
    with base.open("rb") as file:
        # Tensors beside the vector stay as they are.
        file.seek(len(model_head(old)) + 4 * elements)
        while rest := file.read(1 << 20):
            yield rest

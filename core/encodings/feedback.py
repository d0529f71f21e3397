"""Error feedback: what an encoding dropped of an update is added to the next one (Seide 2014; Karimireddy
2019).

a = Δ + e is encoded, and e ← a − C(a) is what the client remembers. It counts only once the update is in a
committed model: one that is late, refused or of a round that is done again leaves e as it was, and its Δ
is dropped. What an encoding itself keeps (`Memory`) goes the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from roundtable.core.encodings.encoding import GRID, ByteSource, Encoding, StreamKey

_OURS = "transfer:"
MEMORY = _OURS + "error"
"""Under this name a client keeps e among its own tensors."""

_AT_A_TIME = 32 * GRID


class Sending:
    """One update on its way out: Δ [d] with what the client remembers of earlier ones.

    `kept` is what the client's newest update that counts left. With `feedback` Δ is changed in place, and
    `received` has to be told what a receiver decodes. Afterwards `remembered` is what the client is to keep.
    """

    def __init__(
        self,
        delta: Tensor,
        encoding: Encoding,
        key: StreamKey,
        kept: Mapping[str, Tensor] | None,
        *,
        feedback: bool,
    ) -> None:
        self.encoding = encoding
        self.key = key
        self.vector = delta
        self._feedback = feedback
        ours = {name: tensor for name, tensor in (kept or {}).items() if name.startswith(_OURS)}
        if feedback:
            add_memory(delta, ours)
        self._own = {name.removeprefix(_OURS): each for name, each in ours.items() if name != MEMORY}

    def blocks(self) -> Iterator[memoryview]:
        """The bytes, as `Encoding.encode`; all of them have to be taken."""
        return self.encoding.encode(self.vector, self.key, self._own)

    def received(self, source: ByteSource) -> None:
        """Takes off what a receiver decodes of these bytes, block by block."""
        reader = self.encoding.reader(source, len(self.vector), self.key)
        block = torch.empty(min(len(self.vector), _AT_A_TIME))
        for start in range(0, len(self.vector), _AT_A_TIME):
            part = block[: len(self.vector) - start]
            reader.read(part)
            self.decoded(start, part)

    def decoded(self, start: int, values: Tensor) -> None:
        """The same of values that are decoded already, the first of them at place `start`."""
        self.vector[start : start + len(values)] -= values

    @property
    def remembered(self) -> dict[str, Tensor]:
        """What the client keeps until its next update, by name."""
        own = {_OURS + name: tensor for name, tensor in self._own.items()}
        return {MEMORY: self.vector, **own} if self._feedback else own


def add_memory(delta: Tensor, kept: Mapping[str, Tensor] | None) -> None:
    """Makes Δ + e of Δ, in place. A memory of another length is dropped aloud."""
    memory = (kept or {}).get(MEMORY)
    if memory is None:
        return
    if memory.numel() != delta.numel():
        warnings.warn(
            f"what error feedback remembers has {memory.numel()} values, and updates have {delta.numel()}: "
            "it is dropped",
            stacklevel=2,
        )
        return
    delta += memory


def forgotten(encoding: Encoding, feedback: bool, kept: Mapping[str, Tensor] | None) -> bool:
    """Whether something that updates go on from is not there."""
    names = {_OURS + name for name in encoding.keeps} | ({MEMORY} if feedback else set())
    return not names <= set(kept or {})


def without_memory(kept: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """The client's other tensors; None where it keeps no others."""
    return {name: tensor for name, tensor in (kept or {}).items() if not name.startswith(_OURS)} or None

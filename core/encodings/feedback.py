"""What a client remembers of the updates that it has sent: the ways of error feedback.

`error` (Seide 2014; Karimireddy 2019): a = Δ + e is encoded, and e ← a − C(a) is remembered. With momentum
correction (Lin et al. 2018, section 3.2): u ← m·u + Δ, a = u + e, and u is forgotten where values were sent.
`ef21` (Richtárik et al. 2021, algorithm 2): C(Δ − g) is sent, and g ← g + C(Δ − g) on both sides.

What is remembered counts only once the update is in a committed model: one that is late, refused or of a
round that is done again leaves it as it was, and its Δ is dropped. What an encoding itself keeps (`Memory`)
goes the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roundtable.core.encodings.encoding import GRID, ByteSource, Encoding, StreamKey

_OURS = "transfer:"
MEMORY = _OURS + "error"
"""Under this name a client keeps e among its own tensors."""
VELOCITY = _OURS + "velocity"
"""u, with momentum correction."""
ESTIMATE = _OURS + "estimate"
"""g of EF21."""

LOST_ESTIMATE = (
    "what this silo remembers for EF21 (transfer.feedback) is lost, and the coordinator goes on from it: the "
    "silo can take part in a new job that begins with this one's model"
)

_AT_A_TIME = 32 * GRID


@dataclass(frozen=True)
class Feedback:
    """What a job says of it: the way, and the momentum m of `error`."""

    way: Literal["off", "error", "ef21"] = "off"
    momentum: float = 0.0

    @property
    def names(self) -> frozenset[str]:
        """What it keeps at a client."""
        if self.way == "ef21":
            return frozenset((ESTIMATE,))
        if self.way == "error":
            return frozenset((MEMORY, VELOCITY) if self.momentum else (MEMORY,))
        return frozenset()


class Sending:
    """One update on its way out: Δ [d] with what the client remembers of earlier ones.

    `kept` is what the client's newest update that counts left; it is left alone. With feedback Δ is changed
    in place, and `received` has to be told what a receiver decodes. Afterwards `remembered` is what the
    client is to keep.
    """

    def __init__(
        self,
        delta: Tensor,
        encoding: Encoding,
        key: StreamKey,
        kept: Mapping[str, Tensor] | None,
        feedback: Feedback,
    ) -> None:
        self.encoding = encoding
        self.key = key
        self.vector = delta
        self._feedback = feedback
        ours = {name: tensor for name, tensor in (kept or {}).items() if name.startswith(_OURS)}
        self._own = {
            name.removeprefix(_OURS): each
            for name, each in ours.items()
            if name not in (MEMORY, VELOCITY, ESTIMATE)
        }
        self._beside = torch.empty(0)
        if feedback.way == "ef21":
            # A copy: what is kept counts until this update does.
            self._beside = torch.zeros_like(delta)
            _add(self._beside, ours, ESTIMATE)
            delta -= self._beside
        elif feedback.way == "error":
            if feedback.momentum:
                _add(delta, ours, VELOCITY, feedback.momentum)
                self._beside = delta.clone()
            _add(delta, ours, MEMORY)

    def blocks(self) -> Iterator[memoryview]:
        """The bytes, as `Encoding.encode`; all of them have to be taken."""
        return self.encoding.encode(self.vector, self.key, self._own)

    def received(self, source: ByteSource) -> None:
        """Takes what a receiver decodes of these bytes into what is remembered, block by block."""
        reader = self.encoding.reader(source, len(self.vector), self.key)
        block = torch.empty(min(len(self.vector), _AT_A_TIME))
        for start in range(0, len(self.vector), _AT_A_TIME):
            part = block[: len(self.vector) - start]
            reader.read(part)
            self.decoded(start, part)

    def decoded(self, start: int, values: Tensor) -> None:
        """The same of values that are decoded already, the first of them at place `start`."""
        beside = self._beside[start : start + len(values)]
        if self._feedback.way == "ef21":
            beside += values
        else:
            self.vector[start : start + len(values)] -= values
            if self._feedback.momentum:
                beside[values != 0] = 0.0

    @property
    def remembered(self) -> dict[str, Tensor]:
        """What the client keeps until its next update, by name."""
        all_of_it = {MEMORY: self.vector, VELOCITY: self._beside, ESTIMATE: self._beside}
        own = {_OURS + name: tensor for name, tensor in self._own.items()}
        return {name: all_of_it[name] for name in self._feedback.names} | own


def _add(vector: Tensor, kept: Mapping[str, Tensor], name: str, factor: float = 1.0) -> None:
    """Adds what is kept under a name, in place. A memory of another length is dropped aloud."""
    memory = kept.get(name)
    if memory is None:
        return
    if memory.numel() != vector.numel():
        warnings.warn(
            f"what error feedback remembers has {memory.numel()} values, and updates have {vector.numel()}: "
            "it is dropped",
            stacklevel=4,
        )
        return
    vector.add_(memory, alpha=factor)


def forgotten(encoding: Encoding, feedback: Feedback, kept: Mapping[str, Tensor] | None) -> bool:
    """Whether something that updates go on from is not there."""
    names = {_OURS + name for name in encoding.keeps} | feedback.names
    return not names <= set(kept or {})


def without_memory(kept: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """The client's other tensors; None where it keeps no others."""
    if not kept:
        return None
    return {name: tensor for name, tensor in kept.items() if not name.startswith(_OURS)} or None

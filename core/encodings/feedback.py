"""Error feedback: what an encoding dropped of an update is added to the next one (Seide 2014; Karimireddy
2019).

a = Δ + e is encoded, and e ← a − C(a) is what the client remembers. It counts only once the update is in a
committed model: one that is late, refused or of a round that is done again leaves e as it was, and its Δ
is dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from roundtable.core.encodings.encoding import GRID, ByteSource, Encoding, StreamKey

MEMORY = "transfer:error"
"""Under this name a client keeps e among its own tensors."""

_AT_A_TIME = 32 * GRID


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


def take_off(total: Tensor, encoding: Encoding, source: ByteSource, key: StreamKey) -> None:
    """Makes e of a, in place: takes off what a receiver decodes, block by block."""
    reader = encoding.reader(source, len(total), key)
    block = torch.empty(min(len(total), _AT_A_TIME))
    for part in torch.split(total, _AT_A_TIME):
        reader.read(block[: len(part)])
        part -= block[: len(part)]


def without_memory(kept: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """The client's other tensors; None where it keeps no others."""
    return {name: tensor for name, tensor in (kept or {}).items() if name != MEMORY} or None

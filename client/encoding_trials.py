"""What encodings would make of an update: each is tried on a sample of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roundtable.core.encodings.assembly import get_encoding
from roundtable.core.encodings.encoding import GRID, HeldBytes, StreamKey
from roundtable.core.encodings.journey import norm, norm_lost
from roundtable.core.observability.transfer_figures import EncodingTrial

_PART, _PARTS = 8 * GRID, 16
"""Values of one part, and how many parts: layers differ, so a sample is taken from all over."""


def sample_of(vector: Tensor) -> Tensor:
    """At most `_PARTS` parts of the vector, evenly spread; the vector itself where it is no longer."""
    if len(vector) <= _PART * _PARTS:
        return vector
    step = (len(vector) - _PART) / (_PARTS - 1)
    return torch.cat([vector[int(step * part) :][:_PART] for part in range(_PARTS)])


def try_encodings(
    vector: Tensor,
    chains: Sequence[str],
    key: StreamKey,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[EncodingTrial, ...]:
    """A trial of each chain on a sample of the float32 vector; none of a vector that is zero."""
    sample = sample_of(vector)
    length = norm(sample)
    if not length or not math.isfinite(length):
        return ()
    found = []
    for chain in chains:
        encoding, began = get_encoding(chain), clock()
        data = b"".join(encoding.encode(sample, key))
        lost = norm_lost(sample, encoding, HeldBytes(data), key)
        seconds = (clock() - began) / len(sample)
        found.append(EncodingTrial(chain, len(data) / len(sample), seconds, lost / length))
    return tuple(found)

"""The randomised Hadamard rotation: spreads a vector's length evenly over its entries, and back.

`rotate` pads to a power of two. `Rotation` does not: it turns the first N and then the last N entries of a
vector, N being the largest power of two that fits. Each is orthogonal, and so are both together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roundtable.privacy.mechanisms.hadamard import transform
from roundtable.privacy.mechanisms.noise import KeyStream

_BLOCK = 1 << 16


@dataclass(frozen=True)
class Rotation:
    """An orthogonal map of R^length that all parties draw from a public `seed`.

    Whatever unit vector comes in, each entry that comes out is a sum of independent signs with a variance
    of at most 1/N < 2/length, so beyond t/√N with probability at most 2 exp(−t²/2) (Hoeffding); for vectors
    whose length is not all in one half the variance is 1/length or so.
    """

    seed: bytes
    length: int

    def forward(self, vector: Tensor) -> None:
        """Turns a contiguous float32 CPU vector [length], in place."""
        first, last = self._windows(vector)
        flip(first, self.seed + b"first")
        transform(first)
        if last is not None:
            flip(last, self.seed + b"last")
            transform(last)

    def back(self, vector: Tensor) -> None:
        """The inverse of `forward`, in place."""
        first, last = self._windows(vector)
        if last is not None:
            transform(last)
            flip(last, self.seed + b"last")
        transform(first)
        flip(first, self.seed + b"first")

    def _windows(self, vector: Tensor) -> tuple[Tensor, Tensor | None]:
        whole = 1 << (self.length.bit_length() - 1)
        return vector[:whole], vector[self.length - whole :] if whole < self.length else None


def padded_length(length: int) -> int:
    """The next power of two."""
    return 1 << max(0, (length - 1).bit_length())


def rotate(vector: Tensor, seed: bytes) -> Tensor:
    """H D x / √n for float32 `[d]`, padded to a power of two n; D are signs from the public `seed`."""
    padded = torch.zeros(padded_length(vector.numel()))
    padded[: vector.numel()] = vector
    flip(padded, seed)
    return transform(padded)


def unrotate(vector: Tensor, seed: bytes, length: int) -> Tensor:
    """The inverse of `rotate`: its first `length` entries. Overwrites `vector`."""
    transform(vector)
    flip(vector, seed)
    return vector[:length]


def flip(vector: Tensor, seed: bytes) -> None:
    """Gives the entries signs from a stream cipher under the hash of `seed`, in place: the same at every
    party."""
    stream = KeyStream(hashlib.blake2b(seed, digest_size=32, person=b"rt-rotate").digest())
    for block in torch.split(vector, _BLOCK):
        words = stream.words((block.numel() + 63) // 64).view(np.uint8)
        bits = torch.from_numpy(np.unpackbits(words, count=block.numel()))
        block.mul_(bits.to(torch.float32).mul_(2.0).sub_(1.0))

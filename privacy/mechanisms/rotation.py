"""The randomised Hadamard rotation: spreads a vector's length evenly over its entries, and back."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from roundtable.privacy.mechanisms.noise import KeyStream

_FACTOR_BITS = 5


def padded_length(length: int) -> int:
    """The next power of two."""
    return 1 << max(0, (length - 1).bit_length())


def rotate(vector: Tensor, seed: bytes) -> Tensor:
    """H D x / √n for float32 `[d]`, padded to a power of two n; D are signs from the public `seed`."""
    padded = torch.zeros(padded_length(vector.numel()))
    padded[: vector.numel()] = vector
    return hadamard(padded.mul_(signs(seed, padded.numel())))


def unrotate(vector: Tensor, seed: bytes, length: int) -> Tensor:
    """The inverse of `rotate`: its first `length` entries. H is symmetric and its own inverse."""
    return hadamard(vector).mul_(signs(seed, vector.numel()))[:length]


def signs(seed: bytes, count: int) -> Tensor:
    """±1 from a stream cipher under the hash of `seed`: the same at every party."""
    stream = KeyStream(hashlib.blake2b(seed, digest_size=32, person=b"rt-rotate").digest())
    bits = np.unpackbits(stream.words((count + 63) // 64).view(np.uint8), count=count)
    return torch.from_numpy(bits).to(torch.float32).mul_(2.0).sub_(1.0)


def hadamard(vector: Tensor) -> Tensor:
    """The orthonormal Walsh–Hadamard transform of a float32 vector whose length is a power of two.

    As products with small Hadamard matrices, each over one digit of the index; the product with the
    transposed view brings the next digit to the end, so that nothing is copied.
    """
    length = vector.numel()
    bits = length.bit_length() - 1
    result = vector
    while bits > 0:
        digit = min(bits, _FACTOR_BITS)
        result = torch.mm(_matrix(digit), result.view(-1, 1 << digit).t()).view(-1)
        bits -= digit
    return result / math.sqrt(length)


@lru_cache(maxsize=8)
def _matrix(bits: int) -> Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(bits):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix

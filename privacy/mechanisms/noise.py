"""Where the noise comes from.

`SecureNoise` is AES-256-CTR under a fresh key from the operating system: nothing about it can be
chosen, so no seed can be reused in a second round or after a restart. `SeededNoise` repeats itself
for simulation, and everything made with it says that it carries no guarantee.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from roundtable.core.seeds import numpy_generator


class NoiseSource(Protocol):
    """Random words, and whether a guarantee may rest on them."""

    @property
    def guarantee(self) -> bool:
        """True for a cryptographic generator that the operating system seeded."""

    def words(self, count: int) -> NDArray[np.uint64]:
        """`count` independent uniform 64-bit words, in memory that the caller may overwrite."""


class KeyStream:
    """AES-256-CTR as a generator of words. The same key gives the same words."""

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"a key of 32 bytes is needed, not {len(key)}")
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words of the stream."""
        size = 8 * count
        out = bytearray(size + 15)
        self._encryptor.update_into(bytes(size), out)
        return np.frombuffer(out, dtype=np.uint64, count=count)


class SecureNoise:
    """Random words for production. Takes no seed, by intent."""

    guarantee = True

    def __init__(self) -> None:
        self._stream = KeyStream(os.urandom(32))

    def words(self, count: int) -> NDArray[np.uint64]:
        """`count` words that nobody can repeat or predict."""
        return self._stream.words(count)


class SeededNoise:
    """Reproducible words for simulation, from the stream of `core.seeds` named by `path`; no guarantee."""

    guarantee = False

    def __init__(self, seed: int, *path: str | int) -> None:
        self._generator = numpy_generator(seed, *path)

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words of the seeded stream."""
        return self._generator.integers(0, 1 << 64, size=count, dtype=np.uint64)


def bernoulli_mask(source: NoiseSource, count: int, probability: float) -> NDArray[np.bool_]:
    """`count` independent bits, each True with `probability` to within 2^-64."""
    if probability >= 1.0:
        return np.ones(count, dtype=np.bool_)
    return source.words(count) < np.uint64(int(probability * 2.0**64))

"""A process for comparisons: its noise is the same in every run, and its clock is what a file says.

Noise and the rounding of masked updates come from the operating system, by intent. Two runs can be compared
bit by bit only where they draw the same: here from a key that follows from the process's name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3


def follow_clock(file: Path) -> None:
    """Has `time.time` run ahead by the seconds in `file`, or behind; to be called before other imports."""
    real = time.time

    def told() -> float:
        try:
            return real() + float(file.read_text() or 0)
        except (FileNotFoundError, ValueError):
            return real()

    time.time = told


def unvary(name: str, *, simulated: bool = False) -> None:
    """From now on this process draws its noise, and how it rounds, from `name`, from the start each time.

    `simulated`: also the noise that a simulation draws from a job's seed.
    """
    from roundtable.privacy.mechanisms import noise
    from roundtable.privacy.secagg import quantise

    key = blake3(name.encode()).digest()

    def begin(self: Any, *path: object) -> None:
        self._stream = noise.KeyStream(key)

    def begin_rounding(self: Any) -> None:
        self._stream = quantise.Cipher(quantise.AES(key), quantise.CTR(bytes(16))).encryptor()

    noise.SecureNoise.__init__ = begin  # type: ignore[method-assign]
    quantise._system_random.__init__ = begin_rounding  # type: ignore[method-assign]
    if simulated:
        noise.SeededNoise.__init__ = begin  # type: ignore[method-assign]
        noise.SeededNoise.words = noise.SecureNoise.words  # type: ignore[method-assign, assignment]


@contextmanager
def unvaried(name: str, *, simulated: bool = False) -> Iterator[None]:
    """`unvary` until the block is left: a test's own process draws as ever afterwards."""
    from roundtable.privacy.mechanisms import noise
    from roundtable.privacy.secagg import quantise

    owners: tuple[Any, ...] = (noise.SecureNoise, noise.SeededNoise, quantise._system_random)
    real = [(owner, owner.__init__) for owner in owners]
    words = noise.SeededNoise.words
    unvary(name, simulated=simulated)
    try:
        yield
    finally:
        for owner, begin in real:
            owner.__init__ = begin
        noise.SeededNoise.words = words  # type: ignore[method-assign]

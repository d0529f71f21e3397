"""One seed a job; from it a stream for each (round, client, purpose).

No global generator is ever touched, so the number of workers, the order of clients and other
libraries cannot change a result. These streams are for training and simulation: keys, masks and
the noise of differential privacy come from the operating system and are never seeded.
"""

from __future__ import annotations

import hashlib
from operator import index

import numpy as np
import torch


def derive_seed(seed: int, *path: str | int) -> int:
    """A 63-bit seed for the stream named by `path`, for example `(round, client, "batches")`.

    Distinct paths give independent streams: each part is length-prefixed and typed before hashing,
    so `("a", "bc")` and `("ab", "c")`, or `1` and `"1"`, differ; integers of NumPy count as integers.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"rt-seed")
    for part in (seed, *path):
        kind, text = ("str", part) if isinstance(part, str) else ("int", str(index(part)))
        data = text.encode()
        digest.update(f"{kind}:{len(data)}:".encode() + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def torch_generator(seed: int, *path: str | int) -> torch.Generator:
    """A CPU generator for the stream named by `path`."""
    return torch.Generator().manual_seed(derive_seed(seed, *path))


def numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    """A NumPy generator for the stream named by `path`."""
    return np.random.default_rng(derive_seed(seed, *path))

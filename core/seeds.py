"""One seed a job; from it a stream for each (round, client, purpose).

No stream touches a global generator, so the number of workers, the order of clients and other
libraries cannot change a result. What a task's own code draws from the global ones is seeded around it
(`isolated_randomness`), and they are put back. These streams are for training and simulation: keys, masks and
the noise of differential privacy come from the operating system and are never seeded.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def isolated_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the global generators of torch, NumPy and Python inside, and puts them back after."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_all(seed, device)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds the global generators of torch, NumPy and Python."""
    seed_torch(seed, device)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_torch(seed: int, device: torch.device) -> None:
    """What `torch.manual_seed` does for this device; that one also queues a stack trace for every kind of
    accelerator that is not there, which takes longer than a small client's training and is never freed."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)

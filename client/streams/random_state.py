"""Keeps the chance that data sets draw from the global generators apart from the chance of training."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class DataRandomness:
    """Within it the global CPU generators of torch, NumPy and Python are the data set's, as it left them.

    So what a data set draws depends on its own draws alone: examples that are read again, or skipped, come
    out alike, whatever a model drew in between. It begins at `seed`, or as it finds the generators.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._own: Any = None
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = _states()
        if self._own is not None:
            _put(self._own)
        elif self._seed is not None:
            seed_generators(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = _states()
        _put(self._outer)


def seed_generators(seed: int) -> None:
    """Seeds the global CPU generators of torch, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _states() -> Any:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _put(states: Any) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])

"""The file with what a silo has released of its records in a job that asks for sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from safetensors import SafetensorError

from roundtable.client.durable_files import replace_synced
from roundtable.core.models import tensors_file

_Doubles = npt.NDArray[np.float64]
_SUMS = "sums"


class KeptRelease:
    """The file with what a step of a job has released: whoever asks again is sent the same.

    New noise on the same sums would hide less, and cost again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, size: int) -> _Doubles | None:
        """What was released, float64 [size]; None where nothing was, or it cannot be read any more."""
        try:
            kept = safetensors.torch.load_file(self._path).get(_SUMS)
        except (OSError, SafetensorError):
            return None
        fits = kept is not None and kept.dtype == torch.float64 and kept.shape == (size,)
        return kept.numpy() if kept is not None and fits else None

    def keep(self, released: _Doubles) -> None:
        """Durable when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(self._path, tensors_file({_SUMS: torch.from_numpy(released)}))

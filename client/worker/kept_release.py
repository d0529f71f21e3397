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
_SUMS, _ABOUT = "sums", "about"


class KeptRelease:
    """The file with what a step of a job has released: whoever asks again is sent the same.

    New noise on the same sums would hide less, and cost again. Other sums, as after a restored coordinator
    has come to other public numbers, are another release, with new noise and a charge of its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, size: int, about: bytes) -> _Doubles | None:
        """What was released, float64 [size], when it was asked about the same; None where nothing was, or it
        cannot be read any more."""
        try:
            held = safetensors.torch.load_file(self._path)
        except (OSError, SafetensorError):
            return None
        kept, was = held.get(_SUMS), held.get(_ABOUT)
        if was is None or was.dtype != torch.uint8 or bytes(was.tolist()) != about:
            return None
        fits = kept is not None and kept.dtype == torch.float64 and kept.shape == (size,)
        return kept.numpy() if kept is not None and fits else None

    def keep(self, released: _Doubles, about: bytes) -> None:
        """Durable when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(self._path, tensors_file({_SUMS: torch.from_numpy(released), _ABOUT: _bytes(about)}))


def _bytes(values: bytes) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)

"""Stores the tensors that never travel, at the silo between a job's rounds.

One safetensors file for each round, so that a round that is done again starts from what the round
before it left, and the same work gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from roundtable.client.durable_files import replace_synced
from roundtable.core.errors import EncodingError

_KEPT = 2


class SiloState:
    """The states of all jobs, below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, job: str, before: int) -> dict[str, Tensor] | None:
        """Loads the tensors of the newest round below `before`; None if there is none.

        Raises EncodingError for a file that is damaged.
        """
        rounds = [number for number in self._rounds(job) if number < before]
        if not rounds:
            return None
        path = self.path(job, max(rounds))
        try:
            return safetensors.torch.load_file(path)
        except SafetensorError as error:
            raise EncodingError(
                f"the silo's state of job {job} after round {max(rounds)} is damaged ({error}); "
                f"remove {path.name} in the agent's state folder to go on without it"
            ) from error

    def newest(self, job: str, before: int) -> Path | None:
        """The file of the newest round below `before`."""
        rounds = [number for number in self._rounds(job) if number < before]
        return self.path(job, max(rounds)) if rounds else None

    def save(self, job: str, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Saves the tensors of `round`, and removes those older than the round before it."""
        if not tensors:
            return
        path = self.path(job, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        replace_synced(path, [safetensors.torch.save(held)])
        self.forget_old(job)

    def forget_old(self, job: str) -> None:
        """Removes states that no repeated round can need."""
        for number in self._rounds(job)[:-_KEPT]:
            self.path(job, number).unlink(missing_ok=True)

    def path(self, job: str, round: int) -> Path:
        """The file of a round's tensors."""
        return self._folder / job / f"round-{round}.safetensors"

    def _rounds(self, job: str) -> list[int]:
        files = (self._folder / job).glob("round-*.safetensors")
        return sorted(int(file.stem.removeprefix("round-")) for file in files)

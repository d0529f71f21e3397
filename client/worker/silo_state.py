"""Stores the tensors that never travel, at the silo between a job's rounds.

One safetensors file for each training step (round, attempt). What a step left counts once its update is in a
committed model, which the coordinator says with the next instruction: so a round that is done again starts
from what the rounds before it left, and what the server adds up of the silos' states is what they have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from roundtable.client.durable_files import replace_synced
from roundtable.core.errors import EncodingError
from roundtable.core.models import tensors_file

_log = logging.getLogger("roundtable.agent")
Counted = tuple[int, int]
"""(round, attempt) of the newest training step whose update is in the model."""


def rank_file(folder: Path | str, job: str) -> Path:
    """Where below the folder of all jobs the rank lies that the silo's memory has chosen."""
    return Path(folder) / job / "rank.txt"


class SiloState:
    """The states of all jobs, below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, job: str, counted: Counted | None) -> dict[str, Tensor] | None:
        """Loads what the step `counted` left; None where there is no such step, or it left nothing.

        Raises EncodingError for a file that is damaged.
        """
        path = self.find(job, counted)
        if path is None:
            return None
        try:
            return safetensors.torch.load_file(path)
        except SafetensorError as error:
            raise EncodingError(
                f"the silo's state of job {job} after {path.stem} is damaged ({error}); "
                f"remove {path.name} in the agent's state folder to go on without it"
            ) from error

    def find(self, job: str, counted: Counted | None) -> Path | None:
        """The file of what the step `counted` left, if there is one."""
        path = None if counted is None else self.path(job, *counted)
        return path if path is not None and path.exists() else None

    def save(self, job: str, step: Counted, tensors: Mapping[str, Tensor], counted: Counted | None) -> None:
        """Saves what the training step `step` leaves, and removes all but that and what is `counted`.

        Of a job that leaves something each step has a file, if an empty one: where there is none, it is lost.
        """
        path = self.path(job, *step)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(path, tensors_file(tensors))
        self.forget_others(job, step, counted)

    def forget_others(self, job: str, step: Counted | None, counted: Counted | None) -> None:
        """Removes the states that nothing can go on from, those that were never whole among them."""
        kept = {self.path(job, *each) for each in (step, counted) if each is not None}
        for pattern in ("round-*", ".round-*.partial"):
            for path in (self._folder / job).glob(pattern):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def forget(self, job: str) -> None:
        """Removes what all steps of a job left, which is over; what cannot be removed is told."""
        try:
            self.forget_others(job, None, None)
            rank_file(self._folder, job).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("what job %s kept here could not be removed: %s", job, error)
        with suppress(OSError):  # Other things of the job lie there.
            (self._folder / job).rmdir()

    def path(self, job: str, round: int, attempt: int) -> Path:
        """The file of what a training step leaves."""
        return self._folder / job / f"round-{round}.{attempt}.safetensors"

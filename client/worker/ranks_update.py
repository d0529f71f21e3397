"""What an algorithm and an encoding make of an update that the ranks of a `[cluster]` have written plainly.

Ranks hold parts of a model and write parts of a file. What needs whole vectors is done here, before they
begin and after they have ended: weights of the silo's own to begin with, what is sent of them, feedback.

The model may be one that no single device holds, so vectors are files that are mapped, those that change too:
memory holds a few blocks, and pages of files, which the system takes back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundtable.client.durable_files import explained
from roundtable.client.trainer import EncodedUpdate
from roundtable.client.training.algorithm_round import AlgorithmRound
from roundtable.client.training.local_work import LocalWork
from roundtable.client.worker.executor import Settings
from roundtable.client.worker.leaving_update import write_leaving
from roundtable.client.worker.lost_state import Trouble, say_what_is_lost
from roundtable.client.worker.silo_state import SiloState
from roundtable.client.worker.worker_order import Order
from roundtable.core.algorithms.contract import BEGINS, ENDS
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import job_from_json
from roundtable.core.encodings.encoding import BLOCK_ELEMENTS
from roundtable.core.encodings.feedback import without_memory
from roundtable.core.machine.file_access import take_room
from roundtable.core.models import Model, open_model, save_model
from roundtable.core.tensor_spec import DTYPES


class RanksUpdate:
    """One order, as far as it is whole vectors; float32 on CPU."""

    def __init__(self, settings: Settings, order: Order) -> None:
        self._client = settings.client
        self._order = order
        self._state = SiloState(Path(settings.jobs))
        self._job = job_from_json(order.config)
        self._algorithm = make_algorithm(self._job.algorithm)
        self._start = open_model(Path(order.model))
        self._kept = self._state.load(order.job, order.counted)
        local = without_memory(self._kept)
        work = LocalWork(
            self._job,
            self._start.layout,
            self._start.vector,
            order.round,
            self._client,
            local,
            self._algorithm,
        )
        self._rules = AlgorithmRound(work, work.context(None, torch.device("cpu")), ())

    def begin(self, trouble: Trouble) -> None:
        """Writes the model that ranks begin with into `order.begins`, where it is not the round's.

        `trouble` hears of what the silo should go on from and has lost.
        """
        # Ranks keep their optimizers' states in places of their own, and tell of them by themselves.
        ours = self._job.algorithm.model_copy(update={"optimizer_state": "drop"})
        job = self._job.model_copy(update={"algorithm": ours})
        say_what_is_lost(self._order, job, self._algorithm, self._start.layout, self._kept, trouble)
        begins = self._algorithm.begins(self._rules.round)
        if begins is None:
            return
        path = Path(self._order.begins)
        try:
            save_model(path, Model(self._start.layout, begins, self._start.local))
        except OSError as error:
            raise explained(error, path) from error

    def shape(self) -> EncodedUpdate:
        """Makes the update of what ranks have left in `order.plain`, from what they began with."""
        order, layout = self._order, self._start.layout
        row = self._row(Path(order.plain), layout.sent.size)
        # What ranks have kept; what an earlier try at this very step remembered is not gone on from.
        kept = self._state.load(order.job, (order.round, order.attempt))
        local: Mapping[str, Any] = without_memory(kept) or {}
        if self._algorithm.goes_on():
            size = layout.model.size
            begins = open_model(Path(order.begins)).vector[:size]
            ends, delta = _mapped(Path(f"{order.begins}.ends"), size), row[:size]
            for place, dtype in self._parts():
                # As a module of this type held it: ranks write what training made of that.
                torch.add(_as_held(begins[place], dtype), delta[place], out=ends[place])
                torch.sub(ends[place], _as_held(self._start.vector[place], dtype), out=delta[place])
            self._rules.round.scratch.update({BEGINS: begins, ENDS: ends})
            local = {**local, **self._rules.end(row, order.steps or self._job.algorithm.steps or 0)}
        return write_leaving(
            order, self._job, self._algorithm, self._start, self._client, self._state, row, local
        )

    def _row(self, plain: Path, size: int) -> Tensor:
        """A copy of what ranks have left, which changes: another process may have to begin anew with that."""
        copy = Path(f"{plain}.row")
        try:
            shutil.copyfile(plain, copy)
        except OSError as error:
            raise explained(error, copy) from error
        return _mapped(copy, size)

    def _parts(self) -> Iterator[tuple[slice, torch.dtype]]:
        """The model's vector in blocks of one tensor each, with its type in a module."""
        for spec in self._start.layout.model.averaged:
            for first in range(0, spec.size, BLOCK_ELEMENTS):
                end = min(first + BLOCK_ELEMENTS, spec.size)
                yield slice(spec.offset + first, spec.offset + end), DTYPES[spec.dtype]


def _as_held(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if dtype in (torch.float32, torch.float64) else values.to(dtype).float()


def _mapped(path: Path, size: int) -> Tensor:
    """A file of so many float32 values, which changes with the tensor; a new one has any."""
    try:
        take_room(path, size * 4)
        return torch.from_numpy(np.memmap(path, "<f4", "r+", shape=(size,)))
    except OSError as error:
        raise explained(error, path) from error

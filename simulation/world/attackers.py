"""Hostile clients, so that robust rules can be tried from the job file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from roundtable.aggregation import TensorMatrix, attacks, combine
from roundtable.client.training.batches import as_tensors
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, ConfigError, InvalidUpdate
from roundtable.core.seeds import derive_seed, numpy_generator
from roundtable.simulation.world.config import AttackTable, attack_table

_COLUMNS = 1 << 18
_LEAST_HONEST = {"alie": 2, "sign_flip": 1, "ipm": 1, "mimic": 1, "tuned_alie": 2, "tuned_ipm": 1}

Defence = Callable[[], Tensor]
"""What the job's rule makes of the rows as they stand: the aggregate [d]."""


class Attackers:
    """Who is hostile, by the job's seed, and what they send."""

    def __init__(self, table: AttackTable | None, clients: int, seed: int) -> None:
        self.table = table
        self._seed = seed
        self._hostile: frozenset[int] = frozenset()
        if table is not None:
            count = table.count or max(1, round((table.fraction or 0.0) * clients))
            picks = numpy_generator(seed, "attackers").choice(clients, size=count, replace=False)
            self._hostile = frozenset(picks.tolist())

    @classmethod
    def of(cls, job: JobConfig) -> Attackers:
        """The job's `[simulation.attack]`."""
        return cls(attack_table(job), job.simulation.clients, job.seed)

    def __contains__(self, index: int) -> bool:
        return index in self._hostile

    @property
    def poison(self) -> Callable[[int, Any], Any] | None:
        """What becomes of a client's training data; None where data are left alone."""
        return self._poisoned if self.table is not None and self.table.classes is not None else None

    def corrupt(
        self,
        round: int,
        clients: Sequence[int],
        rows: Tensor,
        places: Sequence[int],
        defence: Defence | None = None,
    ) -> list[int]:
        """Overwrites the hostile clients' rows; `rows[places[i]]` is the update of `clients[i]`.

        Returns who was hostile. Works on blocks of columns, so that nothing as large as the updates
        is copied. Tuned attackers ask the `defence`. Raises AggregationError where an attack needs more
        honest updates than there are.
        """
        hostile = [place for client, place in zip(clients, places, strict=True) if client in self]
        present = [client for client in clients if client in self]
        if self.table is None or self.table.name == "label_flip" or not hostile:
            return present
        honest = [place for client, place in zip(clients, places, strict=True) if client not in self]
        needed = _LEAST_HONEST.get(self.table.name, 0)
        if len(honest) < needed:
            raise AggregationError(
                f"the attack {self.table.name!r} imitates honest updates and needs {needed} of them; this "
                f"round has {len(honest)}: lower simulation.attack.count or raise cohort.size"
            )
        if self.table.tuned and defence is not None:
            self._tune(self.table, round, rows, honest, hostile, defence)
        else:
            self._overwrite(self.table, round, rows, honest, hostile)
        return present

    def _overwrite(
        self, table: AttackTable, round: int, rows: Tensor, honest: list[int], hostile: list[int]
    ) -> None:
        for start in range(0, rows.shape[1], _COLUMNS):
            block = rows[:, start : start + _COLUMNS]
            seed = derive_seed(self._seed, "attack", round, start)
            block[hostile] = self._rows(table, block[honest], len(hostile), seed)

    def _tune(
        self,
        table: AttackTable,
        round: int,
        rows: Tensor,
        honest: list[int],
        hostile: list[int],
        defence: Defence,
    ) -> None:
        """The strength that moves the aggregate farthest from the honest mean, as `attacks.tuned` has it; the
        rows are tried where they are. A strength that leaves no sound answer is not worth sending."""
        kind = table.name.removeprefix("tuned_")
        target = combine(TensorMatrix(rows).select(honest), np.full(len(honest), 1 / len(honest)))
        damage = {}
        for strength in attacks.STRENGTHS[kind]:
            attempt = table.model_copy(update={"name": kind, "z" if kind == "alie" else "tau": strength})
            self._overwrite(attempt, round, rows, honest, hostile)
            try:
                damage[attempt] = float((defence() - target).norm())
            except (AggregationError, InvalidUpdate):
                continue
        self._overwrite(max(damage, key=damage.__getitem__, default=attempt), round, rows, honest, hostile)

    def _rows(self, table: AttackTable, honest: Tensor, count: int, seed: int) -> Tensor:
        scale = table.scale
        match table.name:
            case "sign_flip":
                return attacks.sign_flip(honest, count, 1.0 if scale is None else scale)
            case "alie":
                return attacks.a_little_is_enough(honest, count, table.z)
            case "ipm":
                return attacks.inner_product_manipulation(
                    honest, count, 2.0 if table.tau is None else table.tau
                )
            case "gaussian":
                return attacks.gaussian(honest, count, 1.0 if scale is None else scale, seed)
            case "free_rider":
                return attacks.gaussian(honest, count, 0.0 if scale is None else scale, seed)
            case "mimic":
                return attacks.mimic(honest, count)
            case "infinities":
                return attacks.infinities(honest, count)
            case _:
                return attacks.not_a_number(honest, count)

    def _poisoned(self, index: int, train: Any) -> Any:
        assert self.table is not None
        assert self.table.classes is not None
        if index not in self:
            return train
        tensors = as_tensors(train)
        if tensors is None:
            return _Flipped(train, self.table.classes)
        labels = tensors[-1]
        _check_labels(labels, self.table.classes)
        return (*tensors[:-1], attacks.flip_labels(labels, self.table.classes))


class _Flipped(Dataset[Any]):
    """A map-style data set of (…, label) with its labels flipped."""

    def __init__(self, base: Any, classes: int) -> None:
        self._base = base
        self._classes = classes

    def __len__(self) -> int:
        return len(self._base)

    @override
    def __getitem__(self, index: int) -> Any:
        *rest, label = self._base[index]
        _check_labels(torch.as_tensor(label), self._classes)
        return (*rest, self._classes - 1 - label)


def _check_labels(labels: Tensor, classes: int) -> None:
    if labels.dtype.is_floating_point or (labels.numel() and int(labels.max()) >= classes):
        raise ConfigError(
            f"simulation.attack: label_flip with classes = {classes} needs whole labels below it as the last "
            f"part of each example; found {labels.dtype}"
            + (f" up to {labels.max().item()}" if labels.numel() else "")
        )

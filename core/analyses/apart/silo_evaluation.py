"""How well a model's scores tell an outcome at each silo, beside all rows together.

Each silo evaluates its own rows as `ScoreEvaluation` does, hides its own small cells, and sends the figures
in places of its own. So the coordinator, masked or not, and readers of the answer see a silo's figures, which
its policy has to allow; under masks nobody sees its counts by score. Where the figures of all rows less those
of the silos that are told would tell of a small cell of the others, more silos are hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, HIDDEN, Answer
from roundtable.core.analyses.score_evaluation import ScoreEvaluation, differences
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

_COUNTS = ("rows", "confusion", "calibration", "points")


class SiloEvaluation(ScoreEvaluation):
    """The same evaluation of all rows, and of each silo's."""

    shows_silos = True

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        score: str,
        outcome: str,
        threshold: float,
        bins: int,
        every: float | None,
    ) -> None:
        super().__init__(columns, least, title, score, outcome, threshold, bins, None, every)
        self.silos: tuple[str, ...] = ()
        self._shape_of = dict(super().public)
        self._size = sum(map(prod, self._shape_of.values()))

    @override
    def divide(self, silos: Sequence[str]) -> None:
        if not silos:
            raise ConfigError(
                f"{self.title}: by_silo = true goes by the silos' names, and nobody has given them; "
                "`roundtable analyse` does"
            )
        self.silos = tuple(silos)

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {**super().reals, "own": (len(self.silos), self._size)}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return {**self._shape_of, "own": (len(self.silos), self._size)}

    @override
    def own_places(self, silo: int) -> Mapping[str, int]:
        return {"own": silo}

    @override
    def sums_of(self, table: DataTable, public: Arrays, stage: int, silo: int) -> dict[str, Doubles]:
        if stage == 0:
            return self.sums(table, public, 0)
        own = np.zeros((len(self.silos), self._size))
        own[silo] = self._figures_of(table)
        return {"own": own, **(self.sums(table, public, 1) if self.chances else {})}

    def _figures_of(self, table: DataTable) -> Doubles:
        """The public numbers of an evaluation of these rows alone, one behind the other; `HIDDEN` where they
        are too few."""
        public = {name: np.zeros(shape) for name, shape in self._shape_of.items()}
        stage = 0
        while stage in (0, 1):
            changed = super().step(public, self.sums(table, public, stage), stage)
            stage = int(changed.pop("stage"))
            public |= changed
        if stage != DONE:
            return np.full(self._size, HIDDEN)
        return np.concatenate([public[name].ravel() for name in self._shape_of])

    def _parted(self, own: Doubles) -> dict[str, Doubles]:
        """The public numbers [silos, ...] by name; writing into them writes into `own` [silos, size]."""
        ends = np.cumsum([prod(shape) for shape in self._shape_of.values()])[:-1]
        parts = np.split(own, ends, axis=1)
        return {
            name: part.reshape(len(own), *shape)
            for part, (name, shape) in zip(parts, self._shape_of.items(), strict=True)
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            changed = super().step(public, sums, 0)
            return {**changed, "stage": min(changed["stage"], 1.0)}
        pooled = super().step(public, sums, 1) if self.chances else {"stage": DONE}
        return {**pooled, "own": self._shown(public, sums["own"])}

    def _shown(self, public: Arrays, own: Doubles) -> Doubles:
        """What is told of the silos' figures."""
        shown = own.copy()
        parts, total = self._parted(shown), public["rows"][0]
        rows, confusion = parts["rows"][:, 0], parts["confusion"][:, 0]
        lost = (own == HIDDEN).all(axis=1)
        self._check_silos(parts, lost, total)
        lost = self._more_lost(lost, rows, total)
        shown[lost] = HIDDEN
        unclear = lost | (confusion == HIDDEN).any(axis=(1, 2)) | (public["confusion"] == HIDDEN).any()
        cells, all_cells = confusion.reshape(len(own), 4), public["confusion"].ravel()
        confusion[self._more_lost(unclear, cells, all_cells)] = HIDDEN
        # A bin that one silo hides, or all rows, is one of all silos' that sums would give away.
        hidden = (parts["calibration"] == HIDDEN).any(axis=(0, 1)) | (public["calibration"] == HIDDEN).any(
            axis=0
        )
        parts["calibration"][:, :, hidden] = HIDDEN
        parts["predicted"][:, hidden] = 0.0
        told = (parts["points"][:, 0] == 1).all(axis=0) & (public["points"][0] == 1)
        parts["points"][:, :, ~told] = 0.0
        shown[lost] = HIDDEN
        return shown

    def _more_lost(self, lost: Any, cells: Doubles, total: Doubles) -> Any:
        """Which silos are hidden, bool [silos], with as many more, the smallest first, as it takes until
        those hidden are several and have no small cell together; of `cells` [silos, n] and their `total`."""
        lost = lost.copy()
        while lost.any() and not lost.all():
            rest = total - cells[~lost].sum(axis=0)
            if lost.sum() > 1 and ((rest == 0) | (rest >= self.least)).all():
                break
            left = np.flatnonzero(~lost)
            lost[left[cells[left].sum(axis=1).argmin()]] = True
        return lost

    def _check_silos(self, parts: Mapping[str, Doubles], lost: Any, total: Doubles) -> None:
        """AggregationError for figures that no rows of a silo have."""
        counts = np.concatenate([parts[name].reshape(len(lost), -1) for name in _COUNTS], axis=1)
        rows, confusion = parts["rows"][:, 0], parts["confusion"][:, 0]
        whole = (confusion != HIDDEN).all(axis=(1, 2))
        sound = ((counts >= HIDDEN) & (counts == np.rint(counts))).all(axis=1)
        sound &= (rows >= max(self.least, 2)).all(axis=1)
        sound &= ~whole | (confusion.sum(axis=2) == rows).all(axis=1)
        figures = parts["figures"].reshape(len(lost), -1)
        sound &= ((figures >= 0) & (figures <= 1 + 1e-9)).all(axis=1) & (parts["losses"] >= 0).all(axis=1)
        for silo in np.flatnonzero(~sound & ~lost):
            raise AggregationError(
                f"{self.title}: what stands in the place of {self.silos[silo]} are no figures of its rows: a "
                "silo sent something else"
            )
        if (rows[~lost].sum(axis=0) > total).any() or (not lost.any() and (rows.sum(axis=0) != total).any()):
            raise AggregationError(
                f"{self.title}: the silos' own rows are not those of all together: a silo sent something "
                "else than its figures"
            )

    @override
    def answer(self, public: Arrays) -> Answer:
        pooled, parts = super().answer(public), self._parted(public["own"])
        rows, notes, hidden = [*pooled.rows], [*pooled.notes], pooled.hidden
        silos: dict[str, Any] = dict.fromkeys(self.silos)
        for number, name in enumerate(self.silos):
            if (public["own"][number] == HIDDEN).all():
                continue
            found = super().answer({key: part[number] for key, part in parts.items()})
            silos[name] = found.values
            rows += [[name, *line[1:]] for line in found.rows]
            hidden += found.hidden
        if none := [name for name, values in silos.items() if values is None]:
            notes.append(f"{', '.join(none)}: too few rows, or figures that would tell of such a silo's")
        values = {**pooled.values, "silos": silos}
        values["differences"] = differences([each for each in silos.values() if each is not None])
        return Answer(self.title, self.ask, pooled.header, rows, values, hidden=hidden, notes=notes)

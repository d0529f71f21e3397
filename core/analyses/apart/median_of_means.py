"""Means and variances that silos which lie about their rows cannot move far: medians of means.

Silos are divided into k groups; the mean is the median of the groups' means, each the group's sum over its
count, and the variance the median of the groups' variances (Lugosi & Mendelson 2019, section 2.1; Minsker
2015). Theirs are blocks of equal size; here a group has the rows of its silos, and counts once however many
these are: a median weighted by rows would be that of a silo which claims most of them.

With m groups of which at most f lie, m >= 2f + 1, the median is within the range of the others' means. Its
interval is median ± u (z sqrt(pi / 2) / sqrt(m − f) + q(m / (2 (m − f)))), q the normal quantile function and
z = q(0.975): the error of a median of m − f normal means (Minsker 2019), and the furthest that f
others move it (Huber 1964). u is the spread of one group's mean: s (m − f) / r, s² the variance and r the sum
of the m − f smallest square roots of the groups' counts, or, where that is more, 1.4826 times the median
distance of the groups' means from the median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.moments import Describe, or_none, shown_count
from roundtable.core.analyses.question import DONE, HIDDEN, Answer
from roundtable.core.analyses.scipy_parts import stats
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

LEAST_SILOS = 3
_FAR = 4.0
_SPREAD_OF_DISTANCE = 1.4826
"""Of a normal distribution: its standard deviation over the median distance from its median."""


class RobustDescribe(Describe):
    """Rows, missing values, mean and standard deviation of columns, for each category of `by`, with at most
    `liars` silos whose sums are not those of their rows.

    `groups`: how many groups of silos, drawn by `seed` from the silos' names; None: 2 · liars + 1.
    """

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        of: tuple[str, ...],
        by: str | None,
        liars: int,
        groups: int | None,
        seed: int,
    ) -> None:
        super().__init__(columns, least, title, of, by)
        self.liars = liars
        self.groups = 2 * liars + 1 if groups is None else groups
        self.seed = seed
        self.members: list[list[str]] = [[] for _ in range(self.groups)]
        self._group_of: list[int] = []

    @override
    def divide(self, silos: Sequence[str]) -> None:
        if len(silos) < max(LEAST_SILOS, self.groups):
            there = f"{len(silos)} silos" if silos else "silos without names"
            raise ConfigError(
                f'{self.title}: pooling = "median_of_means" takes {self.groups} groups of silos, at least '
                f"{LEAST_SILOS}, and there are {there}; `roundtable analyse` names all that take part"
            )
        drawn = sorted(range(len(silos)), key=lambda silo: self._draw(silos[silo]))
        self._group_of = [0] * len(silos)
        for place, silo in enumerate(drawn):
            self._group_of[silo] = place % self.groups
        for silo, group in enumerate(self._group_of):
            self.members[group].append(silos[silo])

    def _draw(self, name: str) -> bytes:
        return blake3(name.encode(), derive_key_context=f"roundtable groups of silos {self.seed}").digest()

    @override
    def why_in_the_clear(self) -> str:
        return (
            f'{self.title}: pooling = "median_of_means" needs the sums of each group of silos, and masks '
            "leave those of all together: set secure_aggregation = false, so that the coordinator sees each "
            'silo\'s, or pooling = "sum"'
        )

    @property
    def _apart(self) -> Shape:
        return (self.groups, *self._shape)

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return dict.fromkeys(("present", "missing"), self._apart)

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return dict.fromkeys(("first", "second"), self._apart)

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        names = ("present", "missing", "told", "mean", "variance", "reach")
        return {**dict.fromkeys(names, self._shape), "far": self._apart}

    @property
    @override
    def kept(self) -> Mapping[str, Shape]:
        return {"rows": self._apart}

    @override
    def own_places(self, silo: int) -> Mapping[str, int]:
        place = self._group_of[silo] if silo >= 0 else -1
        return dict.fromkeys(("present", "missing", "first", "second"), place)

    @override
    def sums_of(self, table: DataTable, public: Arrays, stage: int, silo: int) -> dict[str, Doubles]:
        found = {}
        for name, values in self.sums(table, public, stage).items():
            found[name] = np.zeros(self._apart)
            found[name][self._group_of[silo]] = values if stage == 0 else values * (public["told"] > 0)
        return found

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        if stage == 0:
            present, missing = (
                self.hide_cells(sums[name].sum(axis=0), (0,)) for name in ("present", "missing")
            )
            enough = (sums["present"] >= max(self.least, 2)).sum(axis=0)
            told = (enough >= 2 * self.liars + 1) & (present >= self.least)
            return {
                "stage": 1.0 if told.any() else DONE,
                "present": present,
                "missing": missing,
                "told": told * enough,
                "rows": sums["present"],
            }
        rows, told = public["rows"], public["told"] > 0
        for group, names in enumerate(self.members):
            many, who = np.maximum(rows[group], 1.0), ", ".join(names)
            self.check_possible(sums["first"][group], stage * many, who)
            self.check_possible(sums["second"][group] - 2 * many, 2 * many, who)
        counted = told & (rows >= max(self.least, 2))
        many = np.where(counted, rows, np.nan)
        about = self._middle if stage == 1 else public["mean"]
        means = about + self._half * sums["first"] / many
        middle = _median(means, told)
        if stage == 1:
            return {"stage": 2.0, "mean": middle}
        squares = np.maximum(sums["second"] - sums["first"] ** 2 / many, 0.0)
        variance = _median(self._half**2 * squares / (many - 1), told)
        wide = _SPREAD_OF_DISTANCE * _median(np.abs(means - middle), told)
        far = np.abs(means - middle) > _FAR * np.maximum(np.sqrt(variance / many), wide)
        return {
            "stage": DONE,
            "mean": middle,
            "variance": variance,
            "reach": self._reach(many, variance, wide, public["told"]),
            "far": far & counted,
        }

    def _reach(self, many: Doubles, variance: Doubles, wide: Doubles, told: Doubles) -> Doubles:
        """Half of the interval's width [labels, columns]."""
        honest = np.maximum(told - self.liars, 1)
        roots = np.sort(np.sqrt(many), axis=0)  # NaN last
        fewest = np.where(np.arange(self.groups)[:, None, None] < honest, roots, 0.0).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.maximum(np.sqrt(variance) * honest / fewest, wide)
            moved = stats.norm.ppf(np.minimum(told / (2 * honest), 0.999))
        by_chance = stats.norm.ppf(0.975) * np.sqrt(np.pi / 2 / honest)
        return np.where(told > 0, spread * (by_chance + moved), 0.0)

    @override
    def answer(self, public: Arrays) -> Answer:
        header = ["column", *([self.by] if self.by is not None else [])]
        header += ["rows", "missing", "mean", "95 % from", "to", "sd"]
        rows: list[list[Any]] = []
        values: dict[str, Any] = {}
        notes = [
            f"medians over {self.groups} groups of silos, drawn by seed {self.seed}, of which at most "
            f"{self.liars} may lie; rows and missing are added up as the silos say"
        ]
        for place, name in enumerate(self.of):
            for number, label in enumerate(self.labels):
                figures = self._figures(public, (number, place))
                values.setdefault(name, {})[label] = figures
                group = [label] if self.by is not None else []
                shown = [figures["count"], figures["missing"], figures["mean"]]
                rows.append([name, *group, *shown, *figures["interval"], figures["sd"]])
                where = f"{name}, {label}" if self.by is not None else name
                if figures["far"]:
                    silos = "; ".join(" and ".join(each) for each in figures["far"])
                    notes.append(f"{where}: the mean of {silos} is far from the others': ask there")
                if figures["count"] is not None and not figures["groups"]:
                    notes.append(f"{where}: fewer than {2 * self.liars + 1} groups have rows enough")
        hidden = sum(int((public[name] == HIDDEN).sum()) for name in ("present", "missing"))
        return Answer(self.title, self.ask, header, rows, values, hidden=hidden, notes=notes)

    def _figures(self, public: Arrays, at: tuple[int, int]) -> dict[str, Any]:
        told = int(public["told"][at])
        mean, variance, reach = (
            float(public[name][at]) if told else np.nan for name in ("mean", "variance", "reach")
        )
        return {
            "count": shown_count(public["present"][at]),
            "missing": shown_count(public["missing"][at]),
            "mean": or_none(mean),
            "variance": or_none(variance),
            "sd": or_none(np.sqrt(variance)),
            "interval": [or_none(mean - reach), or_none(mean + reach)],
            "groups": told,
            "far": [names for group, names in enumerate(self.members) if public["far"][group][at]],
        }


def _median(values: Doubles, told: Any) -> Doubles:
    """The median over groups that are not NaN, 0 where a cell is not told of."""
    return np.nanmedian(np.where(told, values, 0.0), axis=0)

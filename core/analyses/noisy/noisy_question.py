"""A question whose sums are released with noise: what one row changes, and how large the noise is.

Neighbouring tables differ in one row that is there or not (add/remove). A question adds up blocks of
numbers, and one row changes each block by no more than its `reach`, in the L2 norm, whatever the row holds:
columns have the public ranges and values of the study. A survey gives each block a share of one Gaussian
mechanism (w², which add up to 1) and sends the block times w/reach, so that one row changes all that a silo
sends by 1 at most; each silo adds noise of standard deviation z to every number before it leaves.

A block that is released in several rounds, of rows and of what is public by then, divides its share among
them. Gaussian releases that are chosen one after the other compose as one whose squared changes add up (Dong,
Roth & Su 2022, corollary 3.3), so the survey costs what a single release with noise z does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.exact_sums import Arrays, Doubles, Shape
from roundtable.core.analyses.question import DONE, Answer, Question
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

Q95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class SumBlock:
    """Numbers that are released together, of this shape; one row changes them by `reach` at most (L2), in
    each of the `stages` in which they are released. `part` is what they count where a budget is divided;
    None: by how much one row changes all their releases."""

    shape: Shape
    reach: float
    stages: range = range(1)
    part: float | None = None

    @property
    def whole_reach(self) -> float:
        """By how much one row changes all its releases together."""
        return self.reach * math.sqrt(len(self.stages))


class NoisyQuestion(Question):
    """Rounds that are fixed beforehand, and the same numbers asked of every silo whatever its rows are;
    subclasses say which. Its stage is the number of the round, from 0 on.

    Numbers beyond the public range count as at its end, and values that no category has as missing: to refuse
    them would tell of a single row.
    """

    def __init__(self, columns: Mapping[str, ColumnTable], title: str) -> None:
        super().__init__(columns, 1, title)
        self._scales: dict[str, float] = {}
        self._noise = math.nan

    @property
    def blocks(self) -> Mapping[str, SumBlock]:
        """What is released, by name."""
        raise NotImplementedError

    def added(self, table: DataTable) -> dict[str, Doubles]:
        """The exact blocks of a silo's rows, which nobody else may see; of a question of one round."""
        raise NotImplementedError

    def added_at(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        """The same in a stage, in which these numbers are public. They may be anything that is finite: a row
        changes no block by more than its reach."""
        return self.added(table)

    def follow(self, public: Arrays, released: Arrays, stage: int) -> dict[str, Any]:
        """What is public after a stage, from the noisy blocks over all silos."""
        return dict(released)

    def share(self, shares: Mapping[str, float], noise_multiplier: float) -> None:
        """Sets each block's share w² of the survey's privacy, and the noise z of each silo."""
        self._scales = {
            name: math.sqrt(shares[name]) / block.whole_reach for name, block in self.blocks.items()
        }
        self._noise = noise_multiplier

    def spread(self, block: str, silos: float = 1.0) -> float:
        """The standard deviation of the noise on each of a block's numbers, over so many silos."""
        return self._noise * math.sqrt(silos) / self._scales[block]

    def active(self, stage: int) -> list[str]:
        """The blocks that are released in a stage."""
        return [name for name, block in self.blocks.items() if stage in block.stages]

    def change(self, stage: int) -> float:
        """By how much one row changes what is sent in a stage, squared; over all stages the question's share
        of the survey."""
        return math.fsum((self._scales[name] * self.blocks[name].reach) ** 2 for name in self.active(stage))

    @property
    @override
    def rounds(self) -> int:
        return 1 + max(block.stages[-1] for block in self.blocks.values())

    @property
    @override
    def counts(self) -> Mapping[str, Shape]:
        return {}

    @property
    @override
    def reals(self) -> Mapping[str, Shape]:
        return {name: block.shape for name, block in self.blocks.items()}

    @property
    @override
    def public(self) -> Mapping[str, Shape]:
        return self.reals

    @override
    def report(self, public: Arrays) -> Answer:
        if float(public["stage"][0]) == DONE:
            return self.answer(public)
        why = "a round gave no sum, and another one would cost anew: what was spent is spent; ask again"
        return Answer(self.title, self.ask, why=why)

    @override
    def sums(self, table: DataTable, public: Arrays, stage: int) -> dict[str, Doubles]:
        """The blocks as they are sent, still without noise: one row changes them by the square root of
        `change` at most."""
        return {
            name: values * self._scales[name] for name, values in self.added_at(table, public, stage).items()
        }

    @override
    def step(self, public: Arrays, sums: Arrays, stage: int) -> dict[str, Any]:
        released = {name: sums[name] / self._scales[name] for name in self.active(stage)}
        after = self.follow(public, released, stage)
        return {"stage": DONE if stage + 1 == self.rounds else float(stage + 1), **after}

    @staticmethod
    def silos(public: Arrays) -> float:
        """Over how many silos the numbers are."""
        return max(1.0, float(public["silos"][0]))


def fair_shares(questions: Sequence[tuple[NoisyQuestion, float]]) -> list[dict[str, float]]:
    """Each block's share w² of one mechanism, by question; all add up to 1.

    In proportion to reach, that of all a block's releases together, times the question's weight: then the
    noise variances of the blocks, (reach/w)² each, have the least sum at equal weights. A block with a `part`
    counts as that in the place of its reach.
    """
    wanted = [
        {name: (block.part or block.whole_reach) * weight for name, block in question.blocks.items()}
        for question, weight in questions
    ]
    whole = math.fsum(part for each in wanted for part in each.values())
    return [{name: part / whole for name, part in each.items()} for each in wanted]


def counted(estimate: float) -> int:
    """A noisy count as a table shows it: whole, and 0 where the noise took it below."""
    return max(0, round(estimate))


def count_interval(estimate: float, noise: float) -> list[float]:
    """95 % interval of a count whose noise has this standard deviation; no count lies below 0."""
    return [max(0.0, estimate - Q95 * noise), max(0.0, estimate + Q95 * noise)]


def count_notes(estimates: Doubles, noise: float) -> list[str]:
    """What a reader of noisy counts has to know."""
    notes = [f"each count is within ± {Q95 * noise:.4g} of the true one in 95 of 100 surveys (noise)"]
    if below := int((estimates < 0).sum()):
        notes.append(f"counts that came out below 0 by the noise, and are shown as 0: {below}")
    return notes


def ratio_interval(
    total: float, count: float, total_noise: float, count_noise: float, variance: float
) -> tuple[float, float]:
    """95 % interval of a mean within [-1, 1] of rows of this variance, from a noisy sum over a noisy count.

    Fieller's: all m for which |total − m · count| is no more than 1.96 of its standard deviation
    √(count · variance + total_noise² + m² · count_noise²). The whole range where the count may be 0.
    """
    squared = Q95**2
    fixed = max(count, 0.0) * variance + total_noise**2
    a = count**2 - squared * count_noise**2
    if count <= 0 or a <= 0:
        return -1.0, 1.0
    middle = total * count / a
    reach = Q95 * math.sqrt(total**2 * count_noise**2 + a * fixed) / a
    low, high = (min(max(end, -1.0), 1.0) for end in (middle - reach, middle + reach))
    return low, high


def as_places(values: Doubles, group: Doubles | None, shape: Shape) -> Doubles:
    """How many rows are in each cell [groups, cells] of two places; a row with a missing place is in none."""
    group = np.zeros(len(values)) if group is None else group
    whole = ~(np.isnan(values) | np.isnan(group))
    flat = group[whole].astype(np.int64) * shape[1] + values[whole].astype(np.int64)
    return np.bincount(flat, minlength=shape[0] * shape[1]).astype(np.float64).reshape(shape)

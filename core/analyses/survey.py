"""A survey: several questions of one table, answered side by side in the same rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from roundtable.core.analyses.exact_sums import (
    MOST_SILOS,
    Digits,
    Doubles,
    Histograms,
    PublicPlaces,
    Shape,
    Singles,
    SumPlaces,
)
from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion, fair_shares
from roundtable.core.analyses.question import DONE, Answer, Question
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.errors import ConfigError, ProtocolError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

MOST_VALUES = 1 << 22
"""Of one silo's vector of sums."""
MOST_PUBLIC, MOST_KEPT = 1 << 23, 1 << 26
"""Of the public numbers, and of those that the coordinator keeps for itself: 32 and 256 MiB."""


@dataclass(frozen=True)
class Survey:
    """The questions with the places of their sums and public numbers, alike at every party.

    `digits` say how sums are cut; `shares` is each question's part of the survey's privacy (w², which add up
    to 1), None without noise.
    """

    columns: Mapping[str, ColumnTable]
    questions: Sequence[Question]
    digits: Digits = field(default_factory=Digits)
    shares: Sequence[float] | None = None

    @classmethod
    def of(
        cls,
        columns: Mapping[str, ColumnTable],
        asked: Sequence[AnyQuestion],
        least: int,
        noise_multiplier: float | None = None,
        silos: int = MOST_SILOS,
        names: Sequence[str] = (),
        round_to: int = 1,
    ) -> Survey:
        """The survey that these tables ask of at most so many silos, with noise of this multiplier at each
        where one is given; `names` are the silos', where it is known which they are; counts are told as
        multiples of `round_to`.
        ConfigError for a question that the columns, or privacy, do not allow."""
        titles = [each.name or f"question {number} ({each.ask})" for number, each in enumerate(asked, 1)]
        if round_to > 1 and noise_multiplier is not None:
            raise ConfigError("round_to rounds exact counts, and under [privacy] none is told: leave it out")
        if noise_multiplier is not None:
            survey = cls._with_noise(columns, asked, titles, noise_multiplier, Digits(silos))
        else:
            if weighted := [title for title, each in zip(titles, asked, strict=True) if each.weight != 1.0]:
                raise ConfigError(f"{weighted[0]}: weight divides a budget, and the survey has no [privacy]")
            made = [each.make(columns, least, title) for title, each in zip(titles, asked, strict=True)]
            for question in made:
                question.digits = Digits(silos)
                question.round_to = round_to
                if round_to > 1 and not question.tells_counts_alone:
                    raise ConfigError(
                        f"{question.title}: round_to = {round_to} rounds counts, and {question.ask} tells of "
                        "more than counts, from which they follow: ask histogram, table and top_values in a "
                        "survey of their own"
                    )
                question.divide(names)
            survey = cls(columns, made, Digits(silos))
        survey.check_sizes()
        return survey

    def check_sizes(self) -> None:
        """ConfigError where somebody would have to hold too much: a silo, or the coordinator."""
        for what, size, most in (
            ("sums take {} values of a silo's vector", self.sum_places.size, MOST_VALUES),
            ("public numbers take {} values", self.public_places.size, MOST_PUBLIC),
            ("coordinator would keep {} values from round to round", self.kept_places.size, MOST_KEPT),
        ):
            if size > most:
                raise ConfigError(
                    f"the survey's {what.format(f'{size:,}')}, and {most:,} are allowed: ask fewer questions "
                    "at a time, or coarser ones (bins, depth, columns)"
                )

    @classmethod
    def _with_noise(
        cls,
        columns: Mapping[str, ColumnTable],
        asked: Sequence[AnyQuestion],
        titles: Sequence[str],
        noise_multiplier: float,
        digits: Digits,
    ) -> Survey:
        made: list[NoisyQuestion] = [
            each.make_noisy(columns, title) for title, each in zip(titles, asked, strict=True)
        ]
        shares = fair_shares(list(zip(made, [each.weight for each in asked], strict=True)))
        for question, own in zip(made, shares, strict=True):
            question.share(own, noise_multiplier)
        return cls(columns, made, digits, [math.fsum(own.values()) for own in shares])

    @property
    def rounds(self) -> int:
        """The most rounds that it takes."""
        return max(question.rounds for question in self.questions)

    @property
    def round_shares(self) -> tuple[float, ...]:
        """How much of the survey's privacy each round takes, which add up to 1; () without noise."""
        noisy = [question for question in self.questions if isinstance(question, NoisyQuestion)]
        rounds = range(self.rounds if noisy else 0)
        return tuple(math.fsum(question.change(stage) for question in noisy) for stage in rounds)

    def released(self, stage: int) -> list[str]:
        """The sums that silos release with noise in a stage, in the order of their places."""
        return [
            f"{number}.{name}"
            for number, question in enumerate(self.questions)
            if isinstance(question, NoisyQuestion)
            for name in question.active(stage)
        ]

    def check_stage(self, public: Mapping[str, Doubles], stage: int) -> None:
        """ProtocolError where questions with noise are not where they have to be in this round: what a round
        costs follows from its number."""
        for number, question in enumerate(self.questions):
            found, expected = float(public[f"{number}.stage"][0]), stage if stage < question.rounds else DONE
            if found != expected:
                raise ProtocolError(
                    f"{question.title}: round {stage + 1} came with the public numbers of another round; a "
                    "survey under privacy takes its rounds in order: ask it anew"
                )

    @property
    def needed(self) -> dict[str, ColumnTable]:
        """The descriptions of the columns that it reads."""
        names = {name for question in self.questions for name in question.names}
        return {name: table for name, table in self.columns.items() if name in names}

    @cached_property
    def sum_places(self) -> SumPlaces:
        """Where the sums of each question are."""
        counts: dict[str, Shape] = {}
        reals: dict[str, Shape] = {}
        wholes: dict[str, Shape] = {}
        histograms: dict[str, Shape] = {}
        for number, question in enumerate(self.questions):
            counts |= {f"{number}.{name}": shape for name, shape in question.counts.items()}
            reals |= {f"{number}.{name}": shape for name, shape in question.reals.items()}
            wholes |= {f"{number}.{name}": shape for name, shape in question.wholes.items()}
            histograms |= {f"{number}.{name}": shape for name, shape in question.histograms.items()}
        return SumPlaces(counts, reals, wholes, histograms, self.digits)

    @cached_property
    def public_places(self) -> PublicPlaces:
        """Where the public numbers are: how many silos began, and those of each question."""
        shapes: dict[str, Shape] = {"silos": (1,)}
        for number, question in enumerate(self.questions):
            shapes[f"{number}.stage"] = (1,)
            shapes |= {f"{number}.{name}": shape for name, shape in question.public.items()}
        return PublicPlaces(shapes)

    @cached_property
    def kept_places(self) -> PublicPlaces:
        """Where the numbers are that the coordinator keeps for itself."""
        shapes: dict[str, Shape] = {}
        for number, question in enumerate(self.questions):
            shapes |= {f"{number}.{name}": shape for name, shape in question.kept.items()}
        return PublicPlaces(shapes)

    def others_digits(self, silo: int) -> Singles:
        """What stands in the digits of this silo's sums where places are those of others, and NaN where they
        are its own, float32 [sum_places.size]; −1 is a silo that has none."""
        own = {
            f"{number}.{name}": place
            for number, question in enumerate(self.questions)
            for name, place in question.own_places(silo).items()
        }
        return self.sum_places.others_digits(own)

    def sums(
        self, table: DataTable, public: Mapping[str, Doubles], code: Any = None, silo: int = -1
    ) -> dict[str, Doubles | Histograms]:
        """What a silo sends in the round that these public numbers begin: nothing for what is answered.

        `code` asks what is not built in; `silo` is its number, where questions are told the silos' names.
        """
        found: dict[str, Doubles | Histograms] = {}
        for number, question in enumerate(self.questions):
            own = _own(public, number)
            stage = float(own["stage"][0])
            if 0 <= stage < DONE:
                made = question.run_by(code).sums_of(table, own, int(stage), silo)
                found |= {f"{number}.{name}": values for name, values in made.items()}
        return found

    def step(self, public: Mapping[str, Doubles], sums: Mapping[str, Doubles]) -> dict[str, Doubles]:
        """The next public and kept numbers; `public` has both, and over how many silos the sums are."""
        after = dict(public)
        silos = {"silos": public["silos"]}
        for number, question in enumerate(self.questions):
            own = _own(public, number) | silos
            stage = float(own["stage"][0])
            if not 0 <= stage < DONE:
                continue
            changed: dict[str, Any] = question.step(own, _own(sums, number), int(stage))
            for name, values in changed.items():
                shape = after[f"{number}.{name}"].shape
                found = np.asarray(values, np.float64)
                same = found.shape == shape
                after[f"{number}.{name}"] = found if same else np.broadcast_to(found, shape).copy()
        return after

    def open(self, public: Mapping[str, Doubles]) -> int:
        """How many questions go on."""
        stages = [float(public[f"{number}.stage"][0]) for number in range(len(self.questions))]
        return sum(0 <= stage < DONE for stage in stages)

    def answers(self, public: Mapping[str, Doubles], code: Any = None) -> list[Answer]:
        """What the public numbers say, a question each; `code` answers what is not built in."""
        silos = {"silos": public["silos"]}
        return [
            question.run_by(code).report(_own(public, number) | silos)
            for number, question in enumerate(self.questions)
        ]


def _own(numbers: Mapping[str, Doubles], number: int) -> dict[str, Doubles]:
    mark = f"{number}."
    return {name.removeprefix(mark): values for name, values in numbers.items() if name.startswith(mark)}

"""An analysis: no training, but sums over the rows of every silo, and what follows from them.

Down goes a place with public numbers, which the server alone fills; up goes a place with the digits of each
silo's sums. The model is a single value that nobody moves: what an analysis has found is its public numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from math import prod
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from blake3 import blake3
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import (
    AlgorithmPlace,
    ClientAlgorithm,
    ClientRound,
    Composition,
    Moved,
    Sent,
    ServerAlgorithm,
    ServerRound,
)
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.analyses.exact_sums import MOST_SILOS, Singles, Sums
from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.errors import AggregationError, ConfigError, PrivacyError, ProtocolError, TaskError
from roundtable.core.tables.table_description import Columns
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.toml_tables import Finite, Name, as_tuple

LEAST_COUNT = 5
OPEN = "open_questions"
SUMS = "sums"
_PUBLIC, _SEEN, _KEPT = "public", "seen", "kept"


class AnalysisTable(AlgorithmTable):
    """`[algorithm]` with name = "analysis"."""

    exact: ClassVar[bool] = True
    table: Name = Field(description="the silo's table, [data.NAME] in its agent.toml")
    columns: Columns = Field(description="what the study says of the columns, as [columns.age]")
    questions: Annotated[
        tuple[AnyQuestion, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=200)
    ] = Field(description="what is asked, each a table with ask")
    least_count: int = Field(
        LEAST_COUNT, ge=1, le=10**6, description="fewest rows of a cell or group that is told of"
    )

    round_to: int = Field(
        1, ge=1, le=10**6, description="tell counts as multiples of this; of histogram, table and top_values"
    )
    most_silos: int = Field(
        MOST_SILOS,
        ge=1,
        le=MOST_SILOS,
        description="of the cohort: the fewer, the longer digits may be, and the fewer values a sum takes; "
        "`roundtable analyse` sets it",
    )
    silos: dict[Name, Name] = Field(
        default_factory=dict,
        description="every silo that takes part, by the name that it has there, with that in answers, where "
        "a question goes by silos; `roundtable analyse` sets it",
    )
    noise_multiplier: Finite | None = Field(
        None,
        gt=0,
        description="answer under differential privacy: that of [privacy], with level example",
    )

    @model_validator(mode="after")
    def _does_not_train(self) -> AnalysisTable:
        for key, field in AlgorithmTable.model_fields.items():
            if key != "name" and getattr(self, key) != field.default:
                raise ValueError(f"{key} is of training, and an analysis counts and adds up: leave it out")
        return self

    @override
    def sums_noise(self) -> float | None:
        return self.noise_multiplier

    @override
    def most_added(self) -> int:
        return self.most_silos

    @override
    def sums_shares(self) -> tuple[float, ...]:
        return self.survey.round_shares

    @override
    def why_masked(self) -> str:
        for question in self.survey.questions:
            if question.small_cells and self.least_count > 1:
                return (
                    f"{question.title}: without masks the coordinator sees each silo's own sums, of cells "
                    f"with fewer rows than least_count = {self.least_count}; set secure_aggregation = "
                    "true, or least_count = 1 where the silos allow that"
                )
        return ""

    @override
    def why_in_the_clear(self) -> str:
        return next(filter(None, (each.why_in_the_clear() for each in self.survey.questions)), "")

    @override
    def named_clients(self) -> Collection[str]:
        return self.silos

    @override
    def others_digits(self, client: str) -> Singles | None:
        return self.survey.others_digits(self.number_of(client)) if self.silos else None

    def number_of(self, client: str) -> int:
        """The number of a silo among those that are named; −1 for another one."""
        return list(self.silos).index(client) if client in self.silos else -1

    @property
    def survey(self) -> Survey:
        """The questions. ConfigError for one that the columns do not allow, or privacy."""
        return Survey.of(
            self.columns,
            self.questions,
            self.least_count,
            self.noise_multiplier,
            self.most_silos,
            tuple(self.silos.values()),
            self.round_to,
        )


class Analysis(ClientAlgorithm):
    """Sums of a silo's rows in exact digits; the same at every backend, in the clear and under masks."""

    Table = AnalysisTable
    answers = True
    composition = Composition(
        levels=frozenset({"none", "example"}),
        weightings=frozenset({"uniform"}),
        server_optimizer=False,
        rules="mean",
        arrays=True,
        reason="an analysis adds up exact sums, or sums to which each silo adds the noise that hides a row",
    )

    def __init__(self, table: AlgorithmTable) -> None:
        super().__init__(table)
        assert isinstance(table, AnalysisTable)
        self.of = table

    @cached_property
    def survey(self) -> Survey:
        """The questions."""
        return self.of.survey

    @property
    @override
    def places(self) -> tuple[AlgorithmPlace, ...]:  # type: ignore[override]
        return (
            AlgorithmPlace(
                SUMS,
                (self.survey.sum_places.size,),
                clipping="joint",
                noise="joint",
                masks="sum",
            ),
            AlgorithmPlace(_PUBLIC, (self.survey.public_places.size,), sent=False),
        )

    @override
    def check_clients(self, names: Collection[str]) -> None:
        if unknown := [name for name in self.of.silos if name not in names]:
            raise ConfigError(
                f"algorithm.silos: {unknown[0]!r} is none of the silos that there are; `roundtable analyse` "
                "names those that answer analyses",
                key=("algorithm", "silos"),
            )

    @override
    def server(self) -> ServerAlgorithm:
        return AnalysisServer(self.survey)

    @override
    def answer(self, round: ClientRound, data: Any) -> Sent:
        survey, name = self.survey, self.of.table
        if not hasattr(data, "read"):
            raise TaskError('an analysis goes with task = "analysis", which reads the silo\'s tables')
        public = survey.public_places.unpack(round.down[_PUBLIC])
        first = not public["silos"][0]
        if (round.noised is None) != (self.of.noise_multiplier is None):
            raise PrivacyError("an analysis has a noise_multiplier under level example, and under no other")
        if round.noised is not None:
            return self._released(round, data, public)
        guarded = round.compare is not None
        table: DataTable = data.read(name, survey.needed, fresh=first, discreet=guarded)
        seen = _fingerprint(table)
        if not first:
            _check_seen(round.kept.get(_SEEN), seen)
        _check_finite(public)
        number = self.of.number_of(round.context.site)
        if self.of.silos and number < 0:
            raise TaskError("this silo is none of those that the analysis names: ask all that are there anew")
        sums = survey.sums(table, public, getattr(data, "code", None), number)
        if round.alone:
            _check_cells(sums, survey, self.of.least_count)
        if len(table) < self.of.least_count:
            raise PrivacyError(
                f"this silo's table {name!r} has fewer rows than the least count, {self.of.least_count}"
            )
        if first and round.compare is not None:
            _check_left_out(name, data.left_out(name, survey.needed, table), self.of.least_count)
            round.compare(name, table, self.of.least_count)
        digits = survey.sum_places.encode(sums)
        return Sent(torch.zeros_like(round.vector), {SUMS: digits}, {_SEEN: seen})

    def _released(self, round: ClientRound, data: Any, public: Mapping[str, Any]) -> Sent:
        """The sums of this round with their noise, whatever the rows are: each refusal by rows would tell of
        one."""
        assert round.noised is not None
        survey, places, stage = self.survey, self.survey.sum_places, round.context.round - 1
        survey.check_stage(public, stage)
        _check_finite(public)
        if stage and _SEEN not in round.kept:
            raise ProtocolError(
                "this silo did not begin the analysis, whose sums would be of other silos than before; ask "
                "all that are there anew"
            )
        table: DataTable = data.read(self.of.table, survey.needed, fresh=stage == 0, lenient=True)
        made, names = survey.sums(table, public), survey.released(stage)
        exact = {name: values for name, values in made.items() if isinstance(values, np.ndarray)}
        about = blake3(round.down[_PUBLIC].contiguous().numpy().tobytes()).digest()
        noised = round.noised(np.concatenate([exact[name].ravel() for name in names]), about)
        ends = np.cumsum([prod(places.reals[name]) for name in names])[:-1]
        released = dict(zip(names, np.split(noised, ends), strict=True))
        return Sent(torch.zeros_like(round.vector), {SUMS: places.encode(released)}, {_SEEN: torch.ones(1)})


class AnalysisServer(ServerAlgorithm):
    """From the digits' mean to the next public numbers."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey

    @override
    def init(self, columns: int) -> Mapping[str, Tensor]:
        size = self._survey.kept_places.size
        return {_KEPT: torch.zeros(size)} if size else {}

    @override
    def step(self, round: ServerRound) -> Moved:
        survey, silos = self._survey, int(round.present)
        public = survey.public_places.unpack(round.places[_PUBLIC])
        began = int(public["silos"][0])
        if began and began != silos:
            raise AggregationError(
                f"{silos} silos are in the sums of round {round.number}, and {began} began the analysis: "
                "what follows would be of other people; start a new one with those that are left"
            )
        sums = survey.sum_places.decode(round.up[SUMS], silos)
        kept = survey.kept_places
        held = kept.unpack(round.state[_KEPT]) if kept.size else {}
        after = survey.step({**public, **held, "silos": np.array([float(silos)])}, sums)
        return Moved(
            round.model,
            {SUMS: torch.zeros_like(round.up[SUMS]), _PUBLIC: survey.public_places.pack(after)},
            {_KEPT: kept.pack(after)} if kept.size else {},
            told={OPEN: (float(survey.open(after)), 1)},
        )


def answers_of(table: AlgorithmTable, vector: Tensor, code: Any = None) -> tuple[list[Answer], int]:
    """The answers that a job's global vector holds, and over how many silos; `code` makes those to questions
    that are not built in. TaskError for a job that is no analysis."""
    if not isinstance(table, AnalysisTable):
        raise TaskError(f"a job with algorithm {table.name!r} is no analysis")
    places = table.survey.public_places
    public = places.unpack(vector[len(vector) - places.size :])
    return table.survey.answers(public, code), int(public["silos"][0])


def _fingerprint(table: DataTable) -> Tensor:
    """Of the rows as they were read: whole numbers, float32 [16]."""
    found = table.derived.get(_SEEN)
    if found is None:
        digest = blake3()
        for name in sorted(table.columns):
            digest.update(name.encode()).update(table.columns[name].tobytes())
        found = table.derived[_SEEN] = list(digest.digest(16))
    return torch.tensor(found, dtype=torch.float32)


def _check_left_out(name: str, rows: Mapping[str, int], least: int) -> None:
    """PrivacyError where a study's codes take a few rows out of a column: sums with and without the column
    would tell of those."""
    for column, taken in rows.items():
        if 0 < taken < least:
            raise PrivacyError(
                f"the study's missing codes and recoding leave out fewer than {least} rows of column "
                f"{column!r} that this silo takes for values: sums of other columns with and without it "
                "would tell of those rows; where they are none, the silo can name the codes as missing, too "
                f"([data.{name}.columns.{column}])"
            )


def _check_finite(public: Mapping[str, Any]) -> None:
    if not all(np.isfinite(numbers).all() for numbers in public.values()):
        raise ProtocolError("the analysis came with public numbers that are not finite")


def _check_seen(before: Tensor | None, now: Tensor) -> None:
    if before is None:
        raise PrivacyError(
            "this silo did not begin the analysis: sums with and without it would tell its own by subtraction"
        )
    if not torch.equal(before, now):
        raise PrivacyError(
            "this silo's table is another than when the analysis began: sums before and after the change "
            "would tell of the rows that changed; start a new analysis"
        )


def _check_cells(sums: Sums, survey: Survey, least: int) -> None:
    """PrivacyError where the coordinator would see a cell of this silo's below the least count."""
    places = survey.sum_places
    for name in (*places.counts, *places.histograms):
        counted = sums.get(name)
        if least == 1 or counted is None:
            continue
        held = counted if isinstance(counted, np.ndarray) else counted.counted
        if ((held > 0) & (held < least)).any():
            title = survey.questions[int(name.split(".")[0])].title
            raise PrivacyError(
                f"{title}: a cell of this silo has fewer than {least} rows, and without masks the "
                "coordinator would see it: set privacy.secure_aggregation = true, or ask for coarser groups"
            )

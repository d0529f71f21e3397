"""The models of a run that are still there: the last, and those that `[keep]` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from roundtable.core.config import JobConfig
from roundtable.core.models import Model
from roundtable.engine import Best, best_after
from roundtable.engine.messages import RoundRecord
from roundtable.simulation.reporting.history import History
from roundtable.simulation.reporting.run_directory import RunDirectory


@dataclass(frozen=True)
class KeptModels(Mapping[int, Model]):
    """Models by the round that made them, 0 for the one that the run began with; read when asked for."""

    rounds: tuple[int, ...] = ()
    read: Callable[[int], Model] | None = None

    @override
    def __getitem__(self, number: int) -> Model:
        if self.read is None or number not in self.rounds:
            kept = ", ".join(map(str, self.rounds)) or "none"
            raise KeyError(f"the model of round {number} was not kept; kept are those of rounds {kept}")
        return self.read(number)

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self.rounds)

    @override
    def __len__(self) -> int:
        return len(self.rounds)


@dataclass
class Keeper:
    """Keeps a run's models while it goes on: in its directory, or in memory where it has none."""

    job: JobConfig
    initial: Model
    run: RunDirectory | None
    best: Best | None = None
    _held: dict[int, Model] = field(default_factory=dict)

    def taken_up(self, history: History) -> None:
        """A run goes on after these rounds."""
        for record in history.records:
            self._note(record)

    def committed(self, record: RoundRecord, model: Model) -> Best | None:
        """A round is done; gives the best model with it, where the job keeps that."""
        self._note(record)
        if self.run is None:
            needed = {record.round, self.best.round if self.best else 0}
            held = {**self._held, record.round: model}
            self._held = {
                made: kept for made, kept in held.items() if made in needed or self.job.keep.rounds(made)
            }
        return self.best

    def models(self, done: int, whole: Callable[[Model], Model]) -> KeptModels:
        """What is there after `done` rounds; `whole` puts in what does not travel."""
        there = self._held if self.run is None else self.run.models(done)
        return KeptModels((0, *there), lambda made: whole(self._read(made)))

    def given(self, done: int) -> Model:
        """The model that the run gives after `done` rounds, as it travels."""
        return self._read(self.best.round if self.best else done)

    def _read(self, made: int) -> Model:
        if made == 0:
            return self.initial
        return self._held[made] if self.run is None else self.run.model(made)

    def _note(self, record: RoundRecord) -> None:
        if self.job.keep.best:
            self.best = best_after(self.best, record, self.job.stop)

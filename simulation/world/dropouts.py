"""Dropouts on demand: who drops out or crashes in a round, decided by the job's seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roundtable.core.config import JobConfig
from roundtable.core.seeds import numpy_generator
from roundtable.engine.messages import Step
from roundtable.simulation.world.config import DropoutsTable, dropouts_table


@dataclass(frozen=True)
class Dropout:
    """A client that does not answer after this share of its time: silently or (crash) saying why."""

    kind: Literal["dropout", "crash"]
    share: float
    detail: str


@dataclass(frozen=True)
class Dropouts:
    """The dropouts of a job. Each (round, attempt, client) has a stream of its own."""

    table: DropoutsTable
    seed: int

    @classmethod
    def of(cls, job: JobConfig) -> Dropouts:
        """The job's `[simulation.dropouts]`."""
        return cls(dropouts_table(job), job.seed)

    def of_training(self, step: Step, index: int) -> Dropout | None:
        """What goes wrong with client `index` before its update has arrived; None for nothing."""
        table = self.table
        if not (table.dropout or table.crash_training or table.crash_upload):
            return None
        dropout, training, upload, share = self._draws(step, index)
        if dropout < table.dropout:
            return Dropout("dropout", share, "dropped out")
        if training < table.crash_training:
            return Dropout("crash", share, "crashed in training (simulation.dropouts.crash_training)")
        if upload < table.crash_upload:
            return Dropout("crash", 1.0, "crashed while uploading (simulation.dropouts.crash_upload)")
        return None

    def of_evaluation(self, step: Step, index: int) -> Dropout | None:
        """What goes wrong with client `index` in an evaluation; None for nothing."""
        if self.table.crash_evaluation and self._draws(step, index)[0] < self.table.crash_evaluation:
            return Dropout("crash", 1.0, "crashed in evaluation (simulation.dropouts.crash_evaluation)")
        return None

    def _draws(self, step: Step, index: int) -> list[float]:
        generator = numpy_generator(self.seed, "dropouts", step.round, step.attempt, step.phase, index)
        return generator.random(4).tolist()  # type: ignore[no-any-return]

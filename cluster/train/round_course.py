"""What is done about each step of a round once its figures are known: refused, reported, saved, stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from roundtable.client.training.local_work import Stopped
from roundtable.cluster.stepping.agreed_step import AgreedFigures
from roundtable.cluster.stepping.loss_scaling import LossScale
from roundtable.cluster.train.loss_guard import CheckpointTimes, refuse_step
from roundtable.cluster.train.round_reports import RoundProgress, StepReport, Watch


@dataclass(frozen=True)
class StepTimes:
    """A step's number, its examples and learning rate; `ended` is when the step before ended, `arrived` when
    its examples were there."""

    step: int
    examples: int
    learning_rate: float
    ended: float
    arrived: float


@dataclass
class RoundCourse:
    """Follows a round of so many `steps`; the same on all ranks, which see the same figures.

    `report` completes a step's report before `watch` is called with it. `before`: the state before a step can
    still be saved when its figures are known.
    """

    round: int
    steps: int
    done: RoundProgress
    watch: Watch
    report: Callable[[StepReport], StepReport]
    save: Callable[[int], None] | None = None
    times: CheckpointTimes | None = None
    scale: LossScale | None = None
    before: bool = True
    _noted: float = field(default_factory=time.perf_counter, init=False)

    @property
    def looks_ahead(self) -> bool:
        """Whether a step's figures have to be known before it is taken."""
        return self.scale is not None or (self.save is not None and self.times is not None)

    def allows(self, step: int, found: AgreedFigures) -> bool:
        """Whether the step is to be taken; a checkpoint is made before one that is worth it.

        False where float16's gradients overflowed, which the next step's scale mends. Raises InvalidUpdate,
        on every rank, for a loss or a gradient that is not finite otherwise.
        """
        if self.scale is not None and not found.sound and math.isfinite(found.loss) and not self.scale.least:
            self.scale.overflowed()
            self.done.skipped += 1
            return False
        self.refuse(step, found)
        if self.save and self.times and self.before and self.times.before(found.loss, found.norm):
            self.save(step - 1)
        if self.scale is not None:
            # What was saved takes this step once more, and counts it then.
            self.scale.taken()
        return True

    def refuse(self, step: int, found: AgreedFigures) -> None:
        """Raises InvalidUpdate for a step that was not taken, as its loss or gradient was not finite."""
        if not found.sound:
            raise refuse_step(found.loss, found.norm, found.own, step, self.round)

    def note(self, found: AgreedFigures, times: StepTimes) -> None:
        """Counts and reports a step, and makes a checkpoint after it where it is time; Stopped if wished.

        Its seconds are those since the step before was noted: on a GPU, whose steps are noted while the next
        one runs, those since the step before began would be of two.
        """
        done, seconds = self.done, time.perf_counter() - self._noted
        done.seen += times.examples
        done.loss_sum += found.loss * times.examples
        done.timed += times.examples
        done.seconds += seconds
        if found.sound:
            done.steps += 1
            done.norm_sum += found.norm
        report = StepReport(
            step=times.step,
            steps=self.steps,
            examples=times.examples,
            loss=found.loss,
            norm=found.norm,
            learning_rate=times.learning_rate,
            seconds=seconds,
            waiting=times.arrived - times.ended,
            memory=0,
            skipped=done.skipped,
            experts=found.experts,
        )
        self.watch(self.report(report))
        step = times.step
        if self.save and self.times and self.times.after(step, found.loss, found.due) and step < self.steps:
            self.save(step)
        if found.stop:
            raise Stopped
        self._noted = time.perf_counter()

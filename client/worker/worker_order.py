"""What a training process is told to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roundtable.client.step_key import StepKey
from roundtable.client.worker.silo_state import Counted


@dataclass(frozen=True)
class Order:
    """One step to do: `StepWork` as it crosses the pipe, `counted` as (round, attempt). After running out of
    memory, with parts of batches, halved so many times. `steps`: those that the coordinator gave the silo.
    Where ranks train, `begins` is the file of the model that they begin with, `plain` of what they write."""

    job: str
    round: int
    phase: str
    config: str
    task: str
    model: str
    layout: str
    output: str
    attempt: int = 1
    halvings: int = 0
    counted: Counted | None = None
    steps: int | None = None
    encoding: str = ""
    begins: str = ""
    plain: str = ""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Order:
        """The order that `asdict` has put into JSON."""
        counted = plain.get("counted")
        return cls(**{**plain, "counted": tuple(counted) if counted else None})

    def next(self) -> Order:
        """The order of the round behind this one, as far as it can be told before it is here: what this one
        left is what counts."""
        counted = (self.round, self.attempt)
        return replace(self, round=self.round + 1, attempt=1, counted=counted)

    def foretold(self, real: Order) -> bool:
        """Whether `real` asks for what this guess has trained; what comes after the last step may differ."""
        later = ("attempt", "model", "output", "encoding")
        return replace(self, **{name: getattr(real, name) for name in later}) == real

    @property
    def step(self) -> StepKey:
        """The step that the order is of."""
        return StepKey(self.job, self.round, self.attempt, self.phase)

"""What a training process is told to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundtable.client.step_key import StepKey
from roundtable.client.worker.silo_state import Counted


@dataclass(frozen=True)
class Order:
    """One step to do: `StepWork` as it crosses the pipe, `counted` as (round, attempt). After running out of
    memory, with parts of batches, halved so many times. `steps`: those that the coordinator gave the silo."""

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

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Order:
        """The order that `asdict` has put into JSON."""
        counted = plain.get("counted")
        return cls(**{**plain, "counted": tuple(counted) if counted else None})

    @property
    def step(self) -> StepKey:
        """The step that the order is of."""
        return StepKey(self.job, self.round, self.attempt, self.phase)

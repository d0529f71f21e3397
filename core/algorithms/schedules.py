"""Learning rates that change from round to round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from roundtable.core.errors import ConfigError

ScheduleName = Literal["constant", "step", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """Factor by which the server's learning rate is multiplied in each round, after a linear warm-up.

    constant: 1. step: `decay` to the power of ⌊rounds since the warm-up / every⌋. cosine: from 1 to `floor`
    over `rounds` (Loshchilov & Hutter 2017, equation 5, without restarts). Raises ConfigError for a name that
    does not exist or lacks what it needs.
    """

    name: ScheduleName = "constant"
    warm_up: int = 0
    every: int = 0
    decay: float = 0.1
    rounds: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise ConfigError(
                f"schedule must be one of {', '.join(get_args(ScheduleName))}, not {self.name!r}"
            )
        if self.warm_up < 0:
            raise ConfigError(f"schedule: warm_up counts rounds and cannot be {self.warm_up}")
        if self.name == "step" and (self.every < 1 or not 0 < self.decay <= 1):
            raise ConfigError("schedule step needs every ≥ 1 rounds and a decay in (0, 1]")
        if self.name == "cosine" and (self.rounds <= self.warm_up or not 0 <= self.floor <= 1):
            raise ConfigError(
                "schedule cosine needs rounds, more than the warm-up has, and a floor in [0, 1]"
            )

    @classmethod
    def of(cls, table: Mapping[str, Any] | None) -> Schedule:
        """The schedule that a table of a job describes; a constant one without. Raises ConfigError."""
        try:
            return cls(**(table or {}))
        except TypeError as error:
            raise ConfigError(f"schedule: {error}") from error

    def factor(self, step: int) -> float:
        """The factor in round `step`, counted from 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        since = step - self.warm_up
        if self.name == "step":
            return self.decay ** (since // self.every)
        if self.name == "cosine":
            progress = min(since / (self.rounds - self.warm_up), 1.0)
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2
        return 1.0

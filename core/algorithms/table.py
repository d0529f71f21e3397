"""What every `[algorithm]` table says; an algorithm's own table adds its hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from roundtable.core.toml_tables import Finite, Table


class AlgorithmTable(Table):
    """`[algorithm]`: local training. The keys of one algorithm are in a subclass beside that algorithm."""

    hints: ClassVar[Mapping[str, str]] = {
        "optimizer": "silos train by SGD as this table says; a task may return its own from optimizer(); "
        "the server's is [aggregation.server_optimizer]",
        **{
            name: f"it is a server optimizer: keep the algorithm, and set [aggregation.server_optimizer] "
            f'name = "{name}"'
            for name in ("fedavgm", "diloco", "fedadagrad", "fedadam", "fedyogi", "fedlion")
        },
    }

    exact: ClassVar[bool] = False
    """Whether updates are digits of exact sums: nothing of them may be rounded, clipped or left out, and all
    clients are in every round."""

    def stage(self) -> str:
        """The stage that goes before all others in what travels, both ways; "" for none."""
        return ""

    def sums_noise(self) -> float | None:
        """The multiplier of the noise on sums that one record changes by 1, those of all rounds together;
        None without such sums."""
        return None

    def most_added(self) -> int:
        """Of how many silos the digits of exact sums add up; 0 where updates are none."""
        return 0

    def sums_shares(self) -> tuple[float, ...]:
        """How much of the squared change one record makes in each round, which add up to 1; () without such
        sums."""
        return ()

    name: str = Field("fedavg", description="built in, installed, or a file beside the job as file.py:Class")
    epochs: int | None = Field(
        None, ge=1, description="passes over the silo's data a round; default: 1 where no steps are given"
    )
    steps: int | None = Field(None, ge=1, description="instead of epochs: this many optimizer steps a round")
    work: Literal["equal", "by_speed"] = Field(
        "equal",
        description="by_speed gives silos that are slow fewer steps than `steps`, the most of a round; for "
        "fednova, scaffold and feddyn",
    )
    batch_size: int = Field(32, ge=1, description="examples a step")
    learning_rate: Finite = Field(0.01, gt=0, description="of local SGD")
    momentum: Finite = Field(0.0, ge=0, lt=1, description="of local SGD")
    weight_decay: Finite = Field(0.0, ge=0, description="of local SGD")
    learning_rate_decay: Finite = Field(
        1.0, gt=0, le=1, description="the learning rate is multiplied by this each round"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate over a round's steps, from its full value on"
    )
    schedule_over: Literal["round", "job"] = Field(
        "round",
        description="whether each round begins the schedule anew, or it spans all rounds of the job, each of "
        "as many steps as this one",
    )
    schedule_warm_up: int = Field(0, ge=0, description="steps in which the rate rises to its full value")
    schedule_floor: Finite = Field(
        0.0, ge=0, le=1, description="share of the full rate that linear and cosine end at"
    )
    max_gradient_norm: Finite | None = Field(None, gt=0, description="clip each step's gradient to this norm")
    optimizer_state: Literal["drop", "keep"] = Field(
        "drop", description="of a silo's optimizer between rounds: each starts afresh, or goes on with it"
    )

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs = {self.epochs} and steps = {self.steps}: a round is measured by one of them; "
                "leave the other out"
            )
        return self

    @model_validator(mode="after")
    def _knows_the_most_steps(self) -> Self:
        if self.work == "by_speed" and self.steps is None:
            raise ValueError(
                'work = "by_speed" needs steps: the most that a silo takes in a round; slow ones take fewer'
            )
        return self

    @model_validator(mode="after")
    def _rises_in_time(self) -> Self:
        anew = self.schedule_over == "round"
        if anew and self.steps is not None and self.schedule_warm_up >= self.steps:
            raise ValueError(
                f"schedule_warm_up = {self.schedule_warm_up} and steps = {self.steps}: the learning rate "
                "would never have its full value; set fewer steps of warm-up"
            )
        if self.schedule_floor and self.schedule == "constant":
            raise ValueError(
                f"schedule_floor = {self.schedule_floor} would be ignored: set schedule to linear or cosine"
            )
        if self.schedule_over == "job" and not self.scheduled:
            raise ValueError('schedule_over = "job" would be ignored: set schedule, or schedule_warm_up')
        if self.schedule_over == "job" and self.work == "by_speed":
            raise ValueError(
                'schedule_over = "job" and work = "by_speed": how far the job is follows from equal rounds; '
                'set work = "equal"'
            )
        return self

    def why_masked(self) -> str:
        """Why a client's own update may not be seen, and what to set; empty where it may."""
        return ""

    def why_in_the_clear(self) -> str:
        """Why a sum over clients alone does not do, and what to set; empty where it does."""
        return ""

    def named_clients(self) -> Collection[str]:
        """The clients by whose names it goes, which are then those of every round; none where any do."""
        return ()

    def others_digits(self, client: str) -> npt.NDArray[np.float32] | None:
        """What stands in a client's digits where places are those of others, NaN in its own; None where all
        are everybody's."""
        return None

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate changes within a round."""
        return self.schedule != "constant" or self.schedule_warm_up > 0

    @property
    def equal_steps(self) -> bool:
        """Whether every client of a round takes the job's number of steps."""
        return self.steps is not None and self.work == "equal"

    @property
    def passes(self) -> int:
        """Passes over the silo's data a round, where no steps are given."""
        return self.epochs or 1

    def rate_share(self, step: int, steps: int, round: int = 1, rounds: int = 1) -> float:
        """The share of a round's learning rate at step `step`, from 1, of `steps`, in this round of so many.

        Warm-up: step / warm-up. Then, t of T steps later: linear 1 − (1 − floor) t/T, cosine
        floor + (1 − floor)(1 + cos πt/T)/2 (Loshchilov & Hutter 2017, equation 5). T are the steps behind the
        warm-up, so the step after the last would be at the floor.
        """
        if self.schedule_over == "job":
            step, steps = step + (round - 1) * steps, steps * rounds
        if step <= self.schedule_warm_up:
            return step / self.schedule_warm_up
        gone = (step - 1 - self.schedule_warm_up) / max(steps - self.schedule_warm_up, 1)
        if self.schedule == "linear":
            return 1 - (1 - self.schedule_floor) * gone
        if self.schedule == "cosine":
            return self.schedule_floor + (1 - self.schedule_floor) * (1 + math.cos(math.pi * gone)) / 2
        return 1.0

    def rate(self, round: int) -> float:
        """The learning rate of round `round`, from 1."""
        return self.learning_rate * self.learning_rate_decay ** (round - 1)

"""What every `[algorithm]` table says; an algorithm's own table adds its hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from roundtable.core.toml_tables import Finite, Table


class AlgorithmTable(Table):
    """`[algorithm]`: local training. The keys of one algorithm are in a subclass beside that algorithm."""

    hints: ClassVar[Mapping[str, str]] = {
        "optimizer": "silos train by SGD as this table says; a task may return its own from optimizer(); "
        "the server's is [aggregation.server_optimizer]",
        **{
            name: f'it is a server optimizer: [aggregation.server_optimizer] name = "{name}"'
            for name in ("fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedlion")
        },
    }

    name: str = Field("fedavg", description="built in, installed, or a file beside the job as file.py:Class")
    epochs: int | None = Field(
        None, ge=1, description="passes over the silo's data a round; default: 1 where no steps are given"
    )
    steps: int | None = Field(None, ge=1, description="instead of epochs: this many optimizer steps a round")
    batch_size: int = Field(32, ge=1, description="examples a step")
    learning_rate: Finite = Field(0.01, gt=0, description="of local SGD")
    momentum: Finite = Field(0.0, ge=0, lt=1, description="of local SGD")
    weight_decay: Finite = Field(0.0, ge=0, description="of local SGD")
    learning_rate_decay: Finite = Field(
        1.0, gt=0, le=1, description="the learning rate is multiplied by this each round"
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

    @property
    def passes(self) -> int:
        """Passes over the silo's data a round, where no steps are given."""
        return self.epochs or 1

    def rate(self, round: int) -> float:
        """The learning rate of round `round`, from 1."""
        return self.learning_rate * self.learning_rate_decay ** (round - 1)

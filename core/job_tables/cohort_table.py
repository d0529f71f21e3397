"""A job's `[cohort]`: who takes part in a round, how long it waits, and what becomes of one that fails."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from roundtable.core.toml_tables import Finite, Open, Seconds, Table


class CohortTable(Table):
    """`[cohort]`: who takes part in a round, and how long it waits."""

    size: int | None = Field(None, ge=1, description="clients a round; default: all that are available")
    minimum: int | None = Field(
        None,
        ge=0,
        description="updates without which a round fails; default: more than half. Under a secret draw "
        "that amplifies level client: silos that must be online before it",
    )
    over_selection: float = Field(
        1.0, ge=1.0, le=10.0, description="ask size × this many, go on when size have answered"
    )
    strategy: str = Field(
        "uniform",
        min_length=1,
        description="how clients are chosen: uniform, data_size, reliability, diversity, poisson, "
        "round_robin, power_of_choice, oort, an installed one, or file.py:function; accountants need uniform "
        "or poisson to amplify",
    )
    parameters: Open = Field(default_factory=dict, description="of a strategy that is not built in")
    probability: float | None = Field(
        None, gt=0.0, le=1.0, description="poisson: each client takes part with this probability"
    )
    label: str | None = Field(
        None, description="diversity: the declared metadata key to balance, for example region"
    )
    balance: Literal["value", "histogram", "directions"] = Field(
        "value",
        description='diversity: by what stands under label, or, where that is "0:120 1:34", by mixtures of '
        "labels, or, without a label, by where the clients' last updates pointed",
    )
    candidates: int | None = Field(
        None,
        ge=1,
        description="power_of_choice: clients drawn, of whom those with most loss are asked; "
        "default: 2 × size",
    )
    deadline: Seconds = Field(600.0, gt=0, description="time for a round's training and upload")
    deadline_percentile: Finite | None = Field(
        None,
        gt=0,
        le=1,
        description="a deadline that follows the cohort: deadline_slack × this quantile of what its clients' "
        "last updates took, at most deadline; whoever is slower is left out, and their data with them",
    )
    deadline_slack: Finite = Field(1.5, ge=1, description="deadline_percentile: the factor on the quantile")
    wait: Seconds = Field(
        30.0, ge=0, description="how long to wait for size clients before starting with fewer"
    )
    grace: Seconds = Field(
        30.0, ge=0, description="once minimum have answered: how long to wait for clients that are offline"
    )
    line: Seconds | None = Field(
        None,
        ge=0,
        description="how long a step may stand in line behind other work of its silo: time that its deadline "
        "does not count; default: as long as the deadline",
    )
    retries: int = Field(3, ge=0, description="new attempts of a failed round before on_failure")
    on_failure: Literal["pause", "skip"] = Field(
        "pause",
        description="a round that has failed so often: pause the job, or go on with the next round and the "
        "same model; skip is for jobs whose coordinator owes no guarantee",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CohortTable:
        if (self.strategy == "poisson") != (self.probability is not None):
            raise ValueError('probability belongs to strategy = "poisson", and is needed there')
        if self.strategy == "poisson" and (self.size is not None or self.over_selection != 1.0):
            raise ValueError(
                "poisson sampling draws the cohort's size itself: leave out size and over_selection"
            )
        declared = self.strategy == "diversity" and self.balance != "directions"
        if declared != (self.label is not None):
            raise ValueError(
                'label belongs to strategy = "diversity", and is needed there unless balance = "directions"'
            )
        if self.balance != "value" and self.strategy != "diversity":
            raise ValueError('balance belongs to strategy = "diversity"')
        if self.candidates is not None and self.strategy != "power_of_choice":
            raise ValueError('candidates belongs to strategy = "power_of_choice"')
        if self.candidates is not None and (self.size is None or self.candidates < self.size):
            raise ValueError(f"candidates = {self.candidates}: state a size, and at least so many candidates")
        if self.size is not None and self.minimum is not None and self.minimum > self.size:
            raise ValueError(
                f"minimum = {self.minimum} is above size = {self.size}: no round could ever succeed"
            )
        return self

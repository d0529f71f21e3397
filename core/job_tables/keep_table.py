"""`[keep]`: the rounds whose models stay, beside the newest."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from roundtable.core.toml_tables import Table


class KeepTable(Table):
    """`[keep]`: the rounds whose models stay, beside the newest."""

    best: bool | None = Field(
        None,
        description="keep the model that is best by stop.metric: it is what the job gives, however it ends; "
        "default: where stop.patience or stop.target may end it and the global model alone is measured",
    )
    every: int = Field(0, ge=0, description="keep the models of rounds K, 2K, 3K, ...; 0 keeps none of them")

    def settled(self, best: bool) -> Self:
        """With `best` as the answer of a job that does not say whether it keeps the best model."""
        if self.best is not None:
            return self
        kept = self.model_copy()
        # Not as a key that the job's file has set: with other settings the answer may be another one.
        object.__setattr__(kept, "best", best)
        return kept

    def rounds(self, number: int) -> bool:
        """Whether the model of this round is one of every so many."""
        return self.every > 0 and number % self.every == 0

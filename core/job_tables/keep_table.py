"""`[keep]`: the rounds whose models stay, beside the newest."""

from __future__ import annotations

from pydantic import Field

from roundtable.core.toml_tables import Table


class KeepTable(Table):
    """`[keep]`: the rounds whose models stay, beside the newest."""

    best: bool = Field(
        False,
        description="keep the model that is best by stop.metric: it is what the job gives, however it ends",
    )
    every: int = Field(0, ge=0, description="keep the models of rounds K, 2K, 3K, ...; 0 keeps none of them")

    def rounds(self, number: int) -> bool:
        """Whether the model of this round is one of every so many."""
        return self.every > 0 and number % self.every == 0

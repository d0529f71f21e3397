"""`[regions]`: whether relays add their silos' updates up, and how many rounds stay within their regions."""

from __future__ import annotations

from pydantic import Field, model_validator

from roundtable.core.toml_tables import Finite, Table


class RegionSumsTable(Table):
    """`[regions]`: what relays do with their silos' updates."""

    sum: bool = Field(
        False,
        description="relays add their silos' updates up and send sums; false: they hand on each update",
    )
    close: Finite = Field(
        0.8,
        gt=0,
        lt=1,
        description="share of the time to a round's deadline after which a relay waits for no more silos",
    )
    rounds: int = Field(
        1,
        ge=1,
        le=1000,
        description="every so many rounds the regions' models become one; between them each has its own",
    )

    @model_validator(mode="after")
    def _sums(self) -> RegionSumsTable:
        if self.rounds > 1 and not self.sum:
            raise ValueError("rounds above 1 need sum = true: it is a region's sum that goes up")
        return self

    def first(self, round: int) -> int:
        """The first of the rounds (from 1) that end with the next one that goes up: all regions begin it with
        one model."""
        return (round - 1) // self.rounds * self.rounds + 1

    def goes_up(self, done: int, rounds: int) -> int:
        """The round that goes up next after `done` of a job's `rounds`."""
        return min((done // self.rounds + 1) * self.rounds, rounds)

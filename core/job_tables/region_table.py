"""`[regions]`: whether relays add their silos' updates up."""

from __future__ import annotations

from pydantic import Field

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

"""The table `[transfer.choice]` of a job: how encodings of updates are chosen, where `up = "auto"`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from roundtable.core.encodings.assembly import canonical
from roundtable.core.toml_tables import Table, as_tuple

ChainText = Annotated[str, BeforeValidator(canonical), Field(max_length=200)]
"""The canonical text of a chain of encodings."""


Chains = Annotated[tuple[ChainText, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=16)]

LEAST_RATIO, MOST_RATIO = 0.01, 0.5


class MaxErrorTable(Table):
    """`[transfer.choice.max_error]`: the most that an encoding may lose, for each kind by its own measure."""

    biased: float = Field(
        0.2, gt=0, le=1, description="without error feedback: norm of what is lost, relative to the update's"
    )
    feedback: float = Field(
        2.0, gt=0, description="with it: norm of what a silo remembers, relative to its update's"
    )
    unbiased: float = Field(
        1.0, gt=0, description="error of the mean over a round's silos, relative to the update's norm"
    )


class ChoiceTable(Table):
    """`[transfer.choice]`: how the encoding of each silo's updates is chosen."""

    policy: Literal["time", "bandwidth"] = Field(
        "time",
        description="time: what makes the silo's round shortest under max_error; bandwidth: by thresholds "
        "of the measured line alone, whatever the error",
    )
    candidates: Chains = Field(
        ("float32", "int8", "int4(block=64)", "int4", "topk(ratio=0.05) | int8"),
        description="chains that policy time chooses from",
    )
    max_error: MaxErrorTable = Field(MaxErrorTable(), description="what the candidates may lose")
    gain: float = Field(
        0.1,
        gt=0,
        le=1,
        description="hysteresis: another encoding is taken if the silo's round gets shorter by this share, "
        "and a more exact one if it gets no longer than by half of it",
    )
    quantise_under: float = Field(
        1.25e6,
        gt=0,
        description="policy bandwidth: under so many bytes a second minmax with 16 bits, under a half of it "
        "8, under a quarter 4",
    )
    sparsify_over: float = Field(
        12.5e6,
        gt=0,
        description="policy bandwidth: over so many topk, whose ratio goes up by 1.1 to 0.5 after a transfer "
        "that was faster than before, and down by 0.9 to 0.01 after a slower one",
    )

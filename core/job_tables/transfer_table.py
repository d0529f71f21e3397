"""The table `[transfer]` of a job: the form in which vectors travel."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from roundtable.core.encodings.assembly import PACKING, canonical, get_encoding
from roundtable.core.encodings.encoding import Traits
from roundtable.core.encodings.feedback import Feedback
from roundtable.core.toml_tables import Table

ChainText = Annotated[str, BeforeValidator(canonical), Field(max_length=200)]
"""The canonical text of a chain of encodings."""


class TransferTable(Table):
    """`[transfer]`: the form in which vectors travel."""

    up: ChainText = Field(
        "float32",
        description='of updates: a chain of encodings, like "int4(block=256)" or "topk(ratio=0.05) | int8"',
    )
    down: ChainText = Field(
        "float32",
        description='of models: "float32" sends each whole, another chain what changed since a silo\'s own',
    )
    feedback: Literal["auto", "on", "off", "ef21"] = Field(
        "auto",
        description="error feedback: what an encoding dropped is added to the silo's next update; auto: for "
        "signs, top-k, low rank, and random-k that is not scaled; ef21: differences from what was sent "
        "before, for a cohort that stays the same",
    )
    momentum: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="of updates before they are added to what feedback remembers; for topk. Deep Gradient "
        "Compression has 0.9",
    )

    @model_validator(mode="after")
    def _can_feed_back(self) -> Self:
        if self.feedback == "on" and self.traits.rescaled:
            raise ValueError(
                f'feedback = "on" with up = {self.up!r}: values that are lengthened in the place of others '
                "would be taken off twice from what is remembered; leave rescale or feedback out"
            )
        if self.feedback == "ef21" and not (
            self.traits.error == "bounded" and self.traits.contractive(1 << 20)
        ):
            raise ValueError(
                f'feedback = "ef21" with up = {self.up!r}: it converges where each encoding comes nearer to '
                "what it encodes, and loses something; choose a top-k by ratio, sign or integers rounded to "
                "the nearest"
            )
        if self.momentum and not (self.memory.way == "error" and self.traits.support == "own"):
            raise ValueError(
                f"momentum = {self.momentum} with up = {self.up!r} and feedback = {self.feedback!r}: it is "
                "forgotten where values were sent, so it needs values that are not, and feedback: use topk"
            )
        if self.feedback == "on" and self.traits.lengthens(1 << 20) > 2.0:
            raise ValueError(
                f'feedback = "on" with up = {self.up!r}: it may be longer than what it encodes, so what is '
                "remembered would grow; use randomk(..., scaled=false), or leave feedback out"
            )
        return self

    @property
    def traits(self) -> Traits:
        """What the encoding of updates says of itself."""
        return get_encoding(self.up).traits

    @property
    def unpacked(self) -> str:
        """The chain of updates without a stage that packs its bytes: what becomes of values."""
        return self.up.partition(f" | {PACKING}")[0]

    @property
    def remembers(self) -> bool:
        """Whether silos remember something of what they have sent."""
        return self.memory.way != "off"

    @property
    def memory(self) -> Feedback:
        """What silos remember of what they have sent, and how."""
        if self.feedback == "ef21":
            return Feedback("ef21")
        on = self.feedback == "on" or (self.feedback == "auto" and self.traits.feedback)
        return Feedback("error" if on else "off", self.momentum)

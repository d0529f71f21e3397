"""The table `[transfer]` of a job: the form in which vectors travel."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from roundtable.core.encodings.assembly import PACKING, built_in, canonical, foreign_stages, get_encoding
from roundtable.core.encodings.composed.fragments import STAGE, written_before
from roundtable.core.encodings.encoding import Traits
from roundtable.core.encodings.feedback import MEMORY, Feedback
from roundtable.core.errors import EncodingError
from roundtable.core.job_tables.choice_table import LEAST_RATIO, MOST_RATIO, ChainText, ChoiceTable
from roundtable.core.toml_tables import Table

AUTO = "auto"
_MANY = 1 << 20
_BY_BANDWIDTH = ("float32", "minmax(bits=16)", "minmax(bits=8)", "minmax(bits=4)", "topk(ratio=0.1)")
_SPARSE = re.compile(r"topk\(ratio=(0\.[0-9]{1,4})\)")


def _chain_or_auto(text: object) -> object:
    return AUTO if text == AUTO else canonical(text)


class TransferTable(Table):
    """`[transfer]`: the form in which vectors travel."""

    up: Annotated[str, BeforeValidator(_chain_or_auto), Field(max_length=200)] = Field(
        "float32",
        description='of updates: a chain of encodings, like "int4(block=256)" or "topk(ratio=0.05) | int8"; '
        '"auto": for each silo what [transfer.choice] says',
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
    choice: ChoiceTable = Field(ChoiceTable(), description='how encodings are chosen where up = "auto"')

    @model_validator(mode="after")
    def _can_feed_back(self) -> Self:
        if self.automatic and (self.feedback == "ef21" or self.momentum):
            raise ValueError(
                'up = "auto" with feedback = "ef21" or momentum: what a silo keeps for them belongs to one '
                "encoding; name it, or leave them out"
            )
        for chain in self.chains:
            # Code of others is asked once it may run: engine/validation/transfer_composition.py.
            if not foreign_stages(chain) and (objection := self.objection(chain, get_encoding(chain).traits)):
                raise ValueError(objection)
        return self

    def objection(self, chain: str, traits: Traits) -> str:
        """Why this encoding of updates, which says this of itself, does not go with `feedback` or `momentum`;
        "" where it does."""
        if self.feedback == "on" and traits.error == "exact" and not self.automatic:
            return (
                f'feedback = "on" with up = {chain!r}: it loses nothing that could be remembered; leave '
                "feedback out, or name an encoding that does"
            )
        if self.feedback == "on" and traits.rescaled:
            return (
                f'feedback = "on" with up = {chain!r}: values that are lengthened in the place of '
                "others would be taken off twice from what is remembered; leave rescale or feedback out"
            )
        if self.feedback == "ef21" and not (traits.error == "bounded" and traits.contractive(_MANY)):
            return (
                f'feedback = "ef21" with up = {chain!r}: it converges where each encoding comes nearer to '
                "what it encodes, and loses something; choose a top-k by ratio, sign or integers rounded to "
                "the nearest"
            )
        if self.momentum and not (self.memory.way == "error" and traits.support == "own"):
            return (
                f"momentum = {self.momentum} with up = {chain!r} and feedback = {self.feedback!r}: it is "
                "forgotten where values were sent, so it needs values that are not, and feedback: use topk"
            )
        if self.feeds(chain) and traits.lengthens(_MANY) > 2.0:
            return (
                f"error feedback with up = {chain!r}: it may be longer than what it encodes (`lengthens`), "
                "so what is remembered would grow; use randomk(..., scaled=false), or leave feedback out"
            )
        return ""

    @model_validator(mode="after")
    def _can_begin(self) -> Self:
        for chain in self.choice.candidates if self.automatic else ():
            if foreign := foreign_stages(chain):
                raise ValueError(
                    f"choice.candidates: {foreign[0]!r} is code of others, which does not run before each "
                    "party has approved it, and what may be chosen at first follows from what candidates "
                    "state of themselves: name it as up, or leave it out"
                )
            try:
                get_encoding(chain).size_bound(_MANY)
            except EncodingError as error:
                raise ValueError(
                    f"choice.candidates: {chain!r} cannot be tried on a sample: {error}"
                ) from error
        if self.automatic and self.choice.policy == "time" and not self.safe:
            raise ValueError(
                'up = "auto": before anything is measured a candidate is needed whose stated bound keeps '
                "choice.max_error, such as int8 or float32"
            )
        return self

    def behind(self, stage: str, algorithm: str) -> Self:
        """The table with the algorithm's own stage, if it has one, before the encodings of both ways, in the
        place of one that is there. ValueError where that cannot be."""
        ways = {"up": self.up, "down": self.down}
        if not stage:
            for way, chain in ways.items():
                if chain.startswith(STAGE):
                    raise ValueError(
                        f"transfer.{way} = {chain!r}: {STAGE} is written there by the algorithm that sends a "
                        f'model in fragments, [algorithm] name = "streaming", and not by {algorithm!r}'
                    )
            return self
        written = {way: written_before(stage, each) for way, each in ways.items() if each != AUTO}
        return self.model_copy(update={way: canonical(chain) for way, chain in written.items()})

    @property
    def automatic(self) -> bool:
        """Whether encodings are chosen for each silo."""
        return self.up == AUTO

    @property
    def chains(self) -> tuple[str, ...]:
        """The encodings that updates may have; of ratios that are chosen one stands for all."""
        if not self.automatic:
            return (self.up,)
        return self.choice.candidates if self.choice.policy == "time" else _BY_BANDWIDTH

    def allows(self, chain: str) -> bool:
        """Whether a silo may be told to encode its update so."""
        if chain in self.chains:
            return True
        ratio = _SPARSE.fullmatch(chain) if self.automatic and self.choice.policy == "bandwidth" else None
        return ratio is not None and LEAST_RATIO <= float(ratio[1]) <= MOST_RATIO

    @property
    def safe(self) -> tuple[str, ...]:
        """The candidates whose stated bounds keep `max_error`, the shortest first."""
        keeping = [chain for chain in self.choice.candidates if self._keeps_bound(chain)]
        return tuple(sorted(keeping, key=lambda chain: get_encoding(chain).size_bound(_MANY)))

    def _keeps_bound(self, chain: str) -> bool:
        traits, most = get_encoding(chain).traits, self.choice.max_error
        if traits.error == "exact":
            return True
        return traits.error != "unbiased" and not self.feeds(chain) and traits.worst(_MANY) <= most.biased

    @property
    def foreign(self) -> list[str]:
        """The encodings of others that the job names."""
        return [name for chain in (*self.chains, self.down) for name in foreign_stages(chain)]

    def feeds(self, chain: str) -> bool:
        """Whether silos remember what this encoding of updates dropped; what code of others states of itself
        has no say in that."""
        if self.feedback == "auto":
            return get_encoding(built_in(chain)).traits.feedback
        return self.feedback == "on"

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
        """What silos remember of what they have sent, and how; where encodings are chosen, at most."""
        if self.feedback == "ef21":
            return Feedback("ef21")
        return Feedback("error" if any(map(self.feeds, self.chains)) else "off", self.momentum)

    def kept_of(self, chain: str, remembered: dict[str, Tensor]) -> dict[str, Tensor]:
        """What stays after an update of this chain: what was dropped only where the chain feeds back."""
        if not self.automatic or self.feeds(chain):
            return remembered
        return {name: tensor for name, tensor in remembered.items() if name != MEMORY}

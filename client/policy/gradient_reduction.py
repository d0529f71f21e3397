"""How the gradients of a cluster's ranks travel: `reduction` in `[cluster.strategy]`, parsed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from pydantic import Field

from roundtable.core.encodings.assembly import foreign_stages, get_encoding, parameters
from roundtable.core.encodings.chain import parse_chain
from roundtable.core.encodings.encoding import Encoding
from roundtable.core.errors import EncodingError
from roundtable.core.toml_tables import Table

Kind = Literal["exact", "bfloat16", "powersgd", "encoding"]
_PLAIN: dict[str, Kind] = {"exact": "exact", "bfloat16": "bfloat16", "powersgd": "powersgd"}
_SAMPLE = 1 << 16


class FactorsTable(Table):
    """Parameters of powersgd."""

    rank: int = Field(4, ge=1, le=1024, description="columns of each factor")


@dataclass(frozen=True)
class GradientReduction:
    """How gradients travel: `exact`; in `bfloat16`; as factors of `rank` (powersgd); or each rank's own,
    written by an `encoding` of [transfer].

    `text` is what a person wrote, in its canonical form.
    """

    text: str
    kind: Kind
    rank: int = 0
    encoding: Encoding | None = None

    @property
    def keeps(self) -> bool:
        """Whether what was not sent is kept, and added to the next step's (error feedback)."""
        return self.kind == "powersgd" or (self.encoding is not None and self.encoding.traits.feedback)

    @cached_property
    def share(self) -> float:
        """Bytes that one rank sends of a gradient, over those of the gradient; measured on normal values.

        Not of factors, whose share depends on a matrix's shape.
        """
        if self.encoding is None:
            return 0.5 if self.kind == "bfloat16" else 1.0
        values = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(1))
        return sum(len(part) for part in self.encoding.encode(values)) / values.nbytes


@lru_cache(maxsize=64)
def parse_reduction(text: str) -> GradientReduction:
    """ValueError that says what is wrong with it."""
    stages = parse_chain(text)
    canonical = " | ".join(str(stage) for stage in stages)
    first = stages[0]
    try:
        if first.name in _PLAIN:
            if len(stages) > 1:
                raise ValueError(f"nothing can follow {first.name}, and {stages[1].name} does")
            rank = 0
            if first.name == "powersgd":
                table = parameters(first, FactorsTable)
                assert isinstance(table, FactorsTable)
                rank = table.rank
            elif first.given:
                raise ValueError(f"{first.name} takes no parameters")
            return GradientReduction(canonical, _PLAIN[first.name], rank)
        if first.name == "float32":
            raise ValueError("float32 is 'exact' here")
        if foreign := foreign_stages(canonical):
            raise ValueError(
                f"{foreign[0]!r} is code of others, which [encodings] approves for updates: gradients travel "
                "between ranks in what is built in"
            )
        encoding = get_encoding(canonical)
        if encoding.keeps:
            raise ValueError(f"{canonical} keeps a memory of its own from update to update")
        # What wants to know where tensors begin does not go here: each parameter is encoded by itself.
        for _ in encoding.encode(torch.ones(8)):
            pass
        return GradientReduction(canonical, "encoding", encoding=encoding)
    except EncodingError as error:
        raise ValueError(f"{error}; beside these there are exact and powersgd(rank=4)") from error


def canonical_reduction(text: str) -> str:
    """The text as it is compared; ValueError as `parse_reduction`."""
    return parse_reduction(text).text

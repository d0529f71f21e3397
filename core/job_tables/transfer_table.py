"""The table `[transfer]` of a job: the form in which vectors travel."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from roundtable.core.encodings.assembly import canonical
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

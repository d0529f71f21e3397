"""`[model]`: which of a model's tensors travel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roundtable.core.layout import LayoutRules
from roundtable.core.toml_tables import Names, Table

Whither = Literal["average", "local", "drop"]


class ModelTable(Table):
    """`[model]`: which tensors travel."""

    travel: Literal["trainable", "all"] = Field(
        "trainable",
        description="whether parameters travel that the task's model has frozen (requires_grad = False); "
        "those that do not are made by every party itself, and checked before training",
    )
    only: Names = Field(
        (), description='patterns of tensor names, such as "*lora_*": nothing else travels; default: all'
    )
    buffers: Whither = Field("average", description="floating-point buffers such as BatchNorm statistics")
    integers: Whither = Field("local", description="integer and boolean tensors such as BatchNorm's counter")
    local: Names = Field((), description="patterns of tensor names that never leave the silo (FedPer, FedBN)")
    drop: Names = Field((), description="patterns of tensor names that are neither sent nor stored")

    def rules(self) -> LayoutRules:
        """The table as the layout takes it."""
        return LayoutRules(self.buffers, self.integers, self.local, self.drop, self.travel, self.only)

    @property
    def may_stay(self) -> bool:
        """Whether floating-point tensors may stay at a silo as a part of its model."""
        return self.buffers == "local" or bool(self.local)

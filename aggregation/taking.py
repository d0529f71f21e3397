"""How a rule's vector leaves the aggregation: whole, or block by block to whoever goes on with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from roundtable.aggregation.conditions import NotFinite
from roundtable.aggregation.registry import RuleResult
from roundtable.aggregation.rows.file_matrix import ROW_COLUMNS
from roundtable.aggregation.rows.matrix import block_ranges
from roundtable.aggregation.rows.reductions import is_finite
from roundtable.aggregation.rows.row_passes import ColumnPass
from roundtable.core.errors import AggregationError


class ColumnSink(Protocol):
    """Takes a vector [d] block by block, in the order of the columns."""

    def begin(self) -> None:
        """The vector begins, or begins anew: what was taken before counts no more."""

    def take(self, start: int, values: torch.Tensor) -> None:
        """Takes the values from column `start` on. They are the sink's, but not to be written to."""


def blocks_of(vector: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first column, values) of successive blocks of a vector in memory, or of a mapped one."""
    for start, stop in block_ranges(len(vector), ROW_COLUMNS):
        yield start, vector[start:stop]


class Taking:
    """Hands a rule's vector on: into `out` where given, to a sink, or as it is; all of it is finite."""

    def __init__(self, device: torch.device, out: torch.Tensor | None, sink: ColumnSink | None) -> None:
        """`device` is where the updates lie, wherever they are worked on."""
        self._device = device
        self._out = out
        self._sink = sink

    def all_of(self, result: RuleResult, rule: str, trusting: bool) -> torch.Tensor:
        """The vector, empty where the sink has it.

        NotFinite for one that is not finite where updates are trusted, AggregationError where they were
        looked at: then values are too large. A sink has taken a part by then.
        """
        finite = True
        if self._sink is None:
            vector = result.vector if self._out is None else self._out.copy_(result.vector)
            vector, finite = vector.to(self._device), is_finite(result.vector)
        else:
            vector = torch.empty(0)
            self._sink.begin()
            # To its end: a pass tells at last whether what it has read is what was sent.
            made = result.made
            for start, values in made.blocks() if isinstance(made, ColumnPass) else blocks_of(made):
                finite = finite and is_finite(values)
                if finite:
                    self._sink.take(start, values.to(self._device))
        if finite:
            return vector
        if trusting:
            raise NotFinite
        raise AggregationError(
            f"the result of rule {rule!r} is not finite although every update is: values are too large to "
            "add; set max_norm, or put clip in front of the rule"
        )

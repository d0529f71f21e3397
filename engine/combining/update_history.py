"""What clients have sent over all rounds, added up: rules that compare pasts look at it (FoolsGold)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from roundtable.engine.combining.received import Rows
from roundtable.engine.messages import Update


def sums_with(past: Mapping[str, Tensor], rows: Rows) -> Tensor:
    """The sum of each client's updates, this round's included: float32 [n, d], in the order of the rows.

    A client whose sum has grown beyond float32 begins anew with this round's update: it can spoil its own
    past, not the round.
    """
    sums = torch.empty(rows.matrix.rows, rows.matrix.columns)
    for start, stop, values in rows.matrix.blocks():
        sums[:, start:stop] = values
    for row, update in zip(sums, rows.updates, strict=True):
        if update.client not in past:
            continue
        total = row + past[update.client]
        if bool(torch.isfinite(total).all()):
            row.copy_(total)
    return sums


def remembered(
    past: Mapping[str, Tensor], sums: Tensor, updates: Sequence[Update], used: Sequence[str]
) -> Mapping[str, Tensor]:
    """The sums to go on with; of clients whose update was left out in this round, as they were."""
    rows = {update.client: row for update, row in zip(updates, sums, strict=True)}
    return {**past, **{client: rows[client] for client in used}}

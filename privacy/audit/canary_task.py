"""A task of which every update is known: one weight for each unit, which that unit alone wants to raise.

A unit is a silo, or at level `example` a record. Its gradient is a constant in its own weight and far longer
than the clip norm, so that what it sends is C in a direction that no other unit shares. The weights that
nobody wants anything of end up with the noise and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.task import Site, Task

# A clip norm that adapts to updates all of which it clips grows by e^(1/10) a round: this many are enough.
_TIMES_THE_CLIP_NORM = 256.0


class CanaryTask(Task):
    """`units` weights with an owner, `free` ones without; weight 0 is for whoever has none.

    A client owns the weight of its number; with `examples` each client has so many records instead, which
    own the weights from 1 on. A silo's number is `canary` of its `[data]`, a simulated client's its index.
    """

    def __init__(self, units: int, free: int, clip_norm: float, examples: int = 0) -> None:
        self.units = units
        self.free = free
        self.slope = _TIMES_THE_CLIP_NORM * clip_norm
        self.examples = examples

    @override
    def model(self) -> nn.Module:
        table = nn.Embedding(1 + self.units + self.free, 1, padding_idx=0)
        nn.init.zeros_(table.weight)
        return table

    @override
    def data(self, site: Site) -> Any:
        number = int(site.options.get("canary", site.index))
        owned = torch.arange(1, self.examples + 1) if self.examples else torch.tensor([number + 1])
        return (torch.where(owned <= self.units, owned, 0),), None

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        weights: Tensor = model(batch[0])
        return -self.slope * weights.mean()

"""What a simulated run goes on from after an interruption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roundtable.core.models import Model
from roundtable.engine import ServerState

LocalState = Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A run's state at the commit of a round, before the engine knows of it.

    `local` holds the clients' own tensors: of those whose updates the round has used when a checkpoint is
    written, and of all when one is resumed from. `earlier` are the vectors of older models that clients are
    still at work on, by the rounds that made them.
    """

    now: float
    engine: Mapping[str, Any]
    model: Model
    server: ServerState
    local: Mapping[int, LocalState]
    earlier: Mapping[int, Tensor] = field(default_factory=dict)

"""What a round's updates come to before the server optimizer, and the account of how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roundtable.engine.combining.server_state import ServerState


@dataclass(frozen=True)
class RoundAccount:
    """What a round's record says of how its model was made.

    `excluded` maps a client to the reason why its update was left out; `charge` is the cost in privacy;
    `training` are metrics as (sum, count) that no single update tells, `before` those of the model that the
    round began with. `directions` are sketches of the updates, where the job chooses by them.
    """

    excluded: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    charge: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    before: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    directions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundDelta:
    """What the server optimizer is given [d]; `state` is the next round's without the optimizer's own."""

    vector: Tensor
    state: ServerState
    account: RoundAccount

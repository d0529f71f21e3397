"""What silos give in masked rounds under chaos, and the model that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from chaos_silo import EXAMPLES, LOSS
from unvarying import unvaried

from roundtable.core import JobConfig
from roundtable.core.seeds import torch_generator
from roundtable.engine.combining.combine import combine
from roundtable.engine.combining.received import Mean
from roundtable.engine.combining.server_state import ServerState
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import SecureRound


def delta_of(round: int, name: str, columns: int) -> torch.Tensor:
    """What this silo gives in this round."""
    return torch.randn(columns, generator=torch_generator(1, round, name, "chaos")) / columns**0.5


def model_of_sum(
    job: JobConfig,
    plan: Plan,
    round: int,
    cohort: int,
    present: Sequence[str],
    before: torch.Tensor,
    age: int = 0,
) -> torch.Tensor:
    """The model that a round makes of the vectors of those present, without any masks.

    `age` is how many models ago they were asked for them.
    """
    secure = SecureRound.of(job, len(before), cohort, round)
    total = None
    for name in present:
        with unvaried(name):
            source = secure.encode(delta_of(round - age, name, len(before)).numpy(), EXAMPLES, LOSS)
            ring = source.block(0, secure.length)
        total = ring if total is None else total + ring
    assert total is not None
    mean = Mean.of_secure_sum(secure.decode(total, len(present), cohort)).of_age(age)
    return combine(plan, mean, before, ServerState(), round=round, seed=job.seed).vector

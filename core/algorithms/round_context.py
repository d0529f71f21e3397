"""What a hook or a task's method is told about where and when it runs, if it asks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from roundtable.core.seeds import derive_seed, torch_generator


@dataclass(frozen=True)
class Context:
    """One client's round.

    `steps` it will take, None where only iterating would tell; `device` that it trains on.
    `learning_rate` is the job's, before its decay over rounds, which is applied to any optimizer. `seed` and
    `generator` give the stream of the job's seed that is this client's in this round, for a named purpose.
    """

    job: str
    round: int
    site: str
    steps: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    job_seed: int = 0
    learning_rate: float = 0.0

    def seed(self, purpose: str) -> int:
        """63 bits; another purpose has another, independent one."""
        return derive_seed(self.job_seed, self.round, self.site, "own", purpose)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of random numbers for this purpose, on CPU."""
        return torch_generator(self.job_seed, self.round, self.site, "own", purpose)


@dataclass(frozen=True)
class OuterStep:
    """The server's step of a round, x ← x + rate (Δ + momentum m) with m ← momentum m + Δ, and the `share` of
    one client's update in Δ."""

    rate: float
    momentum: float
    share: float

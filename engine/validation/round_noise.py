"""The noise of a job's rounds: who adds it, what a round costs, and whose account pays.

One class for each way; code that treats them differently matches on the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roundtable.privacy import CentralDP, Charge, MatrixMechanism, local_gaussian_charge, sums_charge


@dataclass(frozen=True)
class NoiseElsewhere:
    """The rounds add none: there is no privacy, or each silo hides its records while it trains."""


@dataclass(frozen=True)
class FreshNoise:
    """The coordinator adds independent noise to each round's sum (level `client`).

    `charge` is what one round costs, `sampling` why, in words.
    """

    mechanism: CentralDP
    charge: Charge
    sampling: str

    @property
    def noise_multiplier(self) -> float:
        """As the job file states it: σ over the clip norm."""
        return self.mechanism.noise_multiplier

    @property
    def settled(self) -> Mapping[str, Any]:
        """Keys of `[privacy]` with which the job has the same noise for ever."""
        return {"noise_multiplier": self.noise_multiplier}

    def at(self, clip_norm: float | None) -> CentralDP:
        """The mechanism with the clip norm that adaptive clipping has reached; None for where it starts."""
        adaptive = self.mechanism.adaptive
        if adaptive is None or clip_norm is None:
            return self.mechanism
        return replace(self.mechanism, adaptive=replace(adaptive, clip_norm=clip_norm))


@dataclass(frozen=True)
class CorrelatedRounds:
    """The coordinator adds noise that is correlated over rounds (level `dp_ftrl`).

    What a round costs depends on its number. `sampling` says in words how a draw amplifies; "" if none does.
    """

    mechanism: CentralDP
    ftrl: MatrixMechanism
    sampling: str

    @property
    def noise_multiplier(self) -> float:
        """As the job file states it: over the clip norm and the sensitivity of the whole run."""
        return self.ftrl.noise_multiplier

    @property
    def settled(self) -> Mapping[str, Any]:
        """Keys of `[privacy]` with which the job has the same noise for ever: an optimiser of another version
        would end elsewhere, and the rounds before and after would not be those of one C."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "separation": self.ftrl.separation,
            "bands": None,
            "buffers": None,
            **self.ftrl.factorisation.keys,
        }


@dataclass(frozen=True)
class SiloNoise:
    """Each silo adds all of the noise that hides its update (level `client_local`), or `of_sums` a record in
    the sums that are its update (level `example`): `sums` has what each round of those costs."""

    noise_multiplier: float
    sums: tuple[Charge, ...] = ()

    def charge(self, round: int) -> Charge:
        """What a round (from 1) costs each silo that answers it."""
        return self.sums[round - 1] if self.sums else local_gaussian_charge(self.noise_multiplier)

    @property
    def least(self) -> Charge:
        """What the job costs each silo before there is any model: a round, or of sums all of them."""
        return sums_charge(self.noise_multiplier) if self.sums else self.charge(1)


@dataclass(frozen=True)
class NoiseInShares:
    """Each silo adds a share, and the sum has enough (level `distributed`); `charge` is one round's."""

    charge: Charge


CentralNoise = FreshNoise | CorrelatedRounds
RoundNoise = NoiseElsewhere | FreshNoise | CorrelatedRounds | SiloNoise | NoiseInShares

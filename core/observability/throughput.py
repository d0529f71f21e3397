"""How fast a round trained on tokens, at how many bytes, and how much of its time went into transfers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = "tokens"
"""The training metric whose sum is the tokens trained on in a round, and whose count the examples."""


@dataclass(frozen=True)
class Throughput:
    """Of one round; None for what is not known.

    tokens: trained on by the silos whose updates count. per_second: over the whole round, evaluation and
    waiting with it; in a simulation virtual seconds, none where the round took none. bytes_per_token: of
    updates up and models down. communication: the mean share of the round's time, from 0 to 1, that a silo's
    transfers took.
    """

    tokens: int | None = None
    per_second: float | None = None
    bytes_per_token: float | None = None
    communication: float | None = None

    @classmethod
    def of(
        cls,
        training: Mapping[str, Any],
        transfers: Mapping[str, Mapping[str, Any]],
        contributors: Collection[str],
        seconds: float,
    ) -> Throughput:
        """`training` are a round's (sum, count) by name, `transfers` what `TransferFigures.known` gave.

        Bytes and shares are known only where each silo of `contributors` tells its own: a sum over some would
        read as one over all.
        """
        told = [transfers.get(name, {}) for name in contributors]
        # A silo may say anything; fewer than one are none.
        said = training.get(TOKENS, (0, 0))[0]
        tokens = int(said) if said >= 1 else None
        moved = [_bytes(each) for each in told]
        shares = [_seconds(each) for each in told]
        known_bytes = bool(told) and None not in moved
        known_seconds = bool(told) and None not in shares and seconds > 0
        return cls(
            tokens=tokens,
            per_second=tokens / seconds if tokens and seconds > 0 else None,
            bytes_per_token=sum(filter(None, moved)) / tokens if tokens and known_bytes else None,
            communication=sum(filter(None, shares)) / len(shares) / seconds if known_seconds else None,
        )

    def figures(self) -> dict[str, int | float]:
        """What is known, under the names of a history's columns."""
        named = {
            "tokens": self.tokens,
            "tokens_per_second": self.per_second,
            "bytes_per_token": self.bytes_per_token,
            "communication": self.communication,
        }
        return {name: value for name, value in named.items() if value is not None}


def _bytes(transfer: Mapping[str, Any]) -> int | None:
    return transfer["up"] + transfer["down"] if "up" in transfer and "down" in transfer else None


def _seconds(transfer: Mapping[str, Any]) -> float | None:
    """Both ways; a model that was not sent took no time."""
    down = transfer.get("down_seconds", None if transfer.get("down", 1) else 0.0)
    up = transfer.get("up_seconds")
    return None if up is None or down is None else float(up + down)

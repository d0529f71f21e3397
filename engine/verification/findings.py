"""What an auditor finds out about a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["verified", "refuted", "unproven"]


@dataclass(frozen=True)
class Findings:
    """What contradicts what was signed, and what nothing shows either way."""

    refuted: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    def __add__(self, other: Findings) -> Findings:
        return Findings(self.refuted + other.refuted, self.unproven + other.unproven)

    @property
    def verdict(self) -> Verdict:
        """`verified` where there is nothing of either."""
        return "refuted" if self.refuted else "unproven" if self.unproven else "verified"


@dataclass(frozen=True)
class RoundVerdict:
    """A round of which so many updates were combined, its model's digest, and what was found."""

    round: int
    attempt: int
    model: str
    updates: int
    findings: Findings

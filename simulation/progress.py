"""What a simulation says while it runs: plain values for a progress bar or a log."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roundtable.engine.messages import Note, RoundRecord


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    kind: "clients" when `done` of `total` clients of a phase have answered, "round" when a round is
    committed (with its `record`), "note" for a sentence worth showing (with its `note`).
    seconds_left: an estimate for the whole run from the rounds done so far; None before the first.
    memory: the largest resident memory of this process so far, in bytes.
    """

    kind: Literal["clients", "round", "note"]
    round: int
    rounds: int
    phase: str = ""
    done: int = 0
    total: int = 0
    record: RoundRecord | None = None
    note: Note | None = None
    seconds_left: float | None = None
    memory: int = 0


Report = Callable[[Progress], None]


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

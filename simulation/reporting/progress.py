"""What a simulation says while it runs: plain values for a progress bar or a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roundtable.core.models import Model
from roundtable.engine.messages import Note, RoundRecord
from roundtable.simulation.reporting.usage import Usage


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    kind: "clients" when `done` of `total` clients of a phase have answered, "round" when a round is
    committed (with its `record` and its `model`), "note" for a sentence worth showing (with its `note`).
    seconds_left: an estimate for the whole run from the rounds done so far; None before the first.
    usage: memory, cores and GPU memory in use, at the end of a round.
    """

    kind: Literal["clients", "round", "note"]
    round: int
    rounds: int
    phase: str = ""
    done: int = 0
    total: int = 0
    record: RoundRecord | None = None
    model: Model | None = None
    note: Note | None = None
    seconds_left: float | None = None
    usage: Usage | None = None


Report = Callable[[Progress], None]

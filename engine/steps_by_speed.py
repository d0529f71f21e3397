"""How many steps a client takes in a round where its speed says so (`[algorithm] work = "by_speed"`).

A pace is seconds per step as the engine saw them: from the instruction to the update's arrival, transfer
included, over the steps that were assigned. In a simulation those seconds are the device's.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

_MEMORY = 0.5
"""Weight of what was known of a pace, beside what is seen."""


def steps_by_pace(paces: Mapping[str, float | None], most: int) -> dict[str, int]:
    """K_i = `most` · s/s_i, between 1 and `most`; s is the lower median of the paces s_i that are known.

    So the faster half takes all steps, and the slower about as long as the median. Who is not known yet takes
    all.
    """
    known = [pace for pace in paces.values() if pace is not None]
    usual = median_low(known) if known else 0.0
    return {name: _share(pace, usual, most) for name, pace in paces.items()}


def _share(pace: float | None, usual: float, most: int) -> int:
    if pace is None or pace <= usual:
        return most
    return max(1, round(most * usual / pace))


def pace_seen(known: float | None, seconds: float, steps: int) -> float:
    """What is known of a pace after `steps` that took so many seconds."""
    seen = max(0.0, seconds) / steps
    return seen if known is None else _MEMORY * known + (1 - _MEMORY) * seen


def pace_missed(known: float | None, seconds: float, steps: int) -> float:
    """What is known after `steps` were not done in so many seconds: at least that slow."""
    return max(known or 0.0, max(0.0, seconds) / steps)

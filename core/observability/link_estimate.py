"""What has been measured of the line to a silo, both ways, and of its encoding: over an exponential window.

A transfer weighs by how much it tells. One shorter than SHORT is all start-up and round trips, so it tells
nothing and changes nothing; one of ENOUGH bytes or TELLING seconds weighs 1, and takes a quarter of their
weight from those before. Rates are averaged by their logarithms: a line that stood still once, or a model
that came from a cache, moves the estimate by a step and not to where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from roundtable.core.observability.transfer_figures import TransferFigures

SHORT = 1 << 16
ENOUGH, TELLING = 4 << 20, 1.0
FORGOTTEN = 0.25
_LEAST_SECONDS = 1e-6


@dataclass(frozen=True)
class Rate:
    """An amount a second; 0 with `weight` 0 as long as nothing was measured."""

    value: float = 0.0
    weight: float = 0.0

    def after(self, amount: float, seconds: float | None) -> Rate:
        """The rate once `amount` took so many seconds; unchanged where that tells nothing."""
        if seconds is None or amount < SHORT:
            return self
        seconds = max(seconds, _LEAST_SECONDS)
        return self._with(amount / seconds, min(1.0, max(amount / ENOUGH, seconds / TELLING)))

    def after_value(self, value: float) -> Rate:
        """The same of something that is measured as it is, and always tells."""
        return self._with(max(value, _LEAST_SECONDS), 1.0)

    def _with(self, value: float, tells: float) -> Rate:
        kept = self.weight * (1.0 - FORGOTTEN * tells)
        if not kept:
            return Rate(value, tells)
        logarithm = (kept * math.log(self.value) + tells * math.log(value)) / (kept + tells)
        return Rate(math.exp(logarithm), kept + tells)


@dataclass(frozen=True)
class LinkEstimate:
    """Bytes a second up and down, float32 bytes encoded a second, and the seconds of a round trip.

    A round trip is both ways together: without clocks that agree, neither can be told alone.
    """

    up: Rate = field(default_factory=Rate)
    down: Rate = field(default_factory=Rate)
    encoding: Rate = field(default_factory=Rate)
    round_trip: Rate = field(default_factory=Rate)

    def after(self, figures: TransferFigures) -> LinkEstimate:
        """The estimate once an update has arrived."""
        return LinkEstimate(
            self.up.after(figures.up, figures.up_seconds),
            self.down.after(figures.down, figures.down_seconds),
            self.encoding.after(figures.up_plain, figures.encoding_seconds),
            self.round_trip,
        )

    def after_round_trip(self, seconds: float) -> LinkEstimate:
        """The estimate once an answer that takes no work has come so many seconds after the question."""
        return LinkEstimate(self.up, self.down, self.encoding, self.round_trip.after_value(seconds))

    def plain(self) -> dict[str, Any]:
        """A JSON-able form."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LinkEstimate:
        """The estimate that `plain` described."""
        return cls(**{name: Rate(**rate) for name, rate in plain.items()})


UNKNOWN_LINK = LinkEstimate()

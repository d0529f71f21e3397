"""Which round has made the best model so far, by the metric of `[stop]`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from roundtable.core.job_tables.stop_table import StopTable, larger_is_better
from roundtable.core.measures.columns import CENTRAL
from roundtable.core.observability.metric_sums import mean
from roundtable.engine.messages import RoundRecord
from roundtable.engine.metrics import of_model


@dataclass(frozen=True)
class Best:
    """The best model: that of `round` (0: the one that the job began with), `value` of `stop.metric`.

    `clients` is how many measured it; 0 where their sum alone is known, and where the server did.
    """

    round: int
    value: float
    clients: int = 0

    def told(self, metric: str) -> str:
        """In words."""
        by = f", measured by {self.clients} client{'s' if self.clients > 1 else ''}" if self.clients else ""
        return f"the best model is that of round {self.round}: {metric} {self.value:.4g}{by}"


def best_after(best: Best | None, record: RoundRecord, stop: StopTable) -> Best | None:
    """The best model once this round is committed too.

    Only what was measured of a whole model counts, after its round or before the next; of equal ones the
    earlier is the best, and what is not finite is never it. `stop.minimum_improvement` is about patience
    alone.
    """
    found = _measured(record, stop.metric or "")
    if found is None or not isfinite(found.value):
        return best
    sign = 1.0 if larger_is_better(stop.metric or "", stop) else -1.0
    return found if best is None or sign * (found.value - best.value) > 0 else best


def _measured(record: RoundRecord, metric: str) -> Best | None:
    """What the record says of the metric, and of which round's model."""
    if (value := of_model(record, metric)) is not None:
        return Best(record.round, value, 0 if metric.startswith(CENTRAL) else len(record.client_metrics))
    if (value := mean(record.before, metric)) is not None:
        return Best(record.round - 1, value)
    return None

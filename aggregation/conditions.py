"""Refusals of parameters under which a rule would promise nothing."""

from __future__ import annotations

from roundtable.core.errors import AggregationError


class NotFinite(AggregationError):
    """An update holds NaN or infinities, and nobody left it out before a rule saw it."""

    def __init__(self) -> None:
        super().__init__(
            "an update holds values that are not finite; leave it out before a rule sees it, as "
            "roundtable.aggregation.aggregate does"
        )


def require(rule: str, condition: str, holds: bool, **values: object) -> None:
    """Raises AggregationError with the paper's condition where it does not hold."""
    if not holds:
        given = ", ".join(f"{name} = {value}" for name, value in values.items())
        raise AggregationError(
            f"{rule} needs {condition}, but here {given}: lower f, or let more silos take part in the round"
        )


def require_positive(rule: str, name: str, value: float) -> None:
    """Raises AggregationError where a parameter is not a positive finite number."""
    if not 0 < value < float("inf"):
        raise AggregationError(f"{rule}: {name} must be a positive number, not {value!r}")

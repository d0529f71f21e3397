"""Which δ promises anything."""

from __future__ import annotations

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import delta_fault


def check_delta(delta: float, population: int | None) -> None:
    """Raises `PrivacyError` unless 0 < `delta` < 1 / `population`: at 1/n, publishing one unit would do."""
    if fault := delta_fault(delta, population):
        raise PrivacyError(f"privacy.delta is {delta:g}: {fault}")

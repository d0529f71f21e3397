"""The phases in which clients are asked for a word, and not for an update: all alike for `RoundEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from roundtable.core.errors import SiteFailure


class Asking(Protocol):
    """A phase that ends once those have answered whom it waits for."""

    def begin(self, now: float) -> None:
        """Asks clients."""

    def joined(self, client: str, now: float) -> None:
        """A client has come online."""

    def answered(self, client: str, metrics: Mapping[str, tuple[float, int]], now: float) -> None:
        """A client that is waited for has answered."""

    def failed(self, failure: SiteFailure, now: float) -> None:
        """A client that is waited for cannot answer."""

    def proceed(self, now: float) -> None:
        """Somebody has answered, failed or left: ends the phase where nobody is waited for any more."""

    def timer_fired(self, timer: str, now: float) -> None:
        """A timer has run out, of this phase or not."""

    def restore(self, now: float) -> None:
        """Asks again after a restart."""

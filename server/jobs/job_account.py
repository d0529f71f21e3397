"""What a job's driver asks of the privacy ledger, and the account of a job without privacy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from roundtable.engine import messages as m
from roundtable.server.jobs.privacy_budget import Guarantee
from roundtable.server.store import LedgerRow, UpdateRow


class JobAccount(Protocol):
    """One job's account. Everything but `of_updates` may raise StorageError: the database is away."""

    async def reserve(self, step: m.Step) -> None:
        """Reserves what an attempt can cost; BudgetExceeded where a budget does not hold it."""

    async def release(self, step: m.Step) -> None:
        """Charges an attempt for good, before anything of it is seen; PrivacyError if nothing is reserved."""

    def of_updates(self, updates: Iterable[UpdateRow]) -> list[LedgerRow]:
        """What silos have spent by sending these updates: due when they become durable, used or not."""

    async def guarantee(self, step: m.Step) -> Guarantee:
        """The guarantee of the model that this step publishes; its own charge is counted."""


class NoAccount:
    """The account of a job without privacy: charges nothing and promises nothing."""

    async def reserve(self, step: m.Step) -> None:
        return

    async def release(self, step: m.Step) -> None:
        return

    def of_updates(self, updates: Iterable[UpdateRow]) -> list[LedgerRow]:
        return []

    async def guarantee(self, step: m.Step) -> Guarantee:
        return Guarantee("", {})

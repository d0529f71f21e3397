"""What a job's driver asks of the privacy ledger, and the account of a job without privacy."""

from __future__ import annotations

from typing import Protocol

from roundtable.engine import messages as m
from roundtable.server.jobs.privacy_budget import Guarantee


class JobAccount(Protocol):
    """One job's account. Everything may raise StorageError: the database is away."""

    async def reserve(self, step: m.Step) -> None:
        """Reserves what an attempt can cost; BudgetExceeded where a budget does not hold it."""

    async def release(self, step: m.Step) -> None:
        """Charges an attempt for good, before anything of it is seen; PrivacyError if nothing is reserved."""

    async def receive(self, client: str, step: m.Step, digest: str) -> None:
        """Charges a silo for an update of this step: due before its first byte, used or not, and once."""

    async def guarantee(self, step: m.Step) -> Guarantee:
        """The guarantee of the model that this step publishes; its own charge is counted."""


class NoAccount:
    """The account of a job without privacy: charges nothing and promises nothing."""

    async def reserve(self, step: m.Step) -> None:
        return

    async def release(self, step: m.Step) -> None:
        return

    async def receive(self, client: str, step: m.Step, digest: str) -> None:
        return

    async def guarantee(self, step: m.Step) -> Guarantee:
        return Guarantee("", {})

"""How the updates of a job's rounds are collected: what every way of doing it offers.

Plain rounds (`plain_rounds.py`) take each silo's update as it is; secure aggregation
(`secagg/secure_rounds.py`) runs a protocol beside the engine and gets their sum. Which one a job needs
follows from its configuration and is decided once, when its driver is made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from roundtable.core.errors import SiteFailure
from roundtable.engine import Received
from roundtable.engine import messages as m
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.storage.finite_check import ContentCheck

Pay = Callable[[], Awaitable[None]]


class RoundCollection(Protocol):
    """Collects the updates of one job, round after round."""

    def admit(self, action: m.Instruct) -> Sequence[bytes] | None:
        """The certificates that go with an instruction; None where the silo cannot take part."""

    def problem(self, client: str, offer: UploadOffer, encoding: str) -> str:
        """What is wrong with an offered upload, in words; empty if nothing is.

        `encoding` is what the silo was told.
        """

    def content_check(self, client: str, offer: UploadOffer) -> ContentCheck:
        """What the bytes of one upload are to be shown to, in order."""

    def sum_content(self, step: m.Step) -> tuple[int, ContentCheck]:
        """The bytes of a relay's sum of updates of this step, and what they are to be shown to."""

    def arrived(self, client: str, offer: UploadOffer, norm: float | None) -> None:
        """Notes that an upload is here, whole; `norm` is that of its vector, where it was measured."""

    def exchanged(self, client: str, step: m.Step, message: bytes) -> None:
        """Takes a silo's message of the protocol."""

    def failed(self, failure: SiteFailure) -> None:
        """Notes that a silo will not answer its step."""

    def rejoined(self, client: str) -> None:
        """Notes that a silo is connected again: what was sent to it last may have been lost."""

    def progress(self) -> str:
        """What the collection waits for, in words; empty while silos just train."""

    def permit(self, step: m.Step) -> None:
        """Allows that silos are asked to unmask: that no other attempt at the round will be is durable."""

    async def collect(self, action: m.Aggregate, pay: Pay) -> Received:
        """What the named updates come to; may be called again for the same attempt.

        `pay` makes it durable that the attempt is paid for and the round used up, before any sum is
        unmasked. Raises AggregationError where the attempt must be given up, DamagedUpdates where updates
        must be sent again first.
        """

    def take_up(self, step: m.Step) -> None:
        """Goes on with the attempt that was under way before a restart."""

    def retire(self, round: int) -> None:
        """Forgets a round that is committed, and those before it."""

    def close(self, *, forget: bool) -> None:
        """Gives up the attempt that runs; with `forget` for good, otherwise so that it can be taken up."""

"""The coordinator's side of an attempt whose cohort is split into groups: one `SecAggServer` for each.

All silos advertise and open their nonces together; then the groups are drawn, and each runs the rest
of the protocol on its own, with survivors and a threshold of its own, while all of them keep step. A
group that falls below its threshold is lost, and nothing of it is revealed; the attempt goes on as long
as `least` allows. Like `SecAggServer`, the object is a function of the messages that it took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roundtable.core.errors import PrivacyError, ProtocolError
from roundtable.privacy.secagg.framing import unseal
from roundtable.privacy.secagg.groups import split
from roundtable.privacy.secagg.keys import Session
from roundtable.privacy.secagg.masks import Ring
from roundtable.privacy.secagg.parameters import SecAggParameters
from roundtable.privacy.secagg.server import Body, SecAggServer, ServerPhase

Workspace = Callable[[int], Ring]


@dataclass(frozen=True)
class Least:
    """What an attempt cannot do without: so many groups, and so many silos in all of them together."""

    groups: int = 1
    silos: int = 1

    def demand(self, survivors: list[int], lost: Mapping[int, str]) -> None:
        """ProtocolError where the groups that are left, with so many silos each, are not enough."""
        reasons = "; ".join(f"group {number}: {reason}" for number, reason in sorted(lost.items()))
        if len(survivors) < self.groups:
            raise ProtocolError(f"{len(survivors)} groups are left, {self.groups} are needed ({reasons})")
        if sum(survivors) < self.silos:
            raise ProtocolError(
                f"{sum(survivors)} silos are left in {len(survivors)} groups, {self.silos} are needed "
                f"({reasons or 'no group is lost'})"
            )


class GroupedServer:
    """The coordinator in one attempt of groups; `plan` has a `group_size`.

    `workspace` gives the memory in which a group's sum is built, by the group's number (from 1).
    `groups` are there once they are drawn; `lost` says why a group, by its number, is out.
    """

    def __init__(
        self,
        session: Session,
        plan: SecAggParameters,
        directory: Mapping[str, bytes],
        least: Least,
        workspace: Workspace | None = None,
    ) -> None:
        self._whole = SecAggServer(session, plan, directory)
        self._least = least
        self._workspace = workspace
        self._failed = False
        self._group_of: dict[str, int] = {}
        self.groups: dict[int, SecAggServer] = {}
        self.lost: dict[int, str] = {}

    @property
    def session(self) -> Session:
        return self._whole.session

    @property
    def phase(self) -> ServerPhase:
        """The phase of all groups that are left."""
        if self._failed:
            return ServerPhase.FAILED
        return next((group.phase for group in self.alive.values()), self._whole.phase)

    @property
    def alive(self) -> dict[int, SecAggServer]:
        """The groups that are still in, by number."""
        return {number: group for number, group in self.groups.items() if number not in self.lost}

    @property
    def aborted(self) -> dict[str, str]:
        """The silos that gave up or were lost, and why."""
        found = dict(self._whole.aborted)
        for group in self.groups.values():
            found |= group.aborted
        return found

    @property
    def missing(self) -> frozenset[str]:
        """The silos whose answer in this phase is still awaited."""
        if not self.groups:
            return self._whole.missing
        return frozenset().union(*(group.missing for group in self.alive.values()))

    @property
    def ready(self) -> bool:
        """Whether the phase can be closed with success before its deadline."""
        return all(group.ready for group in self.alive.values()) if self.groups else self._whole.ready

    def why_lost(self, client: str) -> str:
        """Why the silo's group is out; empty where it is not."""
        return self.lost.get(self._group_of.get(client, 0), "")

    def receive(self, message: bytes) -> str:
        """See `SecAggServer.receive`."""
        return self._place(message).receive(message)

    def announced(self, message: bytes) -> tuple[str, str]:
        """See `SecAggServer.announced`."""
        number = self._group_of.get(unseal(message).sender)
        return (self._whole if number is None else self.groups[number]).announced(message)

    def fold(self, message: bytes, body: Body) -> str:
        """See `SecAggServer.fold`. The vector of a silo whose group is lost is left aside."""
        number = self._group_of.get(unseal(message).sender)
        if number in self.lost:
            return unseal(message).sender
        return self._place(message).fold(message, body)

    def lose(self, client: str, reason: str) -> bool:
        """See `SecAggServer.lose`."""
        number = self._group_of.get(client)
        return (self._whole if number is None else self.groups[number]).lose(client, reason)

    def advance(self) -> dict[str, bytes]:
        """Closes the phase of all groups; ProtocolError where too little is left."""
        if self.phase is ServerPhase.FAILED:
            raise ProtocolError("the attempt is over")
        try:
            if not self.groups:
                return self._advance_whole()
            messages = self._advance_groups()
            self._least.demand([len(self._silos_of(group)) for group in self.alive.values()], self.lost)
        except (ProtocolError, PrivacyError):
            self._failed = True
            raise
        return messages

    def _advance_whole(self) -> dict[str, bytes]:
        drawing = self._whole.phase is ServerPhase.REVEAL
        messages = self._whole.advance()
        if drawing:
            for number, (group, places) in enumerate(split(self._whole.cohort), start=1):
                workspace = self._workspace(number) if self._workspace else None
                self.groups[number] = SecAggServer.of_group(self._whole, group, places, workspace)
                self._group_of |= dict.fromkeys(group.names, number)
            for client, reason in self._whole.aborted.items():
                if client in self._group_of:
                    self.lose(client, reason)
            self._least.demand([len(group.cohort.names) for group in self.groups.values()], {})
        return messages

    def _advance_groups(self) -> dict[str, bytes]:
        messages: dict[str, bytes] = {}
        for number, group in self.alive.items():
            try:
                messages |= group.advance()
            except (ProtocolError, PrivacyError) as error:
                self.lost[number] = str(error)
        return messages

    def _silos_of(self, group: SecAggServer) -> tuple[str, ...]:
        return group.survivors or group.cohort.names

    def _place(self, message: bytes) -> SecAggServer:
        number = self._group_of.get(unseal(message).sender)
        if number is None:
            return self._whole
        if number in self.lost:
            raise ProtocolError(f"group {number} is out of this attempt: {self.lost[number]}")
        return self.groups[number]

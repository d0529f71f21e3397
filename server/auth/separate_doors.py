"""Which services are called at which address, where operators have an address of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from roundtable.server.auth.message_flow import Refusal

OF_AGENTS = frozenset({"Agents", "Relays"})
"""Services that agents and relays call; all others are for operators, and for silos that were invited."""


@dataclass(frozen=True)
class Door:
    """An address at which the services of `OF_AGENTS` are called, or all but these.

    For messages `whose` says for whom it is, `others` who connects elsewhere: at the address that the setting
    `named` gives and that is `opened`.
    """

    of_agents: bool
    whose: str
    others: str
    named: str
    opened: Callable[[], str]

    def check(self, name: str) -> None:
        """Refusal for a call, `Service/Method`, that has its place at the other door."""
        if (name.partition("/")[0] in OF_AGENTS) != self.of_agents:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this address of the coordinator is for {self.whose}: {self.others} connect to the one that "
                f"coordinator.toml names as `{self.named}` ({self.opened()})",
            )


def agents_door(operators: Callable[[], str]) -> Door:
    """The one at `listen`, where operators connect at `operators`, host:port."""
    return Door(True, "agents and relays", "operators", "operators", operators)


def operators_door(listen: Callable[[], str]) -> Door:
    """The one at `operators`, where agents and relays connect at `listen`, host:port."""
    return Door(False, "operators", "agents and relays", "listen", listen)

"""What serves the coordinator's page: from outside this package, which needs no web server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from roundtable.server.auth.access import Access
from roundtable.server.auth.page_sessions import PageSessions
from roundtable.server.services.local_calls import LocalCalls


@dataclass(frozen=True)
class BehindThePage:
    """What a page gets of an active coordinator: the operators' calls, who has signed in, who may."""

    calls: LocalCalls
    sessions: PageSessions
    access: Access


class Dashboard(Protocol):
    """A page that is served while a coordinator is active."""

    async def open(self, behind: BehindThePage) -> None:
        """Serves from now on; ResourceError where its address cannot be had."""
        ...

    async def close(self) -> None:
        """Ends all streams and serves no more; within two seconds."""
        ...


class NoDashboard:
    """There is no page."""

    async def open(self, behind: BehindThePage) -> None:
        del behind

    async def close(self) -> None: ...

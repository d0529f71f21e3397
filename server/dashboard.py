"""What serves the coordinator's page: from outside this package, which needs no web server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from roundtable.server.auth.oidc_sign_in import ProviderAnswer
from roundtable.server.auth.page_sessions import PageSession
from roundtable.server.auth.principals import Principal


class PageCalls(Protocol):
    """The operators' calls, each as somebody who has signed in: `LocalCalls`, or what stands for them."""

    async def call(self, who: Principal, address: str, name: str, request: Message) -> Any:
        """The answer to a call with one. RoundtableError where it is refused."""
        ...

    def stream(self, who: Principal, address: str, name: str, request: Message) -> AsyncIterator[Message]:
        """What a call answers that answers with a stream. RoundtableError as for `call`."""
        ...


class PageSignIns(Protocol):
    """Who has signed in: `PageSessions`, or what stands for them."""

    async def begin(self, who: Principal, credential: str, given: float | None = None) -> str:
        """Signs somebody in who was `given` a word then, or has shown something else now; the secret for the
        browser. IdentityError for who has been revoked since."""
        ...

    def redeem(self, word: str) -> tuple[Principal, float] | None:
        """Whose word for a browser it is, which is then used up, and when it was given; None for any other
        text."""
        ...

    async def find(self, secret: str) -> PageSession | None:
        """Whose session it is; None where there is none."""
        ...

    async def end(self, secret: str) -> None:
        """Signs out."""
        ...


class PageBearers(Protocol):
    """Who may sign in: `Access`, or what stands for it."""

    async def of_bearer(self, bearer: str, address: str) -> Principal:
        """The holder of a token. Refusal for one that does not hold."""
        ...

    @property
    def has_provider_page(self) -> bool:
        """Whether people sign in at an identity provider's page; without, the two calls below fail."""
        ...

    async def provider_address(self, cookie: str) -> str:
        """Where the browser with this cookie signs in. UnavailableError without the provider."""
        ...

    async def of_code(self, cookie: str, answer: ProviderAnswer, address: str) -> Principal:
        """Who comes back from there. Refusal, IdentityError or UnavailableError for whom that fails."""
        ...


@dataclass(frozen=True)
class BehindThePage:
    """What a page shows and who may see it: an active coordinator's, or a run's on this machine."""

    calls: PageCalls
    sessions: PageSignIns
    access: PageBearers


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

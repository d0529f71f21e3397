"""A coordinator's refusal, as one of our own errors, and how long one that is away is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from roundtable.core.errors import (
    ConfigError,
    IdentityError,
    ProtocolError,
    ResourceError,
    RoundtableError,
    TransferError,
    UnavailableError,
)

_ERRORS: dict[grpc.StatusCode, type[RoundtableError]] = {
    grpc.StatusCode.UNAUTHENTICATED: IdentityError,
    grpc.StatusCode.PERMISSION_DENIED: IdentityError,
    grpc.StatusCode.NOT_FOUND: ConfigError,
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.FAILED_PRECONDITION: ConfigError,
    grpc.StatusCode.ALREADY_EXISTS: ConfigError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceError,
    # Another call stores the same artifact right now: who asks again finds it whole.
    grpc.StatusCode.ABORTED: UnavailableError,
    grpc.StatusCode.DATA_LOSS: TransferError,
    grpc.StatusCode.OUT_OF_RANGE: TransferError,
}
PAUSE_SECONDS = 0.5
Told = Callable[[str], None]
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


@contextmanager
def translated(explain: Callable[[str], RoundtableError]) -> Iterator[None]:
    """Turns a gRPC error within the block into a RoundtableError.

    `explain` makes the error of a coordinator that cannot be reached, from gRPC's own words.
    """
    try:
        yield
    except grpc.RpcError as error:
        code = error.code()
        detail = error.details() or code.name
        if code in _UNREACHABLE:
            raise explain(detail) from error
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise ProtocolError(
                f"the coordinator does not know this request ({detail}); its version is another one: "
                "compare `roundtable version` on both sides"
            ) from error
        if code in _ERRORS:
            raise _ERRORS[code](detail) from error
        raise ProtocolError(
            f"the coordinator failed at this request ({code.name}: {detail}); its log says more"
        ) from error


class Patience:
    """Waits for a coordinator without an answer, so many seconds at most; `away` is told once each time."""

    def __init__(self, seconds: float, away: Told) -> None:
        self._seconds = seconds
        self._away = away
        self._since: float | None = None

    def answered(self) -> None:
        """Begins anew at the next failure."""
        self._since = None

    def wait(self, error: UnavailableError) -> None:
        """Waits before the next try. Raises the error where it was waited for long enough."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._away(f"{error}; it is waited for, {self._seconds / 60:.0f} minutes at most")
        if now - self._since >= self._seconds:
            raise error
        time.sleep(PAUSE_SECONDS)

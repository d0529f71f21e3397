"""Who calls, whether they may, and what they are told when something fails.

Every call passes here: the caller is known by certificate or token, `server/auth/permissions.py` says whether
the role may make this call, `server/auth/quotas.py` whether the caller may make one more, calls that change
something are noted in the audit log before they are done, our own errors become status codes with their
message, and anything unexpected becomes INTERNAL without a traceback. Refusals are logged, counted, and kept
in the audit log.

The caller is known and counted before a byte of the request is read: gRPC would wait for the message of a
unary call first, for as long as the caller likes. So every method is served as one that takes a stream of
requests (on the wire they are the same), and the only message of a unary call is read here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import Message
from typing_extensions import override

from roundtable.core import errors
from roundtable.core.foreign_text import printable
from roundtable.core.observability.logs import requesting
from roundtable.server.auth.audit import AccessNotes
from roundtable.server.auth.call_metadata import bearer_in, call_identifier, metadata_word
from roundtable.server.auth.message_flow import Context as Context
from roundtable.server.auth.message_flow import PatientContext, careful, in_time
from roundtable.server.auth.message_flow import Refusal as Refusal
from roundtable.server.auth.oidc_sign_in import ProviderAnswer
from roundtable.server.auth.permissions import CALLERS, PERMISSIONS, Permission, permission_of
from roundtable.server.auth.principals import NOBODY, CertifiedCallers, Principal, credential_of
from roundtable.server.auth.quotas import Quotas
from roundtable.server.auth.rate_limit import Lockouts, RateLimit, WrongSecret
from roundtable.server.auth.relayed import SILO_KEY, RelayedSilos
from roundtable.server.auth.separate_doors import Door
from roundtable.server.store.trust_rows import Party

log = logging.getLogger("roundtable.server.auth.access")

_CODES: tuple[tuple[type[errors.RoundtableError], grpc.StatusCode], ...] = (
    (errors.IdentityError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.TransferError, grpc.StatusCode.DATA_LOSS),
    (errors.ResourceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StorageError, grpc.StatusCode.UNAVAILABLE),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.RoundtableError, grpc.StatusCode.INVALID_ARGUMENT),
)
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_SERVED = {
    "unary_unary": grpc.stream_unary_rpc_method_handler,
    "unary_stream": grpc.stream_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}
_NAMES_OF_OBJECTS = ("job", "silo", "name", "population", "request_id")
LINES_A_SECOND, LINES_AT_ONCE = 1.0, 60.0
FLUSH_SECONDS = 0.2
LONGEST_ANSWER = 2000
Method: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
_principal: ContextVar[Principal] = ContextVar("principal", default=NOBODY)


def principal() -> Principal:
    """The party that makes the current call."""
    return _principal.get()


def caller(context: Context) -> str:
    """The name of the party that makes the current call."""
    return _principal.get().name


def address_of(context: Context) -> str:
    """The address that the call comes from, without the port."""
    peer = str(context.peer())
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class Access(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Intercepts every call: identifies the caller, checks the permission and the caller's quotas."""

    def __init__(
        self,
        principals: CertifiedCallers,
        audit: AccessNotes,
        lockouts: Lockouts,
        quotas: Quotas,
        clock: Callable[[], float],
        relayed: RelayedSilos,
    ) -> None:
        self._principals = principals
        self._relayed = relayed
        self._audit = audit
        self._lockouts = lockouts
        self._quotas = quotas
        self._lines = RateLimit(LINES_A_SECOND, LINES_AT_ONCE, clock)
        self._active: dict[Party, set[asyncio.Task[Any]]] = {}
        self._cut: set[asyncio.Task[Any]] = set()
        self.refusals: Counter[tuple[str, str]] = Counter()

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        return self.serve(await continuation(details), details.method)

    def serve(
        self, handler: grpc.RpcMethodHandler[Any, Any] | None, called: str, door: Door | None = None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """What a method, by gRPC's name, is served by at this door; at any, where there is none."""
        permission = permission_of(called)
        if handler is None or permission is None:
            # A method without a row in the table does not exist for anybody.
            return None  # type: ignore[return-value]
        kind = next(name for name in _KINDS if getattr(handler, name) is not None)
        name = called.removeprefix("/roundtable.v1.")
        guarded = self._guarded(getattr(handler, kind), name, permission, kind, door)
        reader = careful(handler.request_deserializer, name)
        return _SERVED[kind](guarded, reader, handler.response_serializer)

    def cut(self, party: Party) -> int:
        """Ends every call of this party, now; returns how many there were."""
        tasks = [task for task in self._active.get(party, ()) if task is not asyncio.current_task()]
        for task in tasks:
            self._end(task)
        return len(tasks)

    @contextmanager
    def relayed(self, who: Principal) -> Iterator[None]:
        """The current task is a stream of this party that comes by a relay; it can be cut as a call can."""
        _principal.set(who)
        with self._running(who, streams=True):
            yield

    async def perform(
        self, method: Method, name: str, request: Message, who: Principal, address: str, context: Context
    ) -> Any:
        """A call with one request that comes by another door than gRPC, of somebody who is known there.

        The same table, quotas, limits and entries of the audit log as at the wire; in a task of its own,
        which `cut` can cancel. A method that answers with a stream writes to `context`. RoundtableError where
        it fails; a Refusal has its status with it.
        """
        permission = PERMISSIONS[name]
        try:
            with self._admitted(who, address, name, permission, streams=False):
                if not permission.noted:
                    return await method(request, context)
                with self._quotas.change(who.label):
                    await self._note(who, name, request)
                    return await method(request, context)
        except errors.RoundtableError as error:
            code = error.code if isinstance(error, Refusal) else _code(error)
            self._refused(who, name, code, printable(error, LONGEST_ANSWER), address)
            raise

    async def of_bearer(self, bearer: str, address: str) -> Principal:
        """The holder of a token that comes by any door.

        Refusal for one that does not hold, and for everybody who has shown too many of those.
        """
        return await self._shown(credential_of(bearer), address, self._principals.of_bearer(bearer))

    async def of_code(self, cookie: str, answer: ProviderAnswer, address: str) -> Principal:
        """Who comes back from the identity provider; Refusal as for `of_bearer`, else as `ProviderSignIn`."""
        return await self._shown(
            credential_of(answer.code), address, self._principals.of_code(cookie, answer)
        )

    async def provider_address(self, cookie: str) -> str:
        """Where the browser with this cookie signs in; raises as `CertifiedCallers.provider_address`."""
        return await self._principals.provider_address(cookie)

    @property
    def has_provider_page(self) -> bool:
        """Whether people sign in to the page at their identity provider."""
        return self._principals.has_provider_page

    async def _shown(self, credential: str, address: str, check: Coroutine[Any, Any, Principal]) -> Principal:
        try:
            check_lockout(self._lockouts, address, credential)
            return await check
        except WrongSecret as error:
            self._lockouts.wrong(address, credential)
            raise Refusal(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
        finally:
            check.close()

    def has_cut(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether `cut` has cancelled a task, or what its caller has shown has ended; says so once."""
        found = task in self._cut
        self._cut.discard(cast("asyncio.Task[Any]", task))
        return found

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._cut.add(task)
        task.cancel()

    def _guarded(
        self, method: Method, name: str, permission: Permission, kind: str, door: Door | None
    ) -> Method:
        async def call(requests: AsyncIterator[Any], context: Context) -> Any:
            with requesting(call_identifier(context)) as request:
                return await answered(requests, context, request)

        async def answered(requests: AsyncIterator[Any], context: Context, request: str) -> Any:
            who, address = NOBODY, address_of(context)
            try:
                who = await self._identify(context)
                with self._admitted(who, address, name, permission, streams=kind != "unary_unary"):
                    if door is not None:
                        door.check(name)
                    return await self._perform(method, name, permission, kind, requests, context)
            except errors.RoundtableError as error:
                code = error.code if isinstance(error, Refusal) else _code(error)
                # What a caller has sent may be in it, however long.
                said = printable(error, LONGEST_ANSWER)
                self._refused(who, name, code, said, address)
                await context.abort(code, said)
            except grpc.aio.AbortError:
                raise
            except grpc.aio.UsageError as error:
                log.info("%s ended: %s", name, error)
            except asyncio.CancelledError:
                await self._cancelled(context, who)
            except Exception:
                log.exception("%s failed", name)
                await context.abort(
                    grpc.StatusCode.INTERNAL,
                    f"the coordinator failed at this request ({request}); its log says why",
                )

        return call

    @contextmanager
    def _admitted(
        self, who: Principal, address: str, name: str, permission: Permission, *, streams: bool
    ) -> Iterator[None]:
        """Whether this party may make this call, and one more; it is open while the block lasts."""
        if who.role not in permission.callers:
            raise errors.IdentityError(_wrong_role(who, name, permission))
        label = _label(who, address)
        self._quotas.arrive(label, permission.cost, known=who is not NOBODY)
        _principal.set(who)
        log.debug("%s by %s", name, label)
        with self._quotas.open_call(label), self._running(who, streams):
            yield

    async def _perform(
        self,
        method: Method,
        name: str,
        permission: Permission,
        kind: str,
        requests: AsyncIterator[Any],
        context: Context,
    ) -> Any:
        """Reads what is asked for, notes it if it changes something, and does it."""
        seconds, who = self._quotas.table.idle, principal()
        # A stream both ways is an agent's control stream, whose silence is judged by heartbeats.
        request: Any = requests if kind == "stream_stream" else in_time(requests, name, seconds)
        if kind.startswith("unary"):
            request = await anext(request, None)
            if request is None:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"a call of {name} ended without its message")
        if kind.endswith("stream"):
            # Left to the first message, gRPC forgets having sent it when that message is cut off,
            # and then takes no status: the caller would never learn that the call has ended.
            await context.send_initial_metadata(())
        patient = cast(Context, PatientContext(context, name, seconds))
        if not permission.noted:
            return await method(request, patient)
        with self._quotas.change(who.label):
            await self._note(who, name, request)
            return await method(request, patient)

    async def _identify(self, context: Context) -> Principal:
        address, known = address_of(context), context.auth_context()
        if b"TLSv1.3" not in known.get("ssl_tls_version", [b"TLSv1.3"]):
            raise errors.IdentityError("this coordinator speaks TLS 1.3 only; use a newer TLS library")
        if shown := known.get("x509_pem_cert"):
            # What it builds upon follows: the issuing authority may be revoked too.
            who = self._principals.of_certificate(b"".join([*shown, *known.get("x509_pem_cert_chain", ())]))
            silo = metadata_word(context, SILO_KEY) if who.role == "relay" else ""
            return self._relayed.caller(who.name, silo) if silo else who
        if not (bearer := bearer_in(context)):
            return NOBODY
        return await self.of_bearer(bearer, address)

    async def _note(self, who: Principal, name: str, request: Any) -> None:
        target = ""
        if isinstance(request, Message):
            found = [getattr(request, field, "") for field in _NAMES_OF_OBJECTS]
            target = next((printable(value, 200) for value in found if value), "")
        await self._audit.note(who.label, name, target, source=who.source)

    def _refused(self, who: Principal, name: str, code: grpc.StatusCode, said: str, address: str) -> None:
        if self._lines.allows(_label(who, address)):
            log.info("%s refused to %s: %s", name, who.label, said, extra={"code": code.name})
        self.refusals[name, code.name] += 1
        denied = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
        if code in denied or code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._audit.refused(who.label, name, said, address)

    async def _cancelled(self, context: Context, who: Principal) -> None:
        """Tells a caller that `cut` has ended the call; one that the caller ended itself needs no answer."""
        task = asyncio.current_task()
        if task is None or not self.has_cut(task):
            raise asyncio.CancelledError
        task.uncancel()
        # A message may be on its way to the socket, and gRPC takes no status beside it. Who reads nothing
        # more gets no status either, and no more of anything else.
        await asyncio.sleep(FLUSH_SECONDS)
        ended = "has ended" if who.expires <= self._principals.now() else "has been revoked"
        said = f"the certificate or token of {who.name!r} {ended}"
        try:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, said)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None

    @contextmanager
    def _running(self, who: Principal, streams: bool) -> Iterator[None]:
        """Keeps a call among those that can be cut; a stream ends with what its caller has shown, too."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._active.setdefault(who.party, set())
        tasks.add(task)
        left = who.expires - self._principals.now()
        timer = None
        if streams and left < inf:
            timer = asyncio.get_running_loop().call_later(left, self._end, task)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            tasks.discard(task)
            if not tasks:
                self._active.pop(who.party, None)


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """What calls pass at one of two doors: the same `Access`, for this door's services."""

    def __init__(self, access: Access, door: Door) -> None:
        self._access = access
        self._door = door

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        return self._access.serve(await continuation(details), details.method, self._door)


def check_lockout(lockouts: Lockouts, address: str, credential: str) -> None:
    """Refusal while this credential, or everybody at this address, has to wait."""
    if wait := lockouts.seconds(address, credential):
        raise Refusal(
            grpc.StatusCode.RESOURCE_EXHAUSTED, f"too many wrong tokens came; try again in {wait:.0f} s"
        )


def _label(who: Principal, address: str) -> str:
    """What quotas go by: the party, or the address of somebody without credentials."""
    return f"a stranger at {address}" if who is NOBODY else who.label


def _wrong_role(who: Principal, name: str, permission: Permission) -> str:
    wanted = " or ".join(role for role in CALLERS if role in permission.callers)
    if who is NOBODY:
        return (
            f"this call needs the certificate or token of one who is {wanted}, and none was shown: "
            "certificates count at the address that agents connect to, tokens at this one"
        )
    return f"{who.name!r} is here as {who.role}; this call needs one who is {wanted}"


def _code(error: errors.RoundtableError) -> grpc.StatusCode:
    return next(code for kind, code in _CODES if isinstance(error, kind))

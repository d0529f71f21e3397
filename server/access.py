"""Who calls, whether they may, and what they are told when something fails.

Every call passes here: the caller's certificate must state the role of the service, our own errors
become status codes with their message, and anything unexpected becomes INTERNAL without a traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, TypeAlias

import grpc

from roundtable.core import errors
from roundtable.core.identity import Role, identity_of

log = logging.getLogger("roundtable.server.access")

SERVICES: dict[str, Role] = {"roundtable.v1.Agents": "agent", "roundtable.v1.Operators": "operator"}

_CODES: tuple[tuple[type[errors.RoundtableError], grpc.StatusCode], ...] = (
    (errors.IdentityError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.TransferError, grpc.StatusCode.DATA_LOSS),
    (errors.ResourceError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.StorageError, grpc.StatusCode.UNAVAILABLE),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.RoundtableError, grpc.StatusCode.INVALID_ARGUMENT),
)
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Refusal(errors.RoundtableError):
    """A call that is answered with this status and message."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def caller(context: Context) -> str:
    """The name in the caller's certificate."""
    return _identity(_certificate(context))[0]


class Access(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Checks the role before the service's method runs, and translates its errors."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(details)
        service = details.method.split("/")[1]
        if handler is None or service not in SERVICES:
            return handler
        kind = next(name for name in _KINDS if getattr(handler, name) is not None)
        guarded = _guarded(getattr(handler, kind), details.method, SERVICES[service])
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]


def _guarded(
    method: Callable[[Any, Context], Awaitable[Any]], name: str, role: Role
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        try:
            _check_role(context, role)
            return await method(request, context)
        except errors.RoundtableError as error:
            code = error.code if isinstance(error, Refusal) else _code(error)
            log.info("%s refused: %s", name, error, extra={"code": code.name})
            await context.abort(code, str(error))
        except grpc.aio.AbortError:
            raise
        except grpc.aio.UsageError as error:
            log.info("%s ended: %s", name, error)
        except Exception:
            log.exception("%s failed", name)
            await context.abort(
                grpc.StatusCode.INTERNAL, "the coordinator failed at this request; its log says why"
            )

    return call


def _check_role(context: Context, role: Role) -> None:
    name, has = _identity(_certificate(context))
    if has != role:
        raise errors.IdentityError(
            f"the certificate of {name!r} is one of an {has}; this call needs one of an {role}"
        )


def _certificate(context: Context) -> bytes:
    found = context.auth_context().get("x509_pem_cert")
    if not found:
        raise errors.IdentityError("this call needs a client certificate, and none was shown")
    return bytes(next(iter(found)))


@lru_cache(maxsize=4096)
def _identity(pem: bytes) -> tuple[str, Role]:
    return identity_of(pem)


def _code(error: errors.RoundtableError) -> grpc.StatusCode:
    return next(code for kind, code in _CODES if isinstance(error, kind))

"""An agent's control stream as the coordinator serves it: a connection of its own, or one through a relay."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from roundtable.core.identity import certificates as x
from roundtable.core.identity.lifetimes import Lifetime
from roundtable.proto import agent_pb2
from roundtable.server.auth.access import Context, address_of, caller
from roundtable.server.jobs.sessions import ShownCertificate


@dataclass(frozen=True)
class Line:
    """Who is at the other end, what it has shown, both directions; `relay` is the one in between, or ""."""

    name: str
    shown: ShownCertificate
    address: str
    requests: AsyncIterator[agent_pb2.FromAgent]
    write: Callable[[agent_pb2.ToAgent], Awaitable[object]]
    relay: str = ""


def line_of(requests: AsyncIterator[agent_pb2.FromAgent], context: Context) -> Line:
    """The line of an agent that has connected itself."""
    shown = shown_in(next(iter(context.auth_context()["x509_pem_cert"])))
    return Line(caller(context), shown, address_of(context), requests, context.write)


def shown_in(pem: bytes) -> ShownCertificate:
    """The certificate by which a party is known; IdentityError for what is none."""
    own = x.certificates_in(pem, "the connection's certificate")[0]
    return ShownCertificate(hashlib.sha256(x.public_bytes(own.public_key())).hexdigest(), Lifetime.of(own))

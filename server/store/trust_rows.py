"""Who may take part: invitations, certificates that were issued here, revocations, operators' tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.server.store import tables


@dataclass(frozen=True)
class InvitationRow:
    """An invitation; `digest` is SHA-256 of its secret."""

    identifier: str
    silo: str
    digest: str
    uses: int
    used: int
    author: str
    created: float
    expires: float


@dataclass(frozen=True)
class CertificateRow:
    """A certificate that this coordinator has issued; `serial` in hexadecimal, `key` a digest."""

    serial: str
    name: str
    key: str
    invitation: str
    issued: float
    expires: float


@dataclass(frozen=True)
class TokenRow:
    """An operator's token; `digest` is SHA-256 of its secret."""

    name: str
    identifier: str
    digest: str
    role: str
    author: str
    created: float
    expires: float
    revoked: bool = False


def add_invitation(connection: Connection, row: InvitationRow) -> None:
    """Keeps an invitation."""
    connection.execute(sa.insert(tables.invitations).values(asdict(row)))


def invitation(connection: Connection, identifier: str) -> InvitationRow | None:
    """The invitation with this identifier."""
    query = sa.select(tables.invitations).where(tables.invitations.c.identifier == identifier)
    row = connection.execute(query).first()
    return InvitationRow(**row._mapping) if row else None


def use_invitation(connection: Connection, identifier: str, now: float) -> bool:
    """Counts one use; False if it was used up, withdrawn or has expired by now."""
    table = tables.invitations.c
    change = sa.update(tables.invitations).where(
        table.identifier == identifier, table.used < table.uses, table.expires > now
    )
    return connection.execute(change.values(used=table.used + 1)).rowcount == 1


def void_invitations(connection: Connection, silo: str, now: float) -> None:
    """No open invitation of this silo holds any more."""
    table = tables.invitations.c
    connection.execute(
        sa.update(tables.invitations).where(table.silo == silo, table.expires > now).values(expires=now)
    )


def add_certificates(connection: Connection, *rows: CertificateRow) -> None:
    """Remembers certificates that were issued."""
    connection.execute(sa.insert(tables.certificates), [asdict(row) for row in rows])


def has_enrolled(connection: Connection, invitation: str, key: str) -> bool:
    """Whether this key was certified for this invitation before."""
    table = tables.certificates.c
    query = sa.select(table.serial).where(table.invitation == invitation, table.key == key)
    return connection.execute(query.limit(1)).first() is not None


def revoke(connection: Connection, name: str, author: str, reason: str, now: float) -> None:
    """Voids every certificate that the name has at this moment."""
    table = tables.revocations
    connection.execute(sa.delete(table).where(table.c.name == name))
    connection.execute(sa.insert(table).values(name=name, author=author, reason=reason, time=now))


def revoked_names(connection: Connection) -> dict[str, frozenset[str]]:
    """Name → serial numbers that are good nevertheless: issued here after the revocation."""
    gone, made = tables.revocations.c, tables.certificates.c
    joined = sa.and_(made.name == gone.name, made.issued > gone.time)
    query = sa.select(gone.name, made.serial).select_from(
        tables.revocations.outerjoin(tables.certificates, joined)
    )
    found: dict[str, set[str]] = {}
    for row in connection.execute(query):
        found.setdefault(row.name, set()).update([row.serial] if row.serial else [])
    return {name: frozenset(serials) for name, serials in found.items()}


def add_token(connection: Connection, row: TokenRow) -> None:
    """Keeps a token; a revoked one of the same name gives way."""
    table = tables.tokens
    connection.execute(sa.delete(table).where(table.c.name == row.name, table.c.revoked.is_(True)))
    connection.execute(sa.insert(table).values(asdict(row)))


def token(connection: Connection, identifier: str) -> TokenRow | None:
    """The token with this identifier."""
    row = connection.execute(sa.select(tables.tokens).where(tables.tokens.c.identifier == identifier)).first()
    return TokenRow(**row._mapping) if row else None


def all_tokens(connection: Connection) -> list[TokenRow]:
    """Every token, by name."""
    query = sa.select(tables.tokens).order_by(tables.tokens.c.name)
    return [TokenRow(**row._mapping) for row in connection.execute(query)]


def revoke_token(connection: Connection, name: str) -> bool:
    """False if there is none of this name that holds."""
    table = tables.tokens.c
    change = sa.update(tables.tokens).where(table.name == name, table.revoked.is_(False))
    return connection.execute(change.values(revoked=True)).rowcount == 1

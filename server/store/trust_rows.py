"""Who may take part: invitations, certificates that were issued here, revocations, operators' tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

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


@dataclass(frozen=True)
class InstallationRow:
    """The installation of an agent that a key belongs to: both in hexadecimal.

    Somebody else came with the key at `clone_time`, 0 for never.
    """

    key: str
    name: str
    installation: str
    bound: float
    clone_time: float = 0.0
    clone_address: str = ""


@dataclass(frozen=True)
class PendingRow:
    """A request of an administrator that a second one must confirm; `author` as the audit log names it."""

    identifier: str
    action: str
    role: str
    name: str
    author: str
    reason: str
    created: float
    expires: float


Party: TypeAlias = tuple[str, str]
"""(role, name): a silo and an administrator of the same name are two."""


@dataclass(frozen=True)
class Revoked:
    """When a party was revoked, and serial numbers in hexadecimal of what it was issued here since."""

    time: float
    reissued: frozenset[str] = frozenset()


def add_invitation(connection: Connection, row: InvitationRow) -> None:
    """Inserts an invitation."""
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
    """Voids all open invitations of a silo."""
    table = tables.invitations.c
    connection.execute(
        sa.update(tables.invitations).where(table.silo == silo, table.expires > now).values(expires=now)
    )


def add_certificates(connection: Connection, *rows: CertificateRow) -> None:
    """Inserts certificates that were issued."""
    connection.execute(sa.insert(tables.certificates), [asdict(row) for row in rows])


def issue_times(connection: Connection, name: str, key: str, since: float) -> list[float]:
    """When this pair of keys was certified, from that time on, the oldest first. Each time makes two rows."""
    table = tables.certificates.c
    query = sa.select(table.issued).where(table.name == name, table.key == key, table.issued > since)
    return list(connection.execute(query.order_by(table.issued)).scalars())[::2]


def has_enrolled(connection: Connection, invitation: str, key: str) -> bool:
    """Whether this key was certified for this invitation before."""
    table = tables.certificates.c
    query = sa.select(table.serial).where(table.invitation == invitation, table.key == key)
    return connection.execute(query.limit(1)).first() is not None


def revoke(connection: Connection, party: Party, author: str, reason: str, now: float) -> None:
    """Voids every certificate that the party has at this moment."""
    table, (role, name) = tables.revoked, party
    connection.execute(sa.delete(table).where(table.c.role == role, table.c.name == name))
    connection.execute(sa.insert(table).values(role=role, name=name, author=author, reason=reason, time=now))


def revoked_parties(connection: Connection) -> dict[Party, Revoked]:
    """Every party that was revoked, with what was issued to it here afterwards: to agents alone."""
    gone, made = tables.revoked.c, tables.certificates.c
    joined = sa.and_(gone.role == "agent", made.name == gone.name, made.issued > gone.time)
    query = sa.select(gone.role, gone.name, gone.time, made.serial).select_from(
        tables.revoked.outerjoin(tables.certificates, joined)
    )
    found: dict[Party, Revoked] = {}
    for row in connection.execute(query):
        known = found.get((row.role, row.name), Revoked(row.time))
        serials = known.reissued | ({row.serial} if row.serial else set())
        found[row.role, row.name] = Revoked(row.time, serials)
    return found


def revoked_silos(connection: Connection) -> set[str]:
    """Silos that were revoked and have enrolled no more since."""
    found = revoked_parties(connection)
    return {name for (role, name), gone in found.items() if role == "agent" and not gone.reissued}


def installations_of(
    connection: Connection, keys: Collection[str], names: Collection[str] = ()
) -> dict[str, InstallationRow]:
    """The installations that keys, and all keys of silos of these names, belong to, by key; without those of
    keys that none is bound to yet."""
    table = tables.installations
    either = [table.c.key.in_(list(keys)), *([table.c.name.in_(list(names))] if names else [])]
    rows = connection.execute(sa.select(table).where(sa.or_(*either)))
    return {row.key: InstallationRow(**row._mapping) for row in rows}


def bind_installations(connection: Connection, rows: Sequence[InstallationRow]) -> list[InstallationRow]:
    """Binds each key to its first installation unless it is bound; those that they belong to now."""
    bound = installations_of(connection, {row.key for row in rows})
    fresh: dict[str, InstallationRow] = {}
    for row in rows:
        if row.key not in bound:
            fresh.setdefault(row.key, row)
    if fresh:
        connection.execute(sa.insert(tables.installations), [asdict(row) for row in fresh.values()])
    known = {**bound, **fresh}
    return [known[row.key] for row in rows]


def note_clone(connection: Connection, keys: Collection[str], time: float, address: str) -> None:
    """Stores that somebody else has come in the place of the installation that these keys are bound to."""
    change = sa.update(tables.installations).where(tables.installations.c.key.in_(list(keys)))
    connection.execute(change.values(clone_time=time, clone_address=address))


def add_pending(connection: Connection, row: PendingRow) -> None:
    """Keeps a request, and forgets those that nobody has confirmed in time."""
    connection.execute(sa.delete(tables.pending).where(tables.pending.c.expires <= row.created))
    connection.execute(sa.insert(tables.pending).values(asdict(row)))


def all_pending(connection: Connection, now: float) -> list[PendingRow]:
    """Requests that may still be confirmed, the oldest first."""
    table = tables.pending
    query = sa.select(table).where(table.c.expires > now).order_by(table.c.created)
    return [PendingRow(**row._mapping) for row in connection.execute(query)]


def remove_pending(connection: Connection, identifier: str) -> None:
    """Removes a request that a second person has confirmed."""
    connection.execute(sa.delete(tables.pending).where(tables.pending.c.identifier == identifier))


def add_token(connection: Connection, row: TokenRow) -> None:
    """Inserts a token in the place of a revoked one of the same name, if any."""
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


def token_named(connection: Connection, name: str) -> TokenRow | None:
    """The token of this name that was not revoked."""
    table = tables.tokens.c
    query = sa.select(tables.tokens).where(table.name == name, table.revoked.is_(False))
    row = connection.execute(query).first()
    return TokenRow(**row._mapping) if row else None


def revoke_token(connection: Connection, identifier: str) -> None:
    """The token does not hold any more."""
    change = sa.update(tables.tokens).where(tables.tokens.c.identifier == identifier)
    connection.execute(change.values(revoked=True))

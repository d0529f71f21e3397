"""Who may call what: one row for each RPC. docs/security.md shows this table, and a test tries every cell.

Roles of operators include what the one before may do, so far as this table says so and no further.
`noted` calls change something: they are in the audit log before they are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from roundtable.core.identity.credentials import OPERATOR_ROLES, Role

Caller = Literal["nobody", "agent", "relay", "viewer", "data-scientist", "operator", "admin", "coordinator"]
CALLERS: tuple[Caller, ...] = get_args(Caller)


@dataclass(frozen=True)
class Permission:
    """Who may call an RPC, whether each call is noted, and how many plain calls it counts for.

    The cost is that of calls that write whenever they are made, that read everything, or that compute.
    """

    callers: frozenset[Caller]
    noted: bool = False
    cost: float = 1.0


def _from(role: Role, *, noted: bool = False, cost: float = 1.0) -> Permission:
    """Permits this operators' role and those above it."""
    return Permission(frozenset(OPERATOR_ROLES[OPERATOR_ROLES.index(role) :]), noted, cost)


_AGENTS = Permission(frozenset(["agent"]))
_ANYBODY = Permission(frozenset(CALLERS))

PERMISSIONS: dict[str, Permission] = {
    "Agents/Connect": Permission(frozenset(["agent"]), cost=20.0),
    # Of a relay: what one of its silos may read. Other calls it makes as the silo that it names.
    "Agents/Download": Permission(frozenset(["agent", "relay"])),
    "Agents/UploadStatus": _AGENTS,
    "Agents/Upload": _AGENTS,
    "Agents/Renew": Permission(frozenset(["agent"]), cost=50.0),
    "Relays/Trunk": Permission(frozenset(["relay"]), cost=20.0),
    "Relays/Sum": Permission(frozenset(["relay"])),
    "Enrolment/Authority": _ANYBODY,
    "Enrolment/Enroll": _ANYBODY,
    "Operators/Status": _from("viewer"),
    "Operators/ListJobs": _from("viewer", cost=5.0),
    "Operators/GetJob": _from("viewer", cost=2.0),
    "Operators/WatchJob": _from("viewer", cost=5.0),
    "Operators/ListQueue": _from("viewer", cost=5.0),
    "Operators/MoveJob": _from("operator", noted=True),
    "Operators/ListClients": _from("viewer", cost=2.0),
    "Operators/DisableClient": _from("operator", noted=True),
    "Operators/EnableClient": _from("operator", noted=True),
    "Operators/AskReport": _from("operator", noted=True),
    "Operators/ShowReport": _from("operator"),
    "Operators/GetArtifact": _from("data-scientist"),
    "Operators/PutArtifact": _from("data-scientist"),
    # Of a data scientist: of jobs of their own.
    "Operators/ReadJobLog": _from("data-scientist", cost=5.0),
    "Operators/SubmitJob": _from("data-scientist", noted=True),
    # Of a data scientist: jobs of their own.
    "Operators/CancelJob": _from("data-scientist", noted=True),
    "Operators/PauseJob": _from("data-scientist", noted=True),
    "Operators/ResumeJob": _from("data-scientist", noted=True),
    "Operators/DeleteJob": _from("data-scientist", noted=True),
    "Operators/ShowPrivacy": _from("viewer", cost=50.0),
    "Operators/ShowJobPrivacy": _from("viewer", cost=50.0),
    "Operators/ExportPrivacy": _from("operator", cost=50.0),
    "Operators/SetPrivacyBudget": _from("operator", noted=True),
    "Operators/RemovePrivacyBudget": _from("operator", noted=True),
    "Administration/OpenPage": _from("viewer", noted=True),
    "Administration/GetProvenance": _from("viewer", cost=50.0),
    "Administration/Invite": _from("operator", noted=True),
    "Administration/Revoke": _from("operator", noted=True),
    "Administration/Confirm": _from("admin", noted=True),
    "Administration/ListPending": _from("admin"),
    "Administration/ReadAudit": _from("operator", cost=50.0),
    "Administration/CreateToken": _from("admin", noted=True),
    "Administration/RevokeToken": _from("admin", noted=True),
    "Administration/ListTokens": _from("admin"),
}
"""Service and method, without the package `roundtable.v1`."""


RANKS: tuple[Role, ...] = ("agent", "relay", *OPERATOR_ROLES)
"""Who may revoke whom: only who stands further on."""


def outranks(caller: Caller, role: Role) -> bool:
    """Whether the caller's role stands above the other one."""
    return caller in RANKS and RANKS.index(caller) > RANKS.index(role)


def permission_of(method: str) -> Permission | None:
    """For gRPC's name of a method, `/roundtable.v1.Service/Method`; None for one that is not in the table."""
    return PERMISSIONS.get(method.removeprefix("/roundtable.v1."))


def as_markdown() -> str:
    """The table as docs/security.md shows it."""
    lines = [f"| call | {' | '.join(CALLERS)} | noted |", "| --- " * (len(CALLERS) + 2) + "|"]
    for name, permission in PERMISSIONS.items():
        cells = ["yes" if caller in permission.callers else "" for caller in CALLERS]
        noted = "yes" if permission.noted else ""
        lines.append(f"| `{name}` | {' | '.join(cells)} | {noted} |")
    return "\n".join(lines)

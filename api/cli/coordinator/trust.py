"""`roundtable invite`, `token`, `operator`, `client revoke`: who may take part."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from roundtable.cli.shared.options import connection_options, json_option, require_connection
from roundtable.cli.shared.output import ago, as_dict, print_json, print_table, say
from roundtable.core.identity.credentials import CA_CERTIFICATE, OPERATOR_ROLES, TOKEN
from roundtable.core.quantities import parse_duration

if TYPE_CHECKING:
    from roundtable.administration import Administrator


class Duration(click.ParamType[float]):
    """A length of time such as 30m, 2d."""

    name = "time"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(float(value) if str(value).isdecimal() else value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def administrate(coordinator: str | None, credentials: Path | None) -> Administrator:
    """A connection for these calls, made of the two options."""
    from roundtable.administration import Administrator

    return Administrator(*require_connection(coordinator, credentials))


@click.command()
@click.argument("silo")
@click.option("--expires", type=Duration(), default="2d", show_default=True, help="How long it holds.")
@click.option("--uses", type=click.IntRange(1, 100), default=1, show_default=True, help="How often.")
@connection_options
@json_option
def invite(
    silo: str,
    expires: float,
    uses: int,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Invite SILO: print a token, once.

    It is kept nowhere. Hand it over on a channel that you trust; it says which authority to believe, and lets
    its holder enrol as SILO.
    """
    with administrate(coordinator, credentials) as operator:
        reply = operator.invite(silo, expires, uses)
    if as_json:
        print_json({"silo": silo, "uses": uses, **as_dict(reply)})
        return
    say(reply.invitation)
    times = "once" if uses == 1 else f"{uses} times"
    say(f"Holds {times}, until {_day(reply.expires)}. At the silo:", err=True)
    say("  roundtable client enroll --coordinator HOST   (and paste the token)", err=True)


@click.command("revoke")
@click.argument("silo")
@click.option("--reason", default="", help="For the audit log.")
@connection_options
@json_option
def revoke(silo: str, reason: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Void every certificate of SILO at once.

    On open connections too. It may be invited again.
    """
    with administrate(coordinator, credentials) as operator:
        known = [client.name for client in operator.clients()]
        calls = operator.revoke(silo, reason).calls
    if as_json:
        print_json({"silo": silo, "known": silo in known, "calls": calls})
        return
    say(f"Revoked {silo}: certificates and invitations are void; {calls} of its calls were cut off.")
    if silo not in known:
        names = ", ".join(known) or "none"
        say(f"No silo of that name has ever connected here ({names}): is it the right one?", err=True)


@click.group()
def token() -> None:
    """Tokens for operators who have no certificate."""


@token.command("create")
@click.argument("name")
@click.option("--role", type=click.Choice(OPERATOR_ROLES), required=True)
@click.option("--expires", type=Duration(), default="90d", show_default=True, help="How long it holds.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write a credentials folder instead of printing it."
)
@connection_options
@json_option
def create(
    name: str,
    role: str,
    expires: float,
    out: Path | None,
    coordinator: str | None,
    credentials: Path | None,
    as_json: bool,
) -> None:
    """Make a token for NAME; it is shown this once.

    Its holder puts it into a folder as the file `token` (chmod 600), with ca.crt beside it, and
    connects to the coordinator's `enrolment` address.
    """
    from roundtable.core.identity.certificates import read, write_new

    if out is not None and (out / TOKEN).exists():
        raise click.UsageError(f"{out / TOKEN} exists and is not overwritten; choose another folder")
    with administrate(coordinator, credentials) as operator:
        reply = operator.create_token(name, role, expires)
        authority = read(operator.folder / CA_CERTIFICATE)
    if out is not None:
        write_new(out, {TOKEN: reply.token.encode() + b"\n", CA_CERTIFICATE: authority})
    if as_json:
        secret = {"credentials": str(out)} if out is not None else {"token": reply.token}
        print_json({"name": name, "role": role, "expires": reply.expires, **secret})
    elif out is not None:
        say(f"Wrote {out}: --credentials {out} is {name}, {role}, until {_day(reply.expires)}.")
    else:
        say(reply.token)
        say(f"{name}, {role}, until {_day(reply.expires)}.", err=True)


@token.command("list")
@connection_options
@json_option
def list_tokens(coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """List tokens; their secrets are not kept."""
    with administrate(coordinator, credentials) as operator:
        known = operator.tokens()
    if as_json:
        print_json([as_dict(one) for one in known])
        return
    rows = [
        (one.name, one.role, one.author, ago(one.created), "revoked" if one.revoked else _day(one.expires))
        for one in known
    ]
    print_table(("token", "role", "made by", "made", "until"), rows, "There are no tokens.")


@token.command("revoke")
@click.argument("name")
@connection_options
@json_option
def revoke_token(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Void the token of NAME at once."""
    with administrate(coordinator, credentials) as admin:
        waiting = admin.revoke_token(name).pending
    if as_json:
        print_json({"name": name, "revoked": not waiting, "pending": waiting})
        return
    say(_waits(waiting) if waiting else f"Revoked the token {name}.")


@click.group("operator")
def operators() -> None:
    """Void operators' certificates, alone or as two."""


@operators.command("revoke")
@click.argument("name")
@click.option("--role", type=click.Choice(("relay", *OPERATOR_ROLES)), required=True)
@click.option("--reason", default="", help="For the audit log, and for who is to confirm it.")
@connection_options
@json_option
def revoke_operator(
    name: str, role: str, reason: str, coordinator: str | None, credentials: Path | None, as_json: bool
) -> None:
    """Void every certificate of NAME in this role at once.

    On open connections too. You revoke who ranks below you. An administrator is revoked by two: this asks,
    another one confirms. The only way back is a certificate that the root issues afterwards.
    """
    with administrate(coordinator, credentials) as admin:
        reply = admin.revoke(name, reason, role)
    if as_json:
        print_json({"name": name, "role": role, "pending": reply.pending, "calls": reply.calls})
        return
    say(
        _waits(reply.pending)
        if reply.pending
        else f"Revoked {name}, {role}; {reply.calls} of their calls were cut off."
    )


@operators.command("pending")
@connection_options
@json_option
def pending(coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """List what waits for a second administrator."""
    with administrate(coordinator, credentials) as admin:
        known = admin.pending()
    if as_json:
        print_json([as_dict(one) for one in known])
        return
    rows = [
        (one.request_id, one.action, f"{one.role}/{one.name}", one.author, one.reason, _day(one.expires))
        for one in known
    ]
    print_table(("request", "what", "of", "asked by", "reason", "until"), rows, "Nothing waits.")


@operators.command("confirm")
@click.argument("request")
@connection_options
@json_option
def confirm(request: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Do what another administrator has asked for in REQUEST."""
    with administrate(coordinator, credentials) as admin:
        calls = admin.confirm(request).calls
    if as_json:
        print_json({"request": request, "calls": calls})
        return
    say(f"Confirmed: it is void now; {calls} calls were cut off.")


def _waits(request: str) -> str:
    return (
        f"Nothing is void yet: request {request} waits a day for a second administrator "
        f"(roundtable operator confirm {request})."
    )


def _day(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M} UTC"

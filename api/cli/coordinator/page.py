"""`roundtable page`: the coordinator's page in a browser, as the holder of a certificate."""

from __future__ import annotations

from pathlib import Path

import click

from roundtable.cli.coordinator.trust import administrate
from roundtable.cli.shared.options import connection_options, json_option
from roundtable.cli.shared.output import print_json, say
from roundtable.core.errors import ResourceError
from roundtable.core.identity.handshake import split_address


@click.command("page")
@click.option("--open", "open_it", is_flag=True, help="Open it in this machine's browser.")
@connection_options
@json_option
def page(open_it: bool, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Print an address that opens the page, signed in.

    As whoever your credentials name. It is good once and for a minute; the session that it begins ends
    with your certificate, or when that is revoked.
    """
    with administrate(coordinator, credentials) as operator:
        reply = operator.open_page()
        host = reply.host or split_address(operator.address)[0]
    shown = f"[{host}]" if ":" in host.strip("[]") and not host.startswith("[") else host
    link = f"{'https' if reply.tls else 'http'}://{shown}:{reply.port}/sign-in#{reply.word}"
    if as_json:
        print_json({"address": link, "expires": reply.expires})
    else:
        say(link)
    if open_it and click.launch(link):
        raise ResourceError("no browser could be opened here: copy the address into one")

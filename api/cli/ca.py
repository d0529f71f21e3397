"""`roundtable ca`: certificates for everyone who takes part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

if TYPE_CHECKING:
    from roundtable.core.identity import Role

_FOLDER = click.Path(path_type=Path)


@click.group()
def ca() -> None:
    """Make a certificate authority and issue credentials."""


@ca.command("init")
@click.argument("folder", type=_FOLDER, default="ca")
@click.option("--name", default="Roundtable CA", show_default=True, help="Name of the authority.")
def init(folder: Path, name: str) -> None:
    """Make a new certificate authority in FOLDER (default: ./ca)."""
    from roundtable.core.identity import create_ca

    certificate = create_ca(folder, name)
    click.echo(f"Made {certificate} and {folder / 'ca.key'}.")
    click.echo("Keep ca.key secret and offline: whoever has it can pose as anyone.")
    click.echo(f"Next: roundtable ca issue coordinator --role coordinator --host HOSTNAME --ca {folder}")


@ca.command("issue")
@click.argument("name")
@click.option("--role", type=click.Choice(["coordinator", "agent", "operator"]), required=True)
@click.option("--host", "hosts", multiple=True, help="DNS name or IP address of the coordinator; repeatable.")
@click.option(
    "--ca", "ca_folder", type=_FOLDER, default="ca", show_default=True, help="Folder of the authority."
)
@click.option("--out", type=_FOLDER, help="Folder for the credentials; default: ./NAME.")
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="Validity.")
def issue(name: str, role: str, hosts: tuple[str, ...], ca_folder: Path, out: Path | None, days: int) -> None:
    """Issue credentials for NAME: ca.crt, node.crt and node.key in a folder.

    An agent also gets identity.crt and identity.key, with which it signs in secure aggregation.
    """
    from roundtable.core.identity import issue as issue_credentials
    from roundtable.core.identity import load_credentials

    folder = issue_credentials(ca_folder, name, cast("Role", role), out or Path(name), hosts, days=days)
    expires = load_credentials(folder).expires
    click.echo(f"Issued {role} {name!r} in {folder}, valid until {expires:%Y-%m-%d}.")
    click.echo(f"Move the folder to {name!r} over a secure channel and delete it here.")

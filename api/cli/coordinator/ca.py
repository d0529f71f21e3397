"""`roundtable ca`: certificates for everyone who takes part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import ask_secret, tell
from roundtable.core.identity.credentials import ROLES

if TYPE_CHECKING:
    from roundtable.core.identity.credentials import Role

_FOLDER = click.Path(path_type=Path)


@click.group()
def ca() -> None:
    """Make a certificate authority and issue credentials."""


@ca.command("init")
@click.argument("folder", type=_FOLDER, default="ca")
@click.option("--name", default="Roundtable CA", show_default=True, help="Name of the authority.")
@click.option("--passphrase", is_flag=True, help="Ask for a passphrase that seals ca.key.")
@json_option
def init(folder: Path, name: str, passphrase: bool, as_json: bool) -> None:
    """Make a new certificate authority in FOLDER (default: ./ca).

    ca.key is the root and belongs offline. issuing.key may certify silos that were invited and nobody
    else; a coordinator that enrols silos holds it (`ca issue --role coordinator --enrols`).
    """
    from roundtable.core.identity.credentials import create_ca

    seal = None
    if passphrase:
        seal = ask_secret("Passphrase", twice=True).encode()
    certificate = create_ca(folder, name, seal=seal)
    tell(
        as_json,
        {"folder": str(folder), "certificate": str(certificate), "key": str(folder / "ca.key"), "name": name},
        f"Made {certificate} and {folder / 'ca.key'}, and the issuing authority below it.",
        "Keep ca.key secret and offline: whoever has it can pose as anyone.",
        f"Next: roundtable ca issue coordinator --role coordinator --host HOSTNAME --ca {folder}",
    )


@ca.command("issuing")
@click.argument("folder", type=_FOLDER, default="ca")
@json_option
def issuing(folder: Path, as_json: bool) -> None:
    """Make a new issuing authority, before the old one ends.

    One ends after two years. The new one is put into FOLDER. Silos' certificates hold on, and are renewed by
    the new one once the coordinator has it.
    """
    from roundtable.core.identity.credentials import renew_issuing

    certificate = renew_issuing(folder)
    tell(
        as_json,
        {"certificate": str(certificate)},
        f"Made {certificate} anew, and its key. Give both to the coordinator: issue with --enrols,",
        "or copy issuing.crt and issuing.key into its credentials folder; they count at once.",
    )


@ca.command("issue")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), required=True)
@click.option("--host", "hosts", multiple=True, help="DNS name or IP address of the coordinator; repeatable.")
@click.option(
    "--ca", "ca_folder", type=_FOLDER, default="ca", show_default=True, help="Folder of the authority."
)
@click.option("--out", type=_FOLDER, help="Folder for the credentials; default: ./NAME.")
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="Validity.")
@click.option("--enrols", is_flag=True, help="Give the coordinator the issuing key, to enrol invited silos.")
@json_option
def issue(
    name: str,
    role: str,
    hosts: tuple[str, ...],
    ca_folder: Path,
    out: Path | None,
    days: int,
    enrols: bool,
    as_json: bool,
) -> None:
    """Issue credentials for NAME, in a folder.

    They are ca.crt, node.crt and node.key. With identity.crt and identity.key it signs: in secure
    aggregation, jobs, receipts and the audit log.
    """
    from roundtable.core.identity.credentials import issue as issue_credentials
    from roundtable.core.identity.credentials import load_credentials

    folder = issue_credentials(
        ca_folder, name, cast("Role", role), out or Path(name), hosts, days=days, enrols=enrols
    )
    expires = load_credentials(folder).expires
    tell(
        as_json,
        {"name": name, "role": role, "folder": str(folder), "expires": expires.isoformat()},
        f"Issued {role} {name!r} in {folder}, valid until {expires:%Y-%m-%d}.",
        f"Move the folder to {name!r} over a secure channel and delete it here.",
    )


@ca.command("revoke")
@click.argument("certificate", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--ca", "ca_folder", type=_FOLDER, default="ca", show_default=True, help="Folder of the authority."
)
@json_option
def revoke(certificate: Path, ca_folder: Path, as_json: bool) -> None:
    """Put a certificate on the authority's list, offline.

    CERTIFICATE is a .crt file that the authority issued. To void a silo's certificates at a coordinator that
    runs, use `roundtable client revoke`.
    """
    from roundtable.core.identity.revocation import revoke as revoke_certificate

    path = revoke_certificate(ca_folder, certificate)
    tell(
        as_json,
        {"list": str(path), "certificate": str(certificate)},
        f"Added to {path}. Copy it into the coordinator's credentials folder; it counts in seconds there,",
        "and the coordinator hands it on. To void a coordinator, copy it to the silos and operators too.",
    )

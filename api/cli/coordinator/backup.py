"""`roundtable backup` and `roundtable restore`: a coordinator's state in a folder, and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, say

_CONFIG = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command()
@click.argument("config", type=_CONFIG)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@json_option
def backup(config: Path, folder: Path, as_json: bool) -> None:
    """Write the state of the coordinator of CONFIG (coordinator.toml) into the new FOLDER, verified, signed.

    The coordinator may run meanwhile. Certificates and keys are not part of it.
    """
    from roundtable.server.storage.backup import back_up
    from roundtable.settings import coordinator_settings

    manifest = back_up(coordinator_settings(config), folder)
    if as_json:
        print_json(_summary(folder, manifest))
        return
    say(f"Backed up {len(manifest['artifacts'])} artifacts and the database into {folder}.")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("config", type=_CONFIG)
@click.option(
    "--new-identity",
    is_flag=True,
    help="Silos have gone on since the backup: accept that this is lost, and be another coordinator to them.",
)
@click.option(
    "--accept-ended",
    is_flag=True,
    help="Take a backup whose signature's certificate has ended: it was never out of your hands.",
)
@json_option
def restore(folder: Path, config: Path, new_identity: bool, accept_ended: bool, as_json: bool) -> None:
    """Fill the empty database and artifact folder of CONFIG (coordinator.toml) from the backup in FOLDER.

    Refused unless this coordinator has signed it and everything in it is as it was signed.
    """
    from roundtable.server.storage.backup import restore as fill
    from roundtable.settings import coordinator_settings

    manifest = fill(coordinator_settings(config), folder, new_identity, accept_ended)
    if as_json:
        print_json(_summary(folder, manifest))
        return
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["time"]))
    say(f"Restored the state of {made}: {len(manifest['artifacts'])} artifacts.")
    if new_identity:
        say("Privacy that was spent after the backup is not in the ledger: charge it again if you know it.")


def _summary(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    artifacts = len(manifest["artifacts"])
    return {"folder": str(folder), "artifacts": artifacts, "created": manifest["time"]}

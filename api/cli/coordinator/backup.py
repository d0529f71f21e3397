"""`roundtable backup` and `roundtable restore`: a coordinator's state in a folder, and back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import amount, ask_secret, interruptible, print_json, say, working

if TYPE_CHECKING:
    from roundtable.server.config import ServerConfig
    from roundtable.server.storage.backup import MadeBackup
    from roundtable.server.storage.sealing import BackupKey

Command = TypeVar("Command", bound=Callable[..., Any])

_CONFIG = click.Path(path_type=Path, dir_okay=False, exists=True)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_THERE = click.Path(path_type=Path, file_okay=False, exists=True)
PASSPHRASE = "ROUNDTABLE_BACKUP_PASSPHRASE"


def _key_options(command: Command) -> Command:
    command = click.option(
        "--passphrase",
        is_flag=True,
        help=f"It is encrypted with a passphrase: of {PASSPHRASE}, or asked for.",
    )(command)
    return click.option(
        "--key",
        "key_file",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help="It is encrypted with the key in this file, 64 hexadecimal digits (`openssl rand -hex 32`).",
    )(command)


def _key(key_file: Path | None, passphrase: bool, *, new: bool) -> BackupKey | None:
    from roundtable.server.storage.sealing import BackupKey

    if key_file is not None and passphrase:
        raise click.UsageError("--key and --passphrase: a backup is encrypted with one of them")
    if key_file is not None:
        return BackupKey.of_file(key_file)
    if passphrase:
        words = os.environ.get(PASSPHRASE) or ask_secret("Passphrase of the backup", twice=new)
        return BackupKey.of_passphrase(words)
    return None


@click.command()
@click.argument("config", type=_CONFIG)
@click.argument("folder", type=_FOLDER)
@click.option(
    "--since",
    type=_THERE,
    help="An earlier backup on the same disk: what it has is not copied again, but shared with it.",
)
@_key_options
@json_option
def backup(
    config: Path, folder: Path, since: Path | None, key_file: Path | None, passphrase: bool, as_json: bool
) -> None:
    """Write a coordinator's state into a folder, verified, signed.

    CONFIG is its coordinator.toml; FOLDER is new. The coordinator may run meanwhile; it deletes no artifacts
    until the backup is made. FOLDER is there once the backup is whole, and not before. Certificates and keys
    are not part of it.
    """
    from roundtable.server.storage.backup import back_up
    from roundtable.settings import coordinator_settings

    key = _key(key_file, passphrase, new=since is None)
    with interruptible(f"Nothing was left in {folder}."), working(f"backing up into {folder}") as tell:
        made = back_up(coordinator_settings(config), folder, since=since, key=key, tell=tell)
    if as_json:
        print_json({**_summary(folder, made.manifest), **_copied(made)})
        return
    encrypted = ", encrypted" if made.encrypted else ""
    say(f"Backed up {len(made.manifest['artifacts'])} artifacts and the database into {folder}{encrypted}.")
    if since is not None:
        say(
            f"{made.shared} artifacts ({amount(made.shared_bytes)}) are shared with {since}, "
            f"{made.copied} ({amount(made.copied_bytes)}) were copied."
        )
    if made.again:
        say(f"{made.again} that {since} mentions were copied again: damaged there, or on another disk.")


@click.command()
@click.argument("folder", type=_THERE)
@click.argument("config", type=_CONFIG)
@click.option(
    "--verify",
    is_flag=True,
    help="A drill: restore into a temporary place, look at what came of it, and leave nothing.",
)
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
@_key_options
@json_option
def restore(
    folder: Path,
    config: Path,
    verify: bool,
    new_identity: bool,
    accept_ended: bool,
    key_file: Path | None,
    passphrase: bool,
    as_json: bool,
) -> None:
    """Fill an empty coordinator from a backup.

    The backup is in FOLDER; the database and the artifact folder are those of CONFIG (coordinator.toml).
    Refused unless this coordinator has signed it and everything in it is as it was signed. With --verify the
    database and artifacts of CONFIG are not touched: its credentials alone are used.
    """
    from roundtable.server.storage.backup_restore import restore as fill
    from roundtable.settings import coordinator_settings

    if verify and new_identity:
        raise click.UsageError("--verify restores nothing for good: --new-identity has no meaning there")
    settings, key = coordinator_settings(config), _key(key_file, passphrase, new=False)
    if verify:
        _drill(settings, folder, accept_ended, key, as_json)
        return
    with interruptible("Nothing was restored."), working(f"restoring {folder}") as tell:
        manifest = fill(settings, folder, new_identity, accept_ended, key=key, tell=tell)
    if as_json:
        print_json(_summary(folder, manifest))
        return
    say(f"Restored the state of {_moment(manifest['time'])}: {len(manifest['artifacts'])} artifacts.")
    if new_identity:
        say("Privacy that was spent after the backup is not in the ledger: charge it again if you know it.")


def _drill(
    settings: ServerConfig, folder: Path, accept_ended: bool, key: BackupKey | None, as_json: bool
) -> None:
    from roundtable.server.storage.backup_drill import rehearse

    with interruptible("Nothing was left of the drill."), working(f"trying to restore {folder}") as tell:
        found = rehearse(settings, folder, accept_ended, key=key, tell=tell)
    if as_json:
        print_json({"folder": str(folder), **asdict(found)})
        return
    jobs = ", ".join(f"{count} {status}" for status, count in found.jobs.items()) or "none"
    say(f"{folder} can be restored. It holds the state of {_moment(found.created)}. Checked:")
    say(f"  manifest    signed by this coordinator{', opened with the key' if found.encrypted else ''}")
    say(f"  tables      {found.files}, with {found.rows} rows, all of them restored")
    say(f"  database    opened at level {found.opened_at}; the backup was made at {found.made_at}")
    say(f"  artifacts   {found.artifacts}, {amount(found.artifact_bytes)}; the digest of each, as restored")
    say(f"  jobs        {jobs}; every configuration was read, who goes on has its model")
    say(f"  audit log   {found.audit_entries} entries, chained, signed by {', '.join(found.signers)}")
    say("Nothing was left of it.")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _summary(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    artifacts = len(manifest["artifacts"])
    return {"folder": str(folder), "artifacts": artifacts, "created": manifest["time"]}


def _copied(made: MadeBackup) -> dict[str, Any]:
    return {name: value for name, value in vars(made).items() if name != "manifest"}

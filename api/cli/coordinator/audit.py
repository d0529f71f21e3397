"""`roundtable audit`, `roundtable model verify`: what really happened, checked offline."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.coordinator.trust import administrate
from roundtable.cli.shared.options import connection_options, json_option
from roundtable.cli.shared.output import print_json, say, tell
from roundtable.core.paths import written_whole

if TYPE_CHECKING:
    from roundtable.core.evidence.audit_log import Log

UNPROVEN = 3
"""Exit code: nothing contradicts what was checked, but something of it is proven by nothing."""
NO_PROOF_YET = 4
"""Exit code: nothing contradicts what was checked, and what is not proven yet is still asked for."""
FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
ca_option = click.option(
    "--ca", "authority", type=FILE, default="ca.crt", show_default=True, help="The root's certificate."
)
archive_option = click.option(
    "--archive",
    "archives",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="An archive that the log names, or a folder of them. May be repeated.",
)


@click.group()
def audit() -> None:
    """Export and check the audit log."""


@audit.command("export")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--live", is_flag=True, help="Without what is archived: signed statements stand for that.")
@connection_options
@json_option
def export(
    output: Path, live: bool, coordinator: str | None, credentials: Path | None, as_json: bool
) -> None:
    """Write the coordinator's whole audit log as JSON lines.

    It is signed up to its end. What the file held stays until the new log is whole.
    """
    count = 0
    with administrate(coordinator, credentials) as operator, written_whole(output) as file:
        for line in operator.audit(live=live):
            file.write(line + "\n")
            count += line.startswith('{"entry"')
    tell(
        as_json,
        {"file": str(output), "entries": count},
        f"Wrote {count} entries to {output}. Keep it: a later export must go on where this one ends.",
    )


@audit.command("verify")
@click.argument("file", type=FILE)
@ca_option
@click.option("--since", type=FILE, help="An earlier export: FILE must contain all of it, unchanged.")
@archive_option
@click.option("--silo", is_flag=True, help="FILE is a silo's own log, audit.jsonl in its state folder.")
@click.option(
    "--witness",
    "witnesses",
    type=FILE,
    multiple=True,
    help="A silo's own log: its receipts show what the coordinator's log held by then. May be repeated.",
)
@json_option
def verify(
    file: Path,
    authority: Path,
    since: Path | None,
    archives: tuple[Path, ...],
    silo: bool,
    witnesses: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Find any entry of FILE that was changed, removed, or moved. Needs the root's certificate only.

    Exit code 3: nothing contradicts FILE, but its last entries are proven by nothing, or entries are archived
    and their archive was not looked at.
    """
    from roundtable.core.evidence.audit_log import check_signed, compare
    from roundtable.core.evidence.cross_check import witnessed

    if silo and witnesses:
        raise click.UsageError("--witness is for the coordinator's log: leave --silo out")
    log = read_export(file, authority, silo, archives)
    if not silo:
        check_signed(log)
    if since is not None:
        compare(read_export(since, authority, silo), log)
    seen = [
        sequence
        for path in witnesses
        for sequence in witnessed(log, read_export(path, authority, True), authority.read_bytes())
    ]
    proven = log.proven(time.time(), seen)
    if as_json:
        values = {"entries": log.end, "signed": log.sealed, "proven": proven, "not_at_hand": _missing(log)}
        print_json({**values, "signers": sorted(log.signers)})
    else:
        _say(file, log, proven)
    return UNPROVEN if proven < log.end or log.absent else 0


def _missing(log: Log) -> int:
    """How many entries are in archives that were not looked at."""
    return sum(archive.last + 1 - archive.first for archive in log.absent)


def _say(file: Path, log: Log, proven: int) -> None:
    """What a log that holds together proves, and what it does not."""
    count, signers = log.end, ", ".join(sorted(log.signers))
    signed = f"signed by {signers} up to entry {log.sealed}" if log.seals else "unsigned"
    say(f"{file} holds together: {count} entries, {signed}.")
    if log.absent:
        names = ", ".join(archive.name for archive in log.absent)
        say(
            f"ARCHIVED: of these {_missing(log)} entries are archived, archive not at hand ({names}). "
            "Its statement is signed and the chain goes on behind it; the entries themselves were not looked "
            "at: --archive FILE."
        )
    if log.sealed > proven:
        ended = datetime.fromtimestamp(log.seals[log.sealed].ends, UTC)
        say(
            f"UNPROVEN: entries {proven + 1} to {log.sealed}. Their signature's certificate ended on "
            f"{ended:%Y-%m-%d}: who has its key by now could have made them since. The log of a silo shows "
            "what it held before: --witness FILE."
        )
    if count > log.sealed:
        say(
            f"UNPROVEN: entries {log.sealed + 1} to {count} are chained, but not signed: anybody who could "
            "write this file may have added them. An export is signed up to its end; a silo's log every "
            "twenty entries and when its agent stops."
        )
    for item in log.entries:
        if unsigned := item.detail.get("unsigned"):
            say(
                f"Entries {unsigned[0]} to {unsigned[1]} stood unsigned when the coordinator was started at "
                f"entry {item.sequence}: it had been killed, or somebody added them to its database."
            )


@audit.command("cross-check")
@click.argument("coordinators", metavar="COORDINATOR_LOG", type=FILE)
@click.argument("silos", metavar="SILO_LOG", type=FILE)
@ca_option
@archive_option
@click.option(
    "--silo-archive",
    "silo_archives",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="The same for the silo's log.",
)
@json_option
def cross_check(
    coordinators: Path,
    silos: Path,
    authority: Path,
    archives: tuple[Path, ...],
    silo_archives: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Compare a silo's log with the coordinator's.

    Exit code 1: they contradict each other. 3: nothing does, but the silo has lost a proof, or an archive was
    not compared. 4: it is still to get one; compare again when its agent has had the coordinator's answer.
    """
    from roundtable.core.evidence.audit_log import check_signed
    from roundtable.core.evidence.cross_check import compare_logs

    theirs = read_export(coordinators, authority, False, archives)
    own = read_export(silos, authority, True, silo_archives)
    check_signed(theirs)
    name = owner_of(silos, own)
    found = compare_logs(theirs, own, name, authority.read_bytes())
    receipts = sum(item.action == "receipt" for item in own.entries)
    if as_json:
        print_json({"silo": name, "receipts": receipts, **asdict(found)})
    else:
        for word, lines in (
            ("CONTRADICTION", found.contradictions),
            ("UNPROVEN", found.lost),
            ("WAITING", found.pending),
            ("ARCHIVED", found.absent),
        ):
            for line in lines:
                say(f"{word}: {line}")
        if found == type(found)():
            say(f"Both logs agree on {name}: {receipts} receipts, all signed by the coordinator.")
    if found.contradictions:
        return 1
    return UNPROVEN if found.lost or found.absent else NO_PROOF_YET if found.pending else 0


@click.group()
def model() -> None:
    """Where a model comes from."""


@model.command("provenance")
@click.argument("job")
@click.option("--round", "number", type=click.IntRange(0), default=0, help="Default: the newest.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@connection_options
@json_option
def provenance(
    job: str, number: int, output: Path, coordinator: str | None, credentials: Path | None, as_json: bool
) -> None:
    """Fetch the coordinator's signed statement of a model.

    It is of JOB's model: keep it beside the model's file.
    """
    with administrate(coordinator, credentials) as operator, written_whole(output) as file:
        file.write(operator.provenance(job, number) + "\n")
    tell(
        as_json,
        {"job": job, "round": number or None, "file": str(output)},
        f"Wrote {output}. Check it with: roundtable model verify MODEL --statement {output}",
    )


@model.command("verify")
@click.argument("file", type=FILE)
@click.option("--statement", type=FILE, help="Default: FILE with .provenance.json at its end.")
@click.option("--log", "export", type=FILE, help="The coordinator's audit log: it must hold every round.")
@archive_option
@ca_option
@json_option
def verify_model(
    file: Path,
    statement: Path | None,
    export: Path | None,
    archives: tuple[Path, ...],
    authority: Path,
    as_json: bool,
) -> int:
    """Check offline that a file is the model of a statement.

    Says what the signed statement says. Exit code 3: the certificate that signed it has ended since, and no
    --log shows that it is so old.
    """
    from roundtable.core.evidence.provenance_check import check_provenance, is_recorded

    place = statement or file.with_name(f"{file.name}.provenance.json")
    provenance, now = check_provenance(file, place, authority.read_bytes()), time.time()
    values, proven = provenance.values, provenance.ends >= now
    if export is not None:
        log = read_export(export, authority, False, archives)
        proven = is_recorded(provenance, log, log.proven(now))
    if as_json:
        print_json({"signer": provenance.signer, "proven": proven, **values})
        return 0 if proven else UNPROVEN
    rounds = values["rounds"]
    silos = {name for one in rounds for name in one.get("participants", ())}
    who = f"{len(silos)} silos under pseudonyms" if silos else "silos that may not be told"
    made = datetime.fromtimestamp(rounds[-1]["ended"], UTC)
    say(f"{file} is the model of job {values['job']} ({values['name']}), round {rounds[-1]['round']}.")
    say(f"  signed by       {provenance.signer}, Roundtable {values['version']}")
    say(f"  made            {made:%Y-%m-%d %H:%M} UTC, submitted by {values['submitter']}")
    say(f"  participants    {who}, {len(rounds)} rounds")
    say(f"  configuration   {values['config']}")
    say(f"  privacy         {json.dumps(values['privacy']) if values['privacy'] else 'none was asked for'}")
    if not proven and export is None:
        ended = datetime.fromtimestamp(provenance.ends, UTC)
        say(
            f"UNPROVEN: the certificate of {provenance.signer} ended on {ended:%Y-%m-%d}; that the statement "
            "was signed before is its own word. The audit log shows it: --log FILE."
        )
    elif not proven:
        say(f"UNPROVEN: the proven part of {export} does not hold these rounds.")
    return 0 if proven else UNPROVEN


def owner_of(file: Path, log: Log) -> str:
    """The silo whose own log it is; a mistake of usage where that is not one."""
    names = {str(item.detail["client"]) for item in log.entries if item.action == "receipt"} | log.signers
    if len(names) != 1:
        raise click.UsageError(f"{file} is the log of {len(names)} silos, not of one")
    return names.pop()


def read_export(file: Path, authority: Path, silo: bool, archives: tuple[Path, ...] = ()) -> Log:
    """A log that holds together: the coordinator's, or a silo's own, with archives that it names."""
    from roundtable.core.evidence.archive_shelf import ArchiveShelf

    shelf = ArchiveShelf(archives, authority.read_bytes(), "agent" if silo else "coordinator")
    with file.open(encoding="utf-8", errors="replace") as lines:
        log = shelf.read(lines)
    shelf.check_all_used(str(file))
    return log

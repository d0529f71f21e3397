"""Two logs side by side where parts of them are archived: what is compared, and what is said of the rest."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from roundtable.cli.main import cli
from roundtable.core.evidence.archive_shelf import write_archive
from roundtable.core.evidence.audit_archive import LinesDigest, LogArchive, statement_line
from roundtable.core.evidence.audit_log import AuditEntry, entry, read_log
from roundtable.core.evidence.cross_check import compare_logs, witnessed
from roundtable.core.identity.credentials import SiloIdentity, create_ca, issue, load_silo_identity
from roundtable.core.identity.signing import envelope

ROUNDS = 4
DIGEST = "{:064x}".format


@dataclass(frozen=True)
class Written:
    """A log: its whole lines, those of the live part, and the archive's file."""

    whole: list[str]
    live: list[str]
    archive: Path


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, SiloIdentity, SiloIdentity]:
    folder = tmp_path_factory.mktemp("parties")
    ca = create_ca(folder / "ca").read_bytes()
    issue(folder / "ca", "hub", "coordinator", folder / "hub", ["localhost"])
    issue(folder / "ca", "north", "agent", folder / "north")
    return ca, load_silo_identity(folder / "hub"), load_silo_identity(folder / "north")


def sealed(who: SiloIdentity, last: AuditEntry) -> str:
    values = {"sequence": last.sequence, "hash": last.hash, "time": time.time()}
    return json.dumps({"seal": envelope(who, "seal", values)})


def archived(who: SiloIdentity, items: list[AuditEntry], count: int, folder: Path) -> Written:
    """A log of which the first `count` entries are archived."""
    gone = [*(item.to_line() for item in items[:count]), sealed(who, items[count - 1])]
    rest = [*(item.to_line() for item in items[count:]), sealed(who, items[-1])]
    digest = LinesDigest()
    for line in gone:
        digest.add(line)
    first, last = items[0], items[count - 1]
    archive = LogArchive(first.sequence, last.sequence, first.previous, last.hash, digest.hex())
    statement = statement_line(archive.signed(who, time.time()))
    write_archive(folder / archive.name, [*gone, statement])
    return Written([*gone, statement, *rest], [statement, *rest], folder / archive.name)


def chain(items: list[AuditEntry]) -> list[AuditEntry]:
    last, made = None, []
    for item in items:
        last = item.after(last)
        made.append(last)
    return made


def both(
    parties: tuple[bytes, SiloIdentity, SiloIdentity], folder: Path, invented: int = 0
) -> tuple[Written, Written]:
    """Four rounds as both wrote them down, half of each log archived. In `invented` the silo took no part."""
    _, hub, north = parties
    theirs = chain(
        [
            entry(
                1e9 + number,
                "coordinator",
                "round_committed",
                "j",
                {
                    "config": "c" * 64,
                    "round": number,
                    "attempt": 1,
                    "cohort": ["north"],
                    "updates": {"north": DIGEST(number)},
                },
            )
            for number in range(1, ROUNDS + 1)
        ]
    )
    own = []
    for number in range(1, ROUNDS + 1):
        if number == invented:
            continue
        # Each receipt names the entry of the round before.
        before = theirs[number - 2] if number > 1 else None
        values = {
            "client": "north",
            "job": "j",
            "round": number,
            "attempt": 1,
            "update": DIGEST(number),
            "size": 4,
            "status": "ACCEPTED",
            "time": time.time(),
            "sealed": before.sequence if before else 0,
            "sealed_hash": before.hash if before else "",
        }
        document = envelope(hub, "receipt", values)
        proof = {name: document[name] for name in ("signature", "certificate")}
        own.append(entry(1e9 + number, "coordinator", "receipt", "j", {**values, **proof}))
    half = len(own) // 2
    return archived(hub, theirs, ROUNDS // 2, folder / "hub"), archived(
        north, chain(own), half, folder / "north"
    )


def test_receipts_are_compared_over_archives_and_nobody_is_accused_for_what_is_not_at_hand(
    parties: tuple[bytes, SiloIdentity, SiloIdentity], tmp_path: Path
) -> None:
    ca = parties[0]
    theirs, own = both(parties, tmp_path)
    for left in (theirs.whole, theirs.live):
        for right in (own.whole, own.live):
            logs = read_log(left, ca), read_log(right, ca, "agent")
            found = compare_logs(*logs, "north", ca)
            missing = (left is theirs.live) + (right is own.live)
            assert (found.contradictions, found.lost, found.pending) == ((), (), ())
            assert len(found.absent) == missing
            # Whose hash nobody here knows is proven by no witness.
            hashes = [logs[0].hash_of(sequence) for sequence in witnessed(*logs, ca)]
            assert all(hashes)


def test_what_is_at_hand_still_contradicts(
    parties: tuple[bytes, SiloIdentity, SiloIdentity], tmp_path: Path
) -> None:
    ca = parties[0]
    theirs, own = both(parties, tmp_path, invented=4)
    coordinator = read_log(theirs.live, ca)
    (said,) = compare_logs(coordinator, read_log(own.whole, ca, "agent"), "north", ca).contradictions
    assert "an update that the silo never sent" in said
    assert compare_logs(coordinator, read_log(own.live, ca, "agent"), "north", ca).contradictions == ()


def test_cross_check_takes_the_archives_of_both(
    parties: tuple[bytes, SiloIdentity, SiloIdentity], tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_bytes(parties[0])
    theirs, own = both(parties, tmp_path)
    for name, written in (("theirs", theirs), ("own", own)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in written.live))

    def run(*more: str | Path) -> Result:
        words = [
            "audit",
            "cross-check",
            tmp_path / "theirs",
            tmp_path / "own",
            "--ca",
            tmp_path / "ca.crt",
            *more,
        ]
        return CliRunner().invoke(cli, [str(word) for word in words], standalone_mode=False)

    alone = run()
    assert (alone.return_value, alone.output.count("ARCHIVED: ")) == (3, 2), alone.output
    half = run("--archive", theirs.archive)
    assert (half.return_value, half.output.count("of the silo's log are archived")) == (3, 1)
    whole = run("--archive", theirs.archive.parent, "--silo-archive", own.archive)
    assert (whole.return_value, "4 receipts" in whole.output) == (0, True), whole.output
    exchanged = run("--archive", own.archive)
    assert "does not hold" in str(exchanged.exception)

"""The silo's own log, on a disk that is full for a while."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from file_limit import files_of_at_most

from roundtable.client.agent import silo_log
from roundtable.client.agent.release_ledger import ReleaseLedger
from roundtable.client.agent.silo_log import SiloLog
from roundtable.client.step_key import StepKey
from roundtable.core.errors import AuditError, IdentityError, ProtocolError, ResourceError
from roundtable.core.evidence.archive_shelf import ArchiveShelf
from roundtable.core.evidence.audit_log import Log
from roundtable.core.identity.credentials import create_ca, issue


def test_a_line_that_a_full_disk_cut_off_spoils_none_that_follows(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = SiloLog(path, tmp_path)
    log.note("coordinator", "asked", "j", round=1)
    with (
        files_of_at_most(path.stat().st_size + 20),
        pytest.raises(ResourceError, match="nothing is done without it: the silo's disk is full"),
    ):
        log.note("coordinator", "asked", "j", round=2)
    log.note("coordinator", "asked", "j", round=3)
    # Another process takes it up as it is.
    SiloLog(path, tmp_path).note("coordinator", "asked", "j", round=4)
    entries = [json.loads(line)["entry"] for line in path.read_text().splitlines()]
    assert [(entry["sequence"], entry["detail"]["round"]) for entry in entries] == [(1, 1), (2, 3), (3, 4)]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def silo(tmp_path: Path) -> Path:
    """A silo's credentials."""
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "north", "agent", tmp_path / "north", [])
    return tmp_path / "north"


def written(path: Path, silo: Path, monkeypatch: pytest.MonkeyPatch, days: float = 10.0) -> SiloLog:
    """45 entries of today, and a clock that stands 60 days ahead."""
    log = SiloLog(path, silo, days)
    for number in range(45):
        log.note("coordinator", "instructed", "j", round=number, config="c" * 64)
    later = time.time() + 60 * 86400
    monkeypatch.setattr(silo_log.time, "time", lambda: later)
    return log


def checked(path: Path, silo: Path, *archives: Path) -> Log:
    shelf = ArchiveShelf(archives, (silo / "ca.crt").read_bytes(), "agent")
    log = shelf.read(path.read_text().splitlines())
    shelf.check_all_used(path.name)
    return log


def test_old_entries_become_an_archive_and_the_chain_goes_on(
    tmp_path: Path, silo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "audit.jsonl", tmp_path / "archives"
    log = written(path, silo, monkeypatch)
    log.note("north", "drained")
    log.seal()
    # Of 46 entries 40 were sealed before the last; 45 are old.
    short, whole = checked(path, silo), checked(path, silo, folder)
    assert [(part.first, part.last) for part in short.absent] == [(1, 40)]
    assert [item.sequence for item in whole.entries] == list(range(1, 47))
    assert (whole.sealed, short.signers) == (46, {"north"})
    assert path.stat().st_mode & 0o777 == 0o600
    SiloLog(path, silo, 10.0).note("north", "resumed")
    assert checked(path, silo, folder).end == 47
    (folder / "audit-0000000001-0000000040.jsonl.gz").write_bytes(b"")
    with pytest.raises(AuditError, match="not a statement of an archive"):
        checked(path, silo, folder)


@pytest.mark.parametrize("when", ["written", "replaced"])
def test_a_silo_that_stops_while_it_archives_has_lost_and_doubled_nothing(
    tmp_path: Path, silo: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path, folder = tmp_path / "audit.jsonl", tmp_path / "archives"
    log = written(path, silo, monkeypatch)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "written":
            patch.setattr(silo_log, "unpack", crash)
        else:
            patch.setattr(silo_log, "replace_synced", crash)
        log.note("north", "drained")
        with pytest.raises(KeyboardInterrupt):
            log.seal()
    assert checked(path, silo).end == 46
    assert len(list(folder.iterdir())) == 1
    # Started again much later it archives more, and once.
    later = silo_log.time.time() + 60 * 86400
    monkeypatch.setattr(silo_log.time, "time", lambda: later)
    again = SiloLog(path, silo, 10.0)
    again.note("north", "resumed")
    again.seal()
    assert [path.name for path in folder.iterdir()] == ["audit-0000000001-0000000046.jsonl.gz"]
    assert [item.sequence for item in checked(path, silo, folder).entries] == list(range(1, 48))


def test_an_archive_that_the_log_does_not_hold_is_kept(
    tmp_path: Path, silo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the state folder was put back from a backup that is older than the archive."""
    path, folder = tmp_path / "audit.jsonl", tmp_path / "archives"
    (tmp_path / "other").mkdir()
    for place in (tmp_path / "other", tmp_path):
        log = written(place / "audit.jsonl", silo, monkeypatch)
        log.note("north", "drained")
        if place != tmp_path:
            log.seal()
            (place / "archives").rename(folder)
            before = {file: file.read_bytes() for file in folder.iterdir()}
            monkeypatch.undo()
    log.seal()
    assert "holds entries that the log has not" in caplog.text
    assert {file: file.read_bytes() for file in folder.iterdir()} == before
    assert checked(path, silo).absent == []


def test_an_archived_silo_still_refuses_what_it_did_before(
    tmp_path: Path, silo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is evidence alone: a coordinator gains nothing from asking again once it is archived."""
    ledger = ReleaseLedger(tmp_path / "releases.jsonl", most=1)
    ledger.begin(StepKey("j", 3, 1, "train"))
    ledger.update(StepKey("j", 3, 1, "train"), "m", "d" * 64)
    others = {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    log = written(tmp_path / "audit.jsonl", silo, monkeypatch)
    log.note("north", "drained")
    log.seal()
    assert checked(tmp_path / "audit.jsonl", silo).absent
    assert {file: file.read_bytes() for file in others} == others
    again = ReleaseLedger(tmp_path / "releases.jsonl", most=1)
    with pytest.raises(ProtocolError, match="no attempt is begun twice"):
        again.begin(StepKey("j", 3, 1, "train"))
    with pytest.raises(ProtocolError, match="have left this silo"):
        again.update(StepKey("j", 4, 1, "train"), "m", "e" * 64)


def test_archives_of_a_silo_need_its_signature(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"identity\.crt|identity\.key"):
        SiloLog(tmp_path / "audit.jsonl", tmp_path, 365.0)

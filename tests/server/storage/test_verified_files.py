"""What is known to be whole over restarts, and when it is looked at again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from roundtable.server.storage import artifact_store, verified_files
from roundtable.server.storage.artifact_store import ArtifactStore, DamagedArtifact
from roundtable.server.storage.verified_files import VerifiedFiles

DATA = b"a model" * 1000
DIGEST = blake3(DATA).hexdigest()


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_files, "WORTH_KEEPING", 1000)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the files that a store has hashed."""
    found: list[str] = []
    check = ArtifactStore._verify

    def verify(self: ArtifactStore, path: Path, digest: str) -> None:
        found.append(digest)
        check(self, path, digest)

    monkeypatch.setattr(artifact_store.ArtifactStore, "_verify", verify)
    return found


def test_a_restart_hashes_no_large_file_again(tmp_path: Path, hashed: list[str]) -> None:
    store = ArtifactStore(tmp_path, "x")
    digest, _ = store.create([DATA])
    small, _ = store.create([b"small"])
    again = ArtifactStore(tmp_path, "x")
    assert again.path(digest).read_bytes() == DATA
    assert hashed == []
    again.path(small)
    assert hashed == [small]


def test_a_file_that_was_written_to_is_hashed_and_found_damaged(tmp_path: Path, hashed: list[str]) -> None:
    digest, _ = ArtifactStore(tmp_path, "x").create([DATA])
    place = tmp_path / "objects" / digest[:2] / digest
    place.write_bytes(b"b" + DATA[1:])
    with pytest.raises(DamagedArtifact):
        ArtifactStore(tmp_path, "x").path(digest)
    assert hashed == [digest]


def test_what_was_read_damaged_is_not_known_after_a_restart(tmp_path: Path, hashed: list[str]) -> None:
    """A disk that gives other bytes back leaves no mark on the file: who has read them says so, for good."""
    store = ArtifactStore(tmp_path, "x")
    digest, _ = store.create([DATA])
    place = store.path(digest)
    before = place.stat()
    place.write_bytes(b"b" + DATA[1:])
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ArtifactStore(tmp_path, "x").path(digest) == place
    with pytest.raises(DamagedArtifact):
        store.mend(digest)
    with pytest.raises(DamagedArtifact):
        ArtifactStore(tmp_path, "x").path(digest)


def test_a_torn_or_foreign_file_of_lines_is_passed_over(tmp_path: Path, hashed: list[str]) -> None:
    digest, _ = ArtifactStore(tmp_path, "x").create([DATA])
    lines = tmp_path / "verified"
    whole = lines.read_bytes()
    foreign = (b"a b c d e\n" + whole[:-3], b"a 1 2 " + b"9" * 5000 + b"\n")
    for torn in (whole[:-1], whole[: len(whole) // 2], b"\xff\xfe\n", *foreign):
        lines.write_bytes(torn)
        hashed.clear()
        assert ArtifactStore(tmp_path, "x").path(digest).read_bytes() == DATA
        assert hashed == [digest]


def test_lines_of_deleted_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified_files, "_SPARE_LINES", 5)
    path = tmp_path / "data"
    path.write_bytes(DATA)
    files = VerifiedFiles(tmp_path / "verified")
    for number in range(50):
        files.note(f"{number:064x}", path)
        if number:
            files.forget(f"{number - 1:064x}")
    assert len((tmp_path / "verified").read_text().splitlines()) <= 10
    again = VerifiedFiles(tmp_path / "verified")
    again.load()
    assert again.known(f"{49:064x}", path)
    assert not again.known(f"{48:064x}", path)

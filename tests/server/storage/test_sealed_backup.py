"""Encrypted backups: opened by their key alone, and whatever is done to them is found; and the drill."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from service import Operator, running

from roundtable.cli.main import run
from roundtable.core.errors import ConfigError, StorageError
from roundtable.server import ServerConfig
from roundtable.server.storage.backup import back_up
from roundtable.server.storage.backup_drill import rehearse
from roundtable.server.storage.sealing import PART_BYTES, BackupKey, SetCipher

Settings = Callable[..., ServerConfig]
KEY = BackupKey("file", bytes(range(32)))
HEAD = len(b"roundtable sealed 1\n") + 32
PART = PART_BYTES + 16


def opened(cipher: SetCipher, sealed: bytes, name: str = "objects/a") -> bytes:
    return b"".join(cipher.unseal(name, io.BytesIO(sealed)))


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_what_is_sealed_opens_again(size: int) -> None:
    data, cipher = os.urandom(size), SetCipher.fresh(KEY)
    blocks = [data[place : place + 700_001] for place in range(0, size, 700_001)]
    sealed = b"".join(cipher.seal("objects/a", blocks))
    assert len(sealed) == HEAD + size + 16 * max(1, -(-size // PART_BYTES))
    assert opened(SetCipher(KEY, cipher.header), sealed) == data


@pytest.mark.parametrize(
    "attack",
    [
        "cut between",
        "cut within",
        "no part",
        "no head",
        "swapped",
        "left out",
        "twice",
        "more",
        "bit",
    ],
)
def test_a_sealed_file_that_is_cut_or_put_together_anew_is_refused(attack: str) -> None:
    """The attacks that STREAM is for: each part by itself is as it was sealed."""
    cipher = SetCipher.fresh(KEY)
    sealed = b"".join(cipher.seal("objects/a", [os.urandom(3 * PART_BYTES)]))
    head = sealed[:HEAD]
    one, two, three = (sealed[HEAD + place * PART : HEAD + (place + 1) * PART] for place in range(3))
    forged = {
        "cut between": head + one + two,
        "cut within": sealed[:-1],
        "no part": head,
        "no head": b"",
        "swapped": head + two + one + three,
        "left out": head + one + three,
        "twice": head + one + one + two + three,
        "more": sealed + three,
        "bit": sealed[:-1] + bytes([sealed[-1] ^ 1]),
    }
    assert opened(cipher, head + one + two + three) != b""
    with pytest.raises(StorageError, match="objects/a of the backup was altered, cut, or has taken another"):
        opened(cipher, forged[attack])
    with pytest.raises(StorageError, match="objects/b of the backup was altered"):
        opened(cipher, sealed, "objects/b")


@pytest.fixture
async def stopped(settings: Settings, certificates: Path) -> ServerConfig:
    """A coordinator that has had two jobs with models of one length, and stands still."""
    config = settings()
    async with running(config) as coordinator, Operator(coordinator.port, certificates / "olga") as operator:
        for number in range(2):
            await operator.submit("", vector=torch.full((4,), float(number)), request=f"r{number}")
    return config


def test_an_encrypted_backup_shows_nothing_and_opens_with_its_key_alone(
    stopped: ServerConfig, tmp_path: Path
) -> None:
    key, folder, next_one = KEY, tmp_path / "monday", tmp_path / "tuesday"
    made = back_up(stopped, folder, key=key)
    for path in (path for path in folder.rglob("*") if path.is_file() and path.name != "encryption.json"):
        data = path.read_bytes()
        assert data.startswith(b"roundtable sealed 1\n")
        assert not any(words in data for words in (b"olga", b"BEGIN CERT", b"__metadata__", b"rounds"))
    found = rehearse(stopped, folder, key=key)
    assert (found.encrypted, found.artifacts, found.jobs) == (True, 2, {"waiting": 2})
    with pytest.raises(StorageError, match="is encrypted: open it with --"):
        rehearse(stopped, folder)
    with pytest.raises(StorageError, match="was encrypted with another"):
        rehearse(stopped, folder, key=BackupKey(key.kind, b"another secret" + bytes(18)))
    two = back_up(stopped, next_one, since=folder, key=key)
    assert (two.shared, two.copied) == (made.copied, 0)
    rehearse(stopped, next_one, key=key)
    with pytest.raises(StorageError, match="is encrypted"):
        back_up(stopped, tmp_path / "wednesday", since=folder)
    back_up(stopped, tmp_path / "plain")
    with pytest.raises(StorageError, match="is not encrypted: leave the key out"):
        rehearse(stopped, tmp_path / "plain", key=key)


def test_a_passphrase_opens_what_it_has_sealed(stopped: ServerConfig, tmp_path: Path) -> None:
    back_up(stopped, tmp_path / "monday", key=BackupKey.of_passphrase("twelve letters"))
    with pytest.raises(StorageError, match="was encrypted with another passphrase"):
        rehearse(stopped, tmp_path / "monday", key=BackupKey.of_passphrase("twelve lettres"))
    with pytest.raises(StorageError, match="is encrypted: open it with --passphrase"):
        rehearse(stopped, tmp_path / "monday", key=KEY)
    assert rehearse(stopped, tmp_path / "monday", key=BackupKey.of_passphrase("twelve letters")).encrypted


def test_files_of_an_encrypted_backup_cannot_change_places(stopped: ServerConfig, tmp_path: Path) -> None:
    """Two models of one length, and two tables: all of them sealed with the same key."""
    monday, tuesday = tmp_path / "monday", tmp_path / "tuesday"
    back_up(stopped, monday, key=KEY)
    back_up(stopped, tuesday, since=monday, key=KEY)
    rehearse(stopped, tuesday, key=KEY)
    older = (monday / "tables" / "audit.jsonl").read_bytes()
    newer = (tuesday / "tables" / "jobs.jsonl").read_bytes()
    (tuesday / "tables" / "jobs.jsonl").write_bytes(older)
    with pytest.raises(StorageError, match=r"tables/jobs\.jsonl of the backup was altered"):
        rehearse(stopped, tuesday, key=KEY)
    (tuesday / "tables" / "jobs.jsonl").write_bytes(newer)
    one, two = sorted(tuesday.glob("objects/*/*"))
    data = one.read_bytes(), two.read_bytes()
    for path, bytes_of_other in ((one, data[1]), (two, data[0])):
        path.unlink()
        path.write_bytes(bytes_of_other)
    with pytest.raises(StorageError, match=f"{one.name} of the backup was altered.*{two.name}"):
        rehearse(stopped, tuesday, key=KEY)


async def test_a_table_of_an_earlier_backup_is_found_by_the_manifest(
    stopped: ServerConfig, tmp_path: Path
) -> None:
    monday, tuesday = tmp_path / "monday", tmp_path / "tuesday"
    back_up(stopped, monday, key=KEY)
    async with running(stopped):
        pass
    back_up(stopped, tuesday, since=monday, key=KEY)
    (tuesday / "tables" / "audit.jsonl").write_bytes((monday / "tables" / "audit.jsonl").read_bytes())
    with pytest.raises(StorageError, match=r"audit\.jsonl was changed"):
        rehearse(stopped, tuesday, key=KEY)


@pytest.mark.parametrize("text", ["", "ab", "zz" * 32, "00" * 33])
def test_a_file_that_holds_no_key_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "backup.key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"backup\.key"):
        BackupKey.of_file(path)


def test_a_drill_by_the_command_says_what_it_checked_and_leaves_nothing(
    stopped: ServerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, scratch = tmp_path / "coordinator.toml", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    config.write_text(f'state = "{stopped.state}"\ncredentials = "{stopped.credentials}"\n')
    (tmp_path / "backup.key").write_text("5a" * 32)

    def roundtable(*words: object, code: int = 0) -> str:
        assert run([str(word) for word in words]) == code
        out, err = capsys.readouterr()
        return err if code else out

    folder, key = tmp_path / "monday", ("--key", tmp_path / "backup.key")
    assert "2 artifacts and the database" in roundtable("backup", config, folder, *key)
    said = roundtable("restore", folder, config, "--verify", *key)
    assert "can be restored" in said
    assert "2 waiting" in said
    found = json.loads(roundtable("restore", folder, config, "--verify", "--json", *key))
    assert (found["artifacts"], found["encrypted"]) == (2, True)
    assert found["audit_signed"] == found["audit_entries"] > 3
    monkeypatch.setenv("ROUNDTABLE_BACKUP_PASSPHRASE", "short")
    assert "has 5 characters" in roundtable("backup", config, tmp_path / "other", "--passphrase", code=2)
    one = next(folder.glob("objects/*/*"))
    one.write_bytes(one.read_bytes()[:-1])
    damaged = roundtable("restore", folder, config, "--verify", *key, code=1)
    assert f"{one.name} of the backup was altered" in damaged
    assert list(scratch.iterdir()) == []

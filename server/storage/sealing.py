"""Files of a backup, encrypted: AES-256-GCM in parts, as STREAM puts them together (Hoang, Reyhanitabar,
Rogaway, Vizár: Online Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance, CRYPTO 2015).

    key of the set     32 bytes of a file, or scrypt of a passphrase
    key of a file      HKDF-SHA256 of it, with 32 random bytes that begin the file, and with the file's name
    part i             1 MiB under the nonce i, and whether it is the last

So a part that was changed, moved, left out or added fails, and so does a file that was cut between two parts
or has taken another's name. That a file is one of this backup, and no earlier one, its manifest says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from roundtable.core.errors import ConfigError, StorageError

HEADER = "encryption.json"
PART_BYTES = 1 << 20
_TAG_BYTES = 16
_SALT_BYTES = 32
_MAGIC = b"roundtable sealed 1\n"
_SCRYPT = {"n": 1 << 17, "r": 8, "p": 1}
_SHORTEST = 12


@dataclass(frozen=True)
class BackupKey:
    """What somebody has given to encrypt a backup with, or to open it."""

    kind: Literal["file", "passphrase"]
    secret: bytes

    @classmethod
    def of_file(cls, path: Path) -> BackupKey:
        """The key of a file with 64 hexadecimal digits. ConfigError where it holds something else."""
        try:
            secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it holds something else"
            raise ConfigError(
                f"{path} must hold a key, 64 hexadecimal digits: {reason}; `openssl rand -hex 32` makes one"
            ) from error
        if len(secret) != 32:
            raise ConfigError(f"{path} holds {len(secret)} bytes of a key, and not 32")
        return cls("file", secret)

    @classmethod
    def of_passphrase(cls, words: str) -> BackupKey:
        """ConfigError for a passphrase that is short: whoever has the backup may try as many as they like."""
        if len(words) < _SHORTEST:
            raise ConfigError(
                f"the backup's passphrase has {len(words)} characters: take {_SHORTEST} or more"
            )
        return cls("passphrase", words.encode())


class SetCipher:
    """Seals and opens the files of one backup, and of those that build upon it."""

    def __init__(self, key: BackupKey, header: Mapping[str, Any]) -> None:
        self.header = dict(header)
        self._salt = bytes.fromhex(header["salt"])
        self._master = key.secret if key.kind == "file" else _stretched(key.secret, self._salt)

    @classmethod
    def fresh(cls, key: BackupKey) -> SetCipher:
        """For a new backup."""
        made = cls(key, {"format": 1, "key": key.kind, "salt": os.urandom(_SALT_BYTES).hex()})
        made.header["check"] = made._check
        return made

    @classmethod
    def open(cls, folder: Path, key: BackupKey | None) -> SetCipher | None:
        """For a backup that is there; None for one that is not encrypted.

        StorageError where it takes a key and there is none, the other way about, or another one.
        """
        if not (folder / HEADER).exists():
            if key is not None:
                raise StorageError(f"the backup in {folder} is not encrypted: leave the key out")
            return None
        header = _header(folder)
        how = "--key FILE" if header["key"] == "file" else "--passphrase"
        if key is None or key.kind != header["key"]:
            raise StorageError(f"the backup in {folder} is encrypted: open it with {how}")
        found = cls(key, header)
        if found._check != header["check"]:
            raise StorageError(f"the backup in {folder} was encrypted with another {key.kind} than this one")
        return found

    def seal(self, name: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """What is stored under a name."""
        salt = os.urandom(_SALT_BYTES)
        cipher = self._cipher(salt, name)
        yield _MAGIC + salt
        for number, (part, last) in enumerate(_parts(blocks)):
            yield cipher.encrypt(_nonce(number, last), part, None)

    def unseal(self, name: str, file: BinaryIO) -> Iterator[bytes]:
        """What was stored under a name. StorageError at the first part that is not as it was sealed."""
        start = file.read(len(_MAGIC) + _SALT_BYTES)
        cipher = self._cipher(start[len(_MAGIC) :], name)
        size = PART_BYTES + _TAG_BYTES
        part, number = file.read(size), 0
        while True:
            following = file.read(size)
            try:
                if not start.startswith(_MAGIC):
                    raise InvalidTag
                data = cipher.decrypt(_nonce(number, not following), part, None)
            except (InvalidTag, ValueError):
                raise StorageError(
                    f"{name} of the backup was altered, cut, or has taken another file's place: its part "
                    f"{number + 1} is not what was sealed there"
                ) from None
            yield data
            if not following:
                return
            part, number = following, number + 1

    @property
    def _check(self) -> str:
        return _derived(self._master, self._salt, b"check").hex()

    def _cipher(self, salt: bytes, name: str) -> AESGCM:
        return AESGCM(_derived(self._master, salt, b"file\0" + name.encode()))


def _header(folder: Path) -> dict[str, Any]:
    try:
        header = json.loads((folder / HEADER).read_bytes())
        known = header["format"] == 1 and header["key"] in ("file", "passphrase")
        if (
            not known
            or len(bytes.fromhex(header["salt"])) != _SALT_BYTES
            or not isinstance(header["check"], str)
        ):
            raise ValueError("it belongs to another version")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{folder / HEADER} does not say how the backup is encrypted: {error}") from error
    return dict(header)


def _stretched(secret: bytes, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, **_SCRYPT).derive(secret)


def _derived(master: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, b"roundtable backup " + purpose).derive(master)


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _parts(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """The bytes in parts of one length, the last of which may be shorter, and whether each is the last."""
    waiting = bytearray()
    for block in blocks:
        waiting += block
        while len(waiting) > PART_BYTES:
            yield bytes(waiting[:PART_BYTES]), False
            del waiting[:PART_BYTES]
    yield bytes(waiting), True

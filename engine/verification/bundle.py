"""What an auditor is given to make a job's models again: a folder that needs no coordinator.

    FOLDER/log.jsonl            the coordinator's audit log, signed up to its end
    FOLDER/job.json             the job as it was submitted, with the submitter's signature
    FOLDER/rounds/N.json        the updates that round N combined, as silos have signed them
    FOLDER/objects/ab/abcdef…   models, states of the server optimizer and updates, as far as they are kept

Nothing in it is believed: every name is checked here, every file by its digest, every word by a signature.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundtable.core.bounds import DIGEST
from roundtable.core.errors import AuditError

LOG, JOB, ROUNDS, OBJECTS = "log.jsonl", "job.json", "rounds", "objects"
_MOST_BYTES = 1 << 26
Digest = Annotated[str, Field(pattern=rf"^{DIGEST}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Number = Annotated[int, Field(ge=1, le=1 << 31)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


_P = TypeVar("_P", bound=_Part)


class BundledJob(_Part):
    """A job as it was submitted; `signature` (hexadecimal) and `certificate` (PEM) are empty if unsigned.

    `time` and `coordinator` belong to what was signed; `population` is how many silos there were.
    """

    id: Name
    config: str
    submitter: Name
    request_id: Name
    initial_model: Digest
    signature: str
    certificate: str
    time: float
    coordinator: str
    population: Number


class BundledUpdate(_Part):
    """An update as the round combined it; (round, attempt) is the step that it was asked for in.

    `statement` is what the silo has signed, as `core.identity.signing.envelope` makes it; None for nothing.
    """

    client: Name
    round: Number
    attempt: Number
    digest: Digest
    examples: Count
    loss: float | None
    statement: dict[str, Any] | None


class BundledRound(_Part):
    """A round with the updates that it combined, of how many silos, and each one's share in its record."""

    round: Number
    population: Number
    updates: tuple[BundledUpdate, ...]
    weights: dict[str, float]


class MissingObject(AuditError):
    """An artifact that is not in the bundle."""


class Bundle:
    """A bundle that was read. Raises AuditError for anything that is not of this form."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = _parsed(BundledJob, _text(folder / JOB), JOB)
        self._checked: set[str] = set()

    def round(self, number: int) -> BundledRound | None:
        """What the bundle tells of a round; None if it tells nothing. AuditError for another round."""
        path = round_path(self.folder, number)
        if not path.exists():
            return None
        found = _parsed(BundledRound, _text(path), path.name)
        if found.round != number:
            raise AuditError(f"{path} tells of round {found.round}")
        return found

    def object(self, digest: str) -> Path:
        """The file of an artifact, its digest checked. MissingObject if it is not here."""
        path = object_path(self.folder, digest)
        if digest in self._checked:
            return path
        try:
            found = blake3().update_mmap(path).hexdigest()
        except FileNotFoundError:
            raise MissingObject(f"artifact {digest[:12]} is not in {self.folder}: it was not kept") from None
        except OSError as error:
            raise AuditError(f"{path} cannot be read: {error.strerror}") from error
        if found != digest:
            raise AuditError(f"{path} was changed: its bytes have the digest {found[:12]}")
        self._checked.add(digest)
        return path


def round_path(folder: Path, number: int) -> Path:
    """Where a bundle tells of a round."""
    return folder / ROUNDS / f"{number}.json"


def object_path(folder: Path, digest: str) -> Path:
    """Where a bundle keeps an artifact."""
    return folder / OBJECTS / digest[:2] / digest


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise AuditError(
                f"{path} is larger than {_MOST_BYTES >> 20} MiB: no coordinator writes such a one"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        said = f"{path} cannot be read: {error.strerror}; a bundle has {LOG}, {JOB} and {ROUNDS}"
        raise AuditError(said) from error
    except UnicodeDecodeError as error:
        raise AuditError(f"{path} is not a text: {error.reason}") from error


def _parsed(kind: type[_P], text: str, where: str) -> _P:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:6])
        raise AuditError(f"{where}: {place or 'the line'}: {first['msg']}") from error

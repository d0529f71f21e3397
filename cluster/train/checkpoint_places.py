"""Where a job's checkpoints lie, and what is said of each: in the agent's state folder, and copies where
`[cluster]` says.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from torch.distributed.checkpoint.api import CheckpointException

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.core.errors import ConfigError, ResourceError, RoundtableError
from roundtable.core.extras import missing

_log = logging.getLogger("roundtable.agent")
STATE = "state.json"
# Whoever writes into a place for copies chooses these names, and they become paths here.
_CHECKPOINT = re.compile(r"round-\d{6,20}-(?:step-\d{8,20}|end)")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Position:
    """The point in a round that a checkpoint was made at; `model` is the digest of the global model.

    `replicas` that train apart have weights and optimizers of their own in it; 0: there is one of each.
    `stream` is the place in streamed data, None for others. `packed`: layers that hold several parts are
    split, and each part is a tensor of its own. `scale` is that of float16's losses: (scale, good, skipped).
    `unsent`: (reduction, ranks) whose ranks each keep what they have not sent of their gradients. `parted`
    counts ranks that have buffers of their own, 0 where there is one of each.
    """

    round: int
    model: str
    step: int
    seen: int
    loss_sum: float
    final: bool = False
    replicas: int = 0
    stream: dict[str, Any] | None = None
    packed: bool = False
    scale: tuple[float, int, int] | None = None
    unsent: tuple[str, int] | None = None
    parted: int = 0

    @classmethod
    def end_of(cls, round: int, model: str, step: int) -> Position:
        """The end of a round of so many steps."""
        return cls(round, model, step, seen=0, loss_sum=0.0, final=True)


def checked_position(values: Mapping[str, Any]) -> Position:
    """ValueError or TypeError for values that no checkpoint of ours has: a copy's are another machine's."""
    position = Position(**values)
    counts = (position.round, position.step, position.seen, position.replicas)
    if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
        raise ValueError("a count of the position is none")
    if not (type(position.parted) is int and 0 <= position.parted < 1 << 20):
        raise ValueError("the position's number of ranks is none")
    if not isinstance(position.model, str) or not math.isfinite(position.loss_sum):
        raise ValueError("the position's model or loss is none")
    if position.unsent is not None:
        reduction, ranks = position.unsent
        if not (isinstance(reduction, str) and type(ranks) is int and 0 < ranks < 1 << 20):
            raise ValueError("what the position says of gradients is nothing")
    if position.scale is not None:
        scale, good, skipped = position.scale
        if not (0 < scale < math.inf and type(good) is int and type(skipped) is int):
            raise ValueError("the position's loss scale is none")
    return position


def checkpoint_folder(folder: Path, job: str) -> Path:
    """A job's own folder below the cluster's state folder: checkpoints are written here."""
    return folder / "checkpoints" / job


def mirrors(table: ClusterTable, job: str) -> tuple[Mirror, ...]:
    """Where copies of a job's checkpoints are kept. Raises ConfigError for an address that cannot be used."""
    return tuple(Mirror(address, job) for address in table.checkpoints)


def remove_checkpoints(folder: Path, table: ClusterTable, job: str) -> None:
    """Removes a job's checkpoints; what cannot be removed is told, as nothing else would."""
    place = checkpoint_folder(folder, job)
    try:
        if place.exists():
            shutil.rmtree(place)
    except OSError as error:
        _log.warning("cluster: the checkpoints in %s could not be removed: %s", place, error.strerror)
    for mirror in mirrors(table, job):
        try:
            mirror.remove()
        except ResourceError as error:
            _log.warning("cluster: copies of the checkpoints of %s are left: %s", job, error)


class Mirror:
    """Copies of one job's checkpoints below an address of fsspec's: a second disk, a bucket.

    A checkpoint is there once its description is, which is put last. All methods block, and raise
    ResourceError where the place does not do what it is asked to.
    """

    def __init__(self, address: str, job: str) -> None:
        self.address = address
        try:
            # Listings that fsspec remembers would hide what another rank 0 has put there.
            self._files, root = fsspec.core.url_to_fs(address, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            setting = f"[cluster] checkpoints = {address!r}"
            known = missing(error, setting) if isinstance(error, ImportError) else None
            raise known or ConfigError(f"{setting} cannot be used: {error}") from error
        # What moves files of its own accord is a file system; in a bucket it would make the bucket.
        self._has_folders = type(self._files).mv is not fsspec.AbstractFileSystem.mv
        self._root = f"{root.rstrip('/')}/{job}".rstrip("/")

    def names(self) -> list[str]:
        """The checkpoints that are there."""
        with self._asking():
            found = self._files.glob(f"{self._root}/*/{STATE}")
        names = (str(path).split("/")[-2] for path in found)
        return [name for name in names if _CHECKPOINT.fullmatch(name)]

    def describe(self, name: str) -> dict[str, Any]:
        """A checkpoint's description, its files' names checked. Raises ValueError where it is none."""
        with self._asking():
            size = self._files.size(f"{self._root}/{name}/{STATE}")
        if size is None or size > _MOST_BYTES:
            raise ValueError(f"the description of {name} has {size} bytes")
        with self._asking():
            text = self._files.cat_file(f"{self._root}/{name}/{STATE}")
        try:
            document = json.loads(text)
            files = document["files"].items()
        except (RecursionError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{name} has no description") from error
        for file, digest in files:
            if not (_FILE.fullmatch(file) and isinstance(digest, str) and _DIGEST.fullmatch(digest)):
                raise ValueError(f"{name} names a file that cannot be one of a checkpoint's")
        return dict(document)

    def put(self, folder: Path) -> None:
        """Copies a checkpoint."""
        place = f"{self._root}/{folder.name}"
        others = sorted(path for path in folder.iterdir() if path.is_file() and path.name != STATE)
        self.remove(folder.name)
        with self._asking():
            if self._has_folders:
                self._files.makedirs(place, exist_ok=True)
            for path in [*others, folder / STATE]:
                self._files.put_file(str(path), f"{place}/{path.name}")

    def fetch(self, name: str, file: str, to: Path) -> None:
        """Fetches one file of a checkpoint."""
        with self._asking():
            self._files.get_file(f"{self._root}/{name}/{file}", str(to))

    def remove(self, name: str = "") -> None:
        """Removes a checkpoint, or all of the job's; a description first, as without it none counts."""
        place = f"{self._root}/{name}" if name else self._root
        with self._asking():
            if name and self._files.exists(f"{place}/{STATE}"):
                self._files.rm_file(f"{place}/{STATE}")
            if self._files.exists(place):
                self._files.rm(place, recursive=True)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except RoundtableError:
            raise
        except Exception as error:
            # Each kind of place has a library of its own, and most raise errors that are no OSError.
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ResourceError(
                f"{self.address}, the place for copies of checkpoints, fails: {reason}; "
                "check its address, its keys, and the network between"
            ) from error


def made_empty(folder: Path) -> str:
    """Makes a folder anew; says why it cannot be made."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def superseded(
    names: Sequence[str], newest: str, keep: int, is_end: Callable[[str], bool], ends_kept: int
) -> list[str]:
    """The old ones among names: all but the last `keep`, and of rounds' ends all but the last `ends_kept`.

    `newest` is the last whatever its name: a round that is begun anew, by another plan, has made fewer steps.
    """
    ordered = sorted(names, key=lambda name: (name == newest, name))
    ends = [name for name in ordered if is_end(name)]
    within = [name for name in ordered if not is_end(name)]
    return [*ends[:-ends_kept], *within[:-keep]]


def why_not_written(error: CheckpointException | OSError) -> str:
    """What the disk said, on whichever rank; empty where something else went wrong."""
    failures: list[object] = [error]
    if isinstance(error, CheckpointException):
        failures = [each[0] for each in error.failures.values()]
    if not all(isinstance(each, OSError) for each in failures):
        return ""
    reasons = (each.strerror for each in failures if isinstance(each, OSError))
    return next((reason for reason in reasons if reason), "the disk fails")


def why_not_read(error: Exception) -> str:
    """Why a checkpoint that is there cannot be used, in words."""
    if isinstance(error, OSError):
        return "a file of it is missing" if isinstance(error, FileNotFoundError) else str(error)
    return "its description is none" if isinstance(error, KeyError | TypeError) else str(error)

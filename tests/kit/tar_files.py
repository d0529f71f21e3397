"""Tar shards of numbered records, in a folder."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar file with these members, (name, content), in order."""
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path, sizes: Sequence[int], suffix: str = "tar") -> list[Path]:
    """Shards of so many records each; record n of all has the member `id`, n in words, and one `y.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths, number = [], 0
    for shard, size in enumerate(sizes):
        members: list[tuple[str, bytes]] = []
        for _ in range(size):
            members += [(f"part/r{number:05d}.y.txt", b"label"), (f"part/r{number:05d}.ID", b"%d" % number)]
            number += 1
        mode = "w:gz" if suffix.endswith("gz") else "w"
        paths.append(write_tar(folder / f"s{shard:03d}.{suffix}", members, mode))
    return paths


def record_id(sample: Mapping[str, bytes]) -> int:
    """A record's number."""
    assert sample["y.txt"] == b"label"
    return int(sample["id"])

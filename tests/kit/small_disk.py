"""A disk that a test can fill to its last byte."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path | None]:
    """A file system of its own in `folder`, which is made; None where this user may not mount one.

    `size` is as mount takes it: "32m".
    """
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fills a disk, and the file that does: no file gets another block, the rest of a last one stays."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for block in (1 << 20, 512):
            with suppress(OSError):
                while file.write(b"x" * block) == block:
                    pass
    return filler

"""What a public function takes for a file's or folder's path, and files that take another's place whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

AnyPath = str | os.PathLike[str]
"""Text, a `Path`, or anything else with `__fspath__`."""


@contextmanager
def written_whole(path: AnyPath) -> Iterator[TextIO]:
    """A text in UTF-8 that becomes the file at `path` when the block ends; until then, and where it fails,
    what was there stays.

    A link's file is replaced, and its mode kept; what is no file, as a pipe, is written to. Raises OSError.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        with place.open("w", encoding="utf-8") as file:
            yield file
        return
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        if place.exists():
            shutil.copymode(place, partial)
        partial.replace(place)
    except OSError as error:
        if error.filename == str(partial):
            error.filename = os.fspath(path)
        raise
    finally:
        partial.unlink(missing_ok=True)

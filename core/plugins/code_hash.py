"""Hashes code that a job names: who runs it pins by this what was read and allowed.

A reference to a file pins that file and what it imports of its own folder, which is all that it can import
from there; one to a module or an entry point pins the whole top-level package that it lies in, every Python
file of it. Nothing is imported to find that out.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import ConfigError
from roundtable.core.plugins.folder_imports import files_of


def hash_of_code(kind: str, reference: str, entry_point_group: str, folder: Path | None) -> str:
    """BLAKE3 in hexadecimal of the code of this kind ("task", "encoding"); ConfigError where there is none.

    `folder` is where files and packages are looked for before those that are installed; None: nowhere.
    """
    place, _, _ = reference.partition(":")
    if place.endswith(".py") and folder is not None:
        return _of_task_file(folder / place)
    if ":" not in reference:
        points = list(entry_points(group=entry_point_group, name=reference))
        if not points and folder is not None:
            return _of_task_file(folder / f"{place}.py")
        if not points:
            raise ConfigError(f"no installed package offers the {kind} {reference!r} ({entry_point_group})")
        place = points[0].module
    top = place.split(".")[0]
    inside = [] if folder is None else [folder / top, (folder / top).with_suffix(".py")]
    for candidate in inside:
        if candidate.exists():
            return _of_place(candidate)
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the module {top!r} of the {kind} {reference!r} is not installed")
    origin = Path(spec.origin)
    return _of_place(origin.parent if origin.name == "__init__.py" else origin)


def _of_task_file(file: Path) -> str:
    return _of_files(files_of(file), file.parent)


def _of_place(place: Path) -> str:
    if place.is_file():
        return _of_files([place], place.parent)
    return _of_files(sorted(place.rglob("*.py")), place)


def _of_files(files: list[Path], base: Path) -> str:
    """Of one file its own BLAKE3, as `b3sum` prints it; of several, of the list of their names and hashes."""
    try:
        hashes = [blake3(file.read_bytes()).hexdigest() for file in files]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    if len(files) == 1:
        return hashes[0]
    lines = "".join(
        f"{digest}  {file.relative_to(base).as_posix()}\n" for digest, file in zip(hashes, files, strict=True)
    )
    return blake3(lines.encode()).hexdigest()

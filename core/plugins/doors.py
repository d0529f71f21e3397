"""The three doors for code that a job names: built in, a file beside the job, an installed package.

A job says `name = "median"` for what is built in or what an installed package offers under that name as an
entry point, and `name = "file.py:Object"` for an object of a file relative to the job's folder. A party that
was sent the job and has no such folder (a coordinator, a silo) runs no file: code is never sent.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.paths import AnyPath
from roundtable.core.plugins.folder_imports import load_file


def resolve(
    kind: str, name: str, builtins: Mapping[str, Any], entry_point_group: str, folder: AnyPath | None = None
) -> Any:
    """The object of this kind ("aggregation rule", "algorithm") that a job's `name` means.

    `folder` is where `file.py:Object` is looked for; None refuses files. Raises ConfigError that names the
    file and what its import raised, or the nearest known name.
    """
    if name in builtins:
        return builtins[name]
    reference = f"{kind} {name!r}"
    if is_file(name):
        if folder is None:
            raise ConfigError(
                f"{reference} is a file beside the job, and a job that was sent brings no code: install a "
                f"package that offers it as an entry point in the group {entry_point_group!r}, or run the "
                "job in a simulation"
            )
        place, _, attribute = name.partition(":")
        module = import_file((Path(folder) / place).resolve(), reference, ConfigError)
        if not attribute or not hasattr(module, attribute):
            raise ConfigError(
                f"{reference}: {module.__file__} has no {attribute!r}{_nearest(attribute, vars(module))}; "
                "name an object in it as file.py:Object"
            )
        return getattr(module, attribute)
    for point in entry_points(group=entry_point_group, name=name):
        try:
            return point.load()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{reference}: loading {point.value!r} failed: {described(error)}") from error
    known = names(builtins, entry_point_group)
    raise ConfigError(f"unknown {reference}; known are {', '.join(known)}{_nearest(name, known)}")


def names(builtins: Mapping[str, Any], entry_point_group: str) -> list[str]:
    """What a job can name without a file, in order: built in and installed."""
    return sorted({*builtins, *(point.name for point in entry_points(group=entry_point_group))})


def is_file(name: str) -> bool:
    """Whether a name means an object of a file."""
    return name.partition(":")[0].endswith(".py")


def import_file(path: Path, reference: str, error: type[RoundtableError]) -> ModuleType:
    """The module at `path`, imported once; `error` that begins with `reference` where that fails.

    It may import what lies beside it (`folder_imports`).
    """
    if not path.is_file():
        raise error(f"{reference}: there is no file {path}")
    try:
        return load_file(path)
    except (Exception, SystemExit) as failure:
        raise error(f"{reference}: running {path} failed: {described(failure)}") from failure


def import_module(name: str, reference: str, error: type[RoundtableError]) -> ModuleType:
    """An installed module; `error` that begins with `reference` where importing it fails."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as failure:
        raise error(f"{reference}: importing {name!r} failed: {described(failure)}") from failure


def described(error: BaseException) -> str:
    """An exception of foreign code: its class, its words, and the last line of that code on its way.

    For whoever runs that code himself: its words may quote data, so nothing of this may leave a silo.
    """
    frames = foreign_frames(error)
    place = f" ({frames[-1].place})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


@dataclass(frozen=True)
class ForeignFrame:
    """A line that somebody else's code had reached when an exception rose; `file` is without its folders."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The line as a person looks it up."""
        return f"{self.file}, line {self.line}, in {self.function}"


def foreign_frames(error: BaseException) -> list[ForeignFrame]:
    """The frames of an exception that are neither this package's, nor an installed one's, nor Python's own.

    What belongs to this package is known by its import name: its folders are elsewhere in a checkout.
    """
    return [
        ForeignFrame(Path(frame.f_code.co_filename).name, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_foreign(frame)
    ]


def foreign_trace(error: BaseException) -> str:
    """The traceback from the first of those frames on, and the whole one where there is none.

    "" for an error of ours without such a frame: what we say ourselves, no line of code says better.
    """
    if isinstance(error, RoundtableError) and not foreign_frames(error):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    first = next((place for place, frame in enumerate(frames) if _is_foreign(frame)), 0)
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list(told.stack[first:])
    return "".join(told.format())


def _is_foreign(frame: FrameType) -> bool:
    top, file = frame.f_globals.get("__name__", "").partition(".")[0], Path(frame.f_code.co_filename)
    return "site-packages" not in file.parts and top not in (*sys.stdlib_module_names, "roundtable")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(
        name, [key for key in known if not key.startswith("_")], n=1, cutoff=0.5
    )
    return f"; did you mean {close[0]!r}?" if close else ""

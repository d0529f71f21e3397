"""Imports between the Python files of one folder: a task's file and what lies beside it.

The folder is never on `sys.path`. Python knows each of its modules by a name made of its path, so that two
folders may each have a `network.py`, and modules of the folder alone see each other, by their import
statements, also those within functions. A name that a library has too is refused: nothing hides a library,
and no library that one machine happens to have takes the place of a file.
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from modulefinder import ModuleFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from blake3 import blake3
from typing_extensions import override

_log = logging.getLogger(__name__)
_PREFIX = "roundtable_file_"
_INIT = "__init__.py"
_FINDER = ModuleFinder()
_loading = threading.RLock()


def load_file(path: Path, folder: Path | None = None) -> ModuleType:
    """The module at `path`, run once in this process; raises what it raises.

    It may import files and packages (folders with `__init__.py`) of `folder`, its own where none is given.
    """
    folder = path.parent if folder is None else folder
    name = _name_of(path)
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        if _WithinPackages not in sys.meta_path:
            sys.meta_path.insert(0, _WithinPackages)
        spec = spec_from_file_location(name, path, loader=_FolderLoader(name, path, folder))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


class FilesFirst:
    """Goes before what files have defined to a process that is no fork: there it imports them."""

    @override
    def __reduce__(self) -> tuple[Callable[..., FilesFirst], tuple[list[tuple[Path, Path]]]]:
        modules = [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]
        loaders = (getattr(module.__spec__, "loader", None) for module in modules)
        return _imported, (
            [(Path(one.path), one.folder) for one in loaders if isinstance(one, _FolderLoader)],
        )


def _imported(files: list[tuple[Path, Path]]) -> FilesFirst:
    for path, folder in files:
        try:
            load_file(path, folder)
        except Exception as error:  # noqa: BLE001 - files raise what they like
            # It may need what only the other process has. Who has no use for it does not miss it.
            _log.warning("%s cannot be loaded in process %d: %s", path, os.getpid(), error)
    return FilesFirst()


def load_inside(path: Path, folder: Path) -> ModuleType:
    """The module at `path` as a part of its package, which lies in `folder`; raises what it raises."""
    names = path.relative_to(folder).with_suffix("").parts
    own = _importer(path, folder, {names[0]: folder / names[0] / _INIT})
    module: ModuleType = own(".".join(names), fromlist=("__name__",))
    return module


def file_of(module: str) -> Path | None:
    """The file that `load_file` has loaded as this module; None for others."""
    loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    return Path(loader.path) if isinstance(loader, _FolderLoader) and "." not in module else None


def files_of(path: Path) -> list[Path]:
    """The file, and all of its folder that it and those import: packages whole; sorted, nothing is run."""
    found, left = {path}, [path]
    while left:
        for place in _beside(left.pop(), path.parent).values():
            new = {place, *(place.parent.rglob("*.py") if place.name == _INIT else ())} - found
            found |= new
            left += new
    return sorted(found)


def _beside(file: Path, folder: Path) -> dict[str, Path]:
    """What the import statements of `file` name in `folder`: top-level name → its file."""
    try:
        names = _named_in(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}  # Whoever runs or hashes the file says what is wrong with it.
    places = {name: (folder / name / _INIT, folder / f"{name}.py") for name in names}
    found = {name: next((place for place in two if place.is_file()), None) for name, two in places.items()}
    # A file xgboost.py that imports xgboost means the library, not itself.
    return {name: place for name, place in found.items() if place is not None and place != file}


@lru_cache(maxsize=256)
def _named_in(source: bytes) -> tuple[str, ...]:
    """The top-level modules that its import statements name, sorted."""
    # Of compiled code: two threads that make syntax trees may end in a SystemError (CPython, gh-106905).
    names, left = set[str](), [compile(source, "<task>", "exec", dont_inherit=True, optimize=0)]
    while left:
        code = left.pop()
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
        for kind, what in _FINDER.scan_opcodes(code):
            if kind == "absolute_import":
                names.add(what[1].partition(".")[0])
    return tuple(sorted(names))


def _name_of(path: Path) -> str:
    """The same in every process, so that objects of the module can pass between them."""
    plain = path.parent.name if path.name == _INIT else path.stem
    return f"{_PREFIX}{plain}_{blake3(str(path.resolve()).encode()).hexdigest(8)}"


class _FolderLoader(SourceFileLoader):
    """Runs a module with an `__import__` of its own, which its functions keep."""

    def __init__(self, name: str, path: Path, folder: Path) -> None:
        super().__init__(name, str(path))
        self.folder = folder

    @override
    def exec_module(self, module: ModuleType) -> None:
        file = Path(self.path)
        own = _importer(file, self.folder, _beside(file, self.folder))
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": own}
        super().exec_module(module)


class _WithinPackages:
    """Finds what lies within packages that `load_file` has loaded."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not name.startswith(_PREFIX):
            return None
        spec = PathFinder.find_spec(name, path, target)
        top = getattr(sys.modules[name.partition(".")[0]].__spec__, "loader", None)
        if spec is None or not spec.origin or not isinstance(top, _FolderLoader):
            return spec
        if not isinstance(spec.loader, SourceFileLoader):
            return spec
        loader = _FolderLoader(name, Path(spec.origin), top.folder)
        return spec_from_file_location(name, spec.origin, loader=loader)


def _importer(file: Path, folder: Path, beside: Mapping[str, Path]) -> Callable[..., Any]:
    def __import__(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        top, _, rest = name.partition(".")
        if level or top not in beside or _on_path(top, beside[top], file):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        known = load_file(beside[top], folder).__name__
        inner = f"{known}.{rest}" if rest else known
        try:
            return builtins.__import__(inner, globals, locals, fromlist or (), 0)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(known):
                raise
            plain = error.name.replace(known, top, 1)
            raise ModuleNotFoundError(f"No module named {plain!r}", name=plain) from None

    return __import__


def _on_path(name: str, place: Path, file: Path) -> bool:
    """Whether Python's own path leads to this very file, as it does beside a script that was started.

    Raises ImportError where it leads elsewhere.
    """
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None) or "a part of Python"
    else:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return False  # Nothing, or a folder without __init__.py, which any file goes before.
        origin = spec.origin
    if Path(origin).resolve() == place.resolve():
        return True
    raise ImportError(
        f"{file.name} imports {name!r}, which is {place} and also an installed module ({origin}): give the "
        "file or folder beside it another name"
    )

"""A task that no other process can find, as bytes: for processes of this simulation's own user alone.

A task of a notebook, of a function, or an object with values of its own is code and data that only this
process has. cloudpickle packs it. Whoever unpacks such bytes runs what is in them, so they pass only where
one user owns both ends: through memory that a simulation's workers inherit, and to actors of that user's own
Ray cluster. Coordinators, agents and silos import nothing of `simulation`, and are told names of tasks alone.
"""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from typing_extensions import override

from roundtable.core.errors import ConfigError
from roundtable.core.extras import missing
from roundtable.core.task import AnyTask

_PURPOSE = "a task that only this process has, in several processes,"
_DEEPEST = 12


def pack_task(task: AnyTask | type[AnyTask], most: int | None = None) -> bytes:
    """The task, or its class, as bytes for `unpack_task`, at most `most` of them.

    Raises ConfigError without cloudpickle, and for what cannot be carried, by its name: an open file, a lock,
    a generator.
    """
    with _by_value():
        written = _Bounded(most)
        try:
            _write(task, written)
        except _TooLargeError:
            raise ConfigError(
                f"it holds more than the {(most or 0) >> 20} MB that each process may have of it; load large "
                "data in data()"
            ) from None
        except Exception as error:
            kind = task if isinstance(task, type) else type(task)
            where, what = _culprit(task, kind.__name__, set(), error)
            raise ConfigError(
                f"{where} cannot be carried to another process ({what}); make it where it is used, in "
                "model() or data()"
            ) from error
    return written.getvalue()


def unpack_task(packed: bytes | memoryview) -> AnyTask:
    """The task that `pack_task` packed. Runs code of these bytes: of this simulation's own user alone."""
    task: AnyTask = _cloudpickle().loads(packed)
    return task


class _TooLargeError(Exception):
    """More bytes than each process may hold."""


class _Bounded(io.BytesIO):
    """Takes so many bytes and no more."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most

    @override
    def write(self, data: Any, /) -> int:
        if self._most is not None and self.tell() + memoryview(data).nbytes > self._most:
            raise _TooLargeError
        return super().write(data)


class _Nowhere(io.RawIOBase):
    """Counts, and keeps nothing."""

    @override
    def write(self, data: Any, /) -> int:
        return memoryview(data).nbytes


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise missing(error, _PURPOSE) or error from error
    return cloudpickle


def _write(value: Any, file: Any) -> None:
    known = _cloudpickle().Pickler
    # cloudpickle would read an open file to its end and carry what it holds.
    ours: dict[type, Any] = {io.TextIOWrapper: _refuse_file}
    # Nor does it know modules of classes of their own, such as torch.classes, which code that says `.classes`
    # brings with it.
    kinds = {type(each) for each in list(sys.modules.values()) if isinstance(each, types.ModuleType)}
    ours |= dict.fromkeys(kinds - {types.ModuleType}, _by_name)
    kind = type("TaskPickler", (known,), {"dispatch_table": known.dispatch_table.new_child(ours)})
    kind(file, protocol=5).dump(value)


def _by_name(module: types.ModuleType) -> Any:
    return import_module, (module.__name__,)


def _refuse_file(file: io.TextIOWrapper) -> Any:
    raise TypeError(f"the open file {file.name!r}")


@contextmanager
def _by_value() -> Iterator[None]:
    """Within it, code of modules that another process could not import is packed itself, not its name."""
    carrier = _cloudpickle()
    found: dict[str, bool] = {}
    mine = []
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top == "__main__" or not str(getattr(module, "__file__", None) or "").endswith(".py"):
            continue
        if top not in found:
            found[top] = _importable(top)
        if not found[top]:
            mine.append(module)
            carrier.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            carrier.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    """Whether a process with this one's `sys.path` would find the module."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(name, None) is not None for finder in finders)


def _culprit(value: Any, name: str, seen: set[int], error: BaseException, depth: int = 0) -> tuple[str, str]:
    """The innermost thing that cannot be carried: what it is called, and what it is."""
    seen.add(id(value))
    for inner, part in _parts(value, name) if depth < _DEEPEST else ():
        if id(part) in seen:
            continue
        try:
            _write(part, _Nowhere())
        except Exception as deeper:  # noqa: BLE001 - whatever packing it raises
            return _culprit(part, inner, seen, deeper, depth + 1)
    kind = f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    said = " ".join(str(error).split())[:200]
    return name, f"{kind}: {said}"


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What packing a value packs with it, each with its name."""
    if isinstance(value, types.MethodType):
        yield f"{name}.__self__", value.__self__
        value = value.__func__
    if isinstance(value, types.FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"{variable!r} in {name}", _content(cell)
        for variable in value.__code__.co_names:
            if variable in value.__globals__:
                yield f"{variable!r} in {name}", value.__globals__[variable]
        yield from ((f"a default of {name}", default) for default in value.__defaults__ or ())
        return
    if isinstance(value, classmethod | staticmethod):
        yield name, value.__func__
    elif isinstance(value, property):
        yield from ((name, part) for part in (value.fget, value.fset) if part)
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r:.40}]", part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, type):
        yield from ((f"{name}.{key}", part) for key, part in list(vars(value).items()) if _own(key))
        yield from ((base.__name__, base) for base in value.__bases__ if base is not object)
    else:
        yield from ((f"{name}.{key}", part) for key, part in list(getattr(value, "__dict__", {}).items()))
        yield type(value).__name__, type(value)


def _own(key: str) -> bool:
    return key not in ("__dict__", "__weakref__", "__doc__", "__module__")


def _content(cell: types.CellType) -> Any:
    """What a closure's variable holds; None while it holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None

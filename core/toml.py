"""TOML files with errors that name file, line, key, what was expected and the nearest valid name."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from roundtable.core.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
# Validators and members of unions appear in pydantic's paths; nobody wrote them as keys.
_PYDANTIC_STEP = re.compile(r"^(function-\w+|tagged-union|union)\[")
_PLAINER = {
    "model_type": "should be a table",
    "dict_type": "should be a table",
    "tuple_type": "should be a list, in brackets",
}
_HEADER = re.compile(r"^\s*\[\[?\s*([A-Za-z0-9_.\-\"' ]+?)\s*\]\]?\s*(#.*)?$")
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-]+(?:\s*\.\s*[A-Za-z0-9_\-]+)*)\s*=")


@dataclass
class TomlDocument:
    """Parsed values with the text that they came from."""

    values: dict[str, Any]
    source: str
    text: str
    overridden: set[tuple[str, ...]] = field(default_factory=set)

    @classmethod
    def parse(cls, text: str, source: str) -> TomlDocument:
        """Raises ConfigError with the line where the text is not TOML."""
        try:
            return cls(tomllib.loads(text), source, text)
        except (ValueError, RecursionError) as error:
            where = _PLACE.search(str(error))
            line = (where and where[1]) or text.count("\n") + 1
            reason = _PLACE.sub("", str(error))
            raise ConfigError(f"{source}:{line}: not valid TOML: {reason}") from error

    def override(self, key: str, value: Any) -> None:
        """Sets a dotted key, as `--set cohort.size=5` does."""
        table = self.values
        *path, last = key.split(".")
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {key}: {part!r} is a value, not a table")
        table[last] = value
        self.overridden.add((*path, last))

    def place_of(self, path: tuple[str | int, ...]) -> str:
        """Where a mistake at `path` was written: `file:line`, or the option that set it."""
        names = tuple(part for part in path if isinstance(part, str))
        for depth in range(len(names), 0, -1):
            if names[:depth] in self.overridden:
                return f"--set {'.'.join(names[:depth])}"
        line = self.line_of(path)
        return f"{self.source}:{line}" if line else self.source

    def line_of(self, path: tuple[str | int, ...]) -> int | None:
        """The line of the key at `path`, or of the nearest table around it; None if it is in no line."""
        wanted = tuple(part for part in path if isinstance(part, str))
        best: tuple[int, int] | None = None
        for number, found in _keys(self.text):
            depth = len(found)
            if wanted[:depth] == found and (best is None or depth > best[0]):
                best = (depth, number)
        return best[1] if best else None


def read_toml(path: Path) -> TomlDocument:
    """The document at `path`; ConfigError if it cannot be read."""
    try:
        return TomlDocument.parse(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error


def validate(model: type[Model], document: TomlDocument) -> Model:
    """The document as `model`; ConfigError with a line for each mistake otherwise."""
    try:
        return model.model_validate(document.values)
    except ValidationError as error:
        lines = [_describe(model, document, mistake) for mistake in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _describe(model: type[BaseModel], document: TomlDocument, mistake: Any) -> str:
    path = tuple(part for part in mistake["loc"] if not _PYDANTIC_STEP.search(str(part)))
    place = document.place_of(path)
    key = ".".join(str(part) for part in path)
    table = _table_at(model, path[:-1])
    hints: Mapping[str, str] = getattr(table, "hints", {})
    if mistake["type"] == "extra_forbidden":
        known = list(table.model_fields)
        close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
        hint = hints.get(str(path[-1])) or (
            f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        )
        return f"{place}: {key}: unknown key; {hint}"
    if mistake["type"] == "missing":
        return f"{place}: {key}: missing; it has no default"
    message = _PLAINER.get(mistake["type"], mistake["msg"].removeprefix("Value error, "))
    if mistake["type"] == "literal_error":
        close = difflib.get_close_matches(
            str(mistake["input"]), re.findall(r"'([^']*)'", message), n=1, cutoff=0.5
        )
        hint = hints.get(str(mistake["input"])) or (f"did you mean {close[0]!r}?" if close else "")
        message += f"; {hint}" if hint else ""
    got = "" if mistake["type"] == "value_error" else f" (got {_short(mistake['input'])})"
    return f"{place}: {key}: {message}{got}" if key else f"{place}: {message}{got}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _table_at(model: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel]:
    """The innermost table on the way along `path`, seen through `| None`, lists and dicts of tables."""
    for part in path:
        known = model.model_fields.get(str(part))
        model = next(_tables_in(known.annotation), model) if known else model
    return model


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _tables_in(inner)


def _keys(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, full dotted path) of every table header and key that stands on a line of its own."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
            yield number, table
        elif key := _KEY.match(line):
            yield number, table + _parts(key[1])


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))

"""TOML files with errors that name file, line, key, what was expected and the nearest valid name."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from roundtable.core.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
# Validators and members of unions appear in pydantic's paths; nobody wrote them as keys.
_PYDANTIC_STEP = re.compile(r"^(function-\w+|tagged-union|union)\[")
_PLAINER = {
    "model_type": "should be a table",
    "model_attributes_type": "should be a table",
    "dict_type": "should be a table",
    "tuple_type": "should be a list, in brackets",
}
MOST_MISTAKES = 20
MOST_CHARACTERS = 1000
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
        best: tuple[int, int] | None = None
        for number, key in _keys(self.text):
            depth = len(key)
            if path[:depth] == key and (best is None or depth > best[0]):
                best = (depth, number)
        return best[1] if best else None


def read_toml(path: Path) -> TomlDocument:
    """The document at `path`; ConfigError if it cannot be read."""
    try:
        return TomlDocument.parse(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error


@contextmanager
def with_place(document: TomlDocument) -> Iterator[None]:
    """Says of a ConfigError that names its key, and rises within, where in the document the key stands."""
    try:
        yield
    except ConfigError as error:
        if not error.key:
            raise
        raise ConfigError(f"{document.place_of(error.key)}: {'.'.join(error.key)}: {error}") from error


def validate(model: type[Model], document: TomlDocument, folder: Path | None = None) -> Model:
    """The document as `model`; ConfigError with a line for each mistake otherwise.

    `folder` is where files lie that the document names, for validators that look at them.
    """
    try:
        return model.model_validate(document.values, context={"folder": folder})
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        lines = [_cut(_describe(model, document, mistake)) for mistake in mistakes[:MOST_MISTAKES]]
        if (more := error.error_count() - MOST_MISTAKES) > 0:
            lines.append(f"{document.source}: and {more} more mistakes")
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _describe(model: type[BaseModel], document: TomlDocument, mistake: Any) -> str:
    at = _WrittenAt.of(model, mistake["loc"])
    place = document.place_of(at.path)
    key = ".".join(str(part) for part in at.path)
    kind = mistake["type"]
    if kind == "extra_forbidden":
        return f"{place}: {key}: {_why_unknown(at)}"
    if kind == "missing":
        missed = at.table.model_fields.get(str(at.path[-1])) if at.path else None
        purpose = missed.description if missed else None
        return f"{place}: {key}: missing; it has no default" + (f" ({purpose})" if purpose else "")
    if kind == "union_tag_not_found":
        return f"{place}: {key}.{at.tag}: missing; choose one of {', '.join(at.members)}"
    if kind == "union_tag_invalid":
        wrong = mistake["ctx"]["tag"]
        place = document.place_of((*at.path, at.tag))
        choices = f"choose one of {', '.join(at.members)} (got {_short(wrong)}){_nearest(wrong, at.members)}"
        return f"{place}: {key}.{at.tag}: {choices}"
    message = _PLAINER.get(kind, mistake["msg"].removeprefix("Value error, "))
    if kind == "literal_error":
        wrong = str(mistake["input"])
        message += at.hint_for(wrong) or _nearest(wrong, re.findall(r"'([^']*)'", message))
    got = "" if kind == "value_error" else f" (got {_short(mistake['input'])})"
    return f"{place}: {key}: {message}{got}" if key else f"{place}: {message}{got}"


def _why_unknown(at: _WrittenAt) -> str:
    name, known = str(at.path[-1]), list(at.table.model_fields)
    owners = [repr(tag) for tag, member in at.members.items() if name in member.model_fields]
    if owners:
        return f"belongs to {at.tag} = {' or '.join(owners)}, and this table has {at.tag} = {at.chosen!r}"
    return "unknown key" + (at.hint_for(name) or _nearest(name, known) or f"; known here: {', '.join(known)}")


def _nearest(value: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(value, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cut(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"


@dataclass
class _WrittenAt:
    """Where a mistake is: the keys that somebody wrote on the way to it, and the innermost table there.

    Where that table is one of several told apart by the key `tag`, `members` are all of them by its value,
    and `chosen` is the value of this one.
    """

    path: tuple[str | int, ...]
    table: type[BaseModel]
    tag: str = ""
    members: dict[str, type[BaseModel]] = field(default_factory=dict)
    chosen: str = ""

    def hint_for(self, word: str) -> str:
        """What the innermost table says to write in the place of a key or a choice, after a semicolon."""
        hints: Mapping[str, str] = getattr(self.table, "hints", {})
        return f"; {hints[word]}" if word in hints else ""

    @classmethod
    def of(cls, model: type[BaseModel], location: tuple[str | int, ...]) -> _WrittenAt:
        """Follows pydantic's path, seen through `| None`, lists, dicts and unions of tables."""
        at = cls((), model)
        for step in location:
            if _PYDANTIC_STEP.search(str(step)):
                continue
            if at.members and not at.chosen and step in at.members:
                at.chosen, at.table = str(step), at.members[str(step)]
                continue
            at.path = (*at.path, step)
            known = at.table.model_fields.get(str(step))
            tables = list(_tables_in(known.annotation)) if known else []
            if known and tables:
                at.table, at.tag, at.members, at.chosen = tables[0], "", {}, ""
                if tag := known.discriminator or _tag_in(known.annotation):
                    at.tag = str(tag)
                    at.members = {tag: table for table in tables for tag in _tags(table, at.tag)}
        return at


def _tags(table: type[BaseModel], key: str) -> tuple[str, ...]:
    values: tuple[str, ...] = get_args(table.model_fields[key].annotation)
    return values


def _tag_in(annotation: Any) -> str:
    """The key that tells tables of a list or dict apart; "" where none does."""
    for inner in get_args(annotation):
        own = inner.discriminator if isinstance(inner, FieldInfo) else None
        if found := own if isinstance(own, str) else _tag_in(inner):
            return found
    return ""


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _tables_in(inner)


def _keys(text: str) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """(line, full path) of every table header and key that stands on a line of its own; tables of a list are
    numbered from 0."""
    table: tuple[str | int, ...] = ()
    last: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = ()
            names = _parts(header[1])
            for place, name in enumerate(names, start=1):
                table = (*table, name)
                if place == len(names) and line.lstrip().startswith("[["):
                    last[table] = last.get(table, -1) + 1
                    yield number, table
                if table in last:
                    table = (*table, last[table])
            yield number, table
        elif key := _KEY.match(line):
            yield number, table + _parts(key[1])


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))

"""The text of a chain of encodings: `topk(ratio=0.05) | int8(block=256)`, or a list of names and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from typing_extensions import override

Value: TypeAlias = bool | int | float | str

_STAGE = re.compile(r"\s*([^\s()|=,]+)\s*(?:\((.*)\))?\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*([a-z][a-z0-9_]*)\s*=\s*([A-Za-z0-9_.+-]+)\s*")
_MOST = 4


@dataclass(frozen=True)
class StageText:
    """One stage of a chain as it was written: its name, and the parameters that were given."""

    name: str
    given: Mapping[str, Value]

    @override
    def __str__(self) -> str:
        inside = ", ".join(f"{key}={_shown(value)}" for key, value in self.given.items())
        return f"{self.name}({inside})" if inside else self.name


def parse_chain(text: object) -> tuple[StageText, ...]:
    """The stages of a chain; ValueError that says what is wrong with it."""
    if isinstance(text, Sequence) and not isinstance(text, str):
        stages = tuple(_of_item(item) for item in text)
    elif isinstance(text, str):
        stages = tuple(_of_text(part) for part in text.split("|"))
    else:
        stages = (_of_item(text),)
    if not 1 <= len(stages) <= _MOST:
        raise ValueError(
            f"{len(stages)} stages; a chain has 1 to {_MOST}, for example 'topk(ratio=0.05) | int8'"
        )
    return stages


def _of_text(part: str) -> StageText:
    found = _STAGE.fullmatch(part)
    if found is None:
        raise ValueError(
            f"{part.strip()!r} is not a stage; write a name, or name(key=value, ...), like int4(block=256)"
        )
    name, inside = found.groups()
    given: dict[str, Value] = {}
    for item in (inside or "").split(",") if (inside or "").strip() else ():
        parameter = _PARAMETER.fullmatch(item)
        if parameter is None:
            raise ValueError(f"{item.strip()!r} of {name} is not key=value, for example block=256")
        key, value = parameter.groups()
        if key in given:
            raise ValueError(f"{key} of {name} is given twice")
        given[key] = _value(value)
    return StageText(name, given)


def _of_item(item: object) -> StageText:
    if isinstance(item, str):
        return _of_text(item)
    if isinstance(item, Mapping) and isinstance(item.get("name"), str):
        given = {str(key): value for key, value in item.items() if key != "name"}
        for key, value in given.items():
            if not isinstance(value, (bool, int, float, str)):
                raise ValueError(f"{key} of {item['name']} is a {type(value).__name__}; write one value")
        return StageText(str(item["name"]), given)
    raise ValueError(f"{item!r} is not a stage; write its name, or a table with a name and its parameters")


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shown(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )

"""A configuration with every value in force, as TOML that says what each is for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

_COLUMN = 40


def render(config: BaseModel) -> str:
    """The whole of it; values that nobody has set and that have no default stand in comments."""
    return "\n".join(_table(config, "")) + "\n"


def _table(config: BaseModel, path: str) -> Iterator[str]:
    from pydantic import BaseModel

    values = {name: getattr(config, name) for name in type(config).model_fields}
    if path:
        yield ""
        yield f"[{path}]"
    for name, value in values.items():
        if not isinstance(value, BaseModel):
            yield _line(name, value, type(config).model_fields[name].description or "")
    for name, value in values.items():
        if isinstance(value, BaseModel):
            yield from _table(value, f"{path}.{name}" if path else name)


def _line(name: str, value: Any, description: str) -> str:
    text = f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"
    return f"{text:{_COLUMN}}  # {description}" if description else text


def toml_value(value: Any) -> str:
    """The value as a TOML file has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(name)} = {toml_value(item)}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if hasattr(value, "model_dump"):
        return toml_value(value.model_dump(mode="json", exclude_none=True))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    # A JSON string or number is a TOML one; a float keeps its point, or its exponent.
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)

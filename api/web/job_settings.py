"""A job's settings one by one, with which of them are as by default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from roundtable.core import parse_job


def settings_of(config: str) -> list[dict[str, Any]]:
    """Rows of dotted key, value as JSON, and whether the value is the default; in the file's order."""
    defaults = _defaults()
    return [
        {"key": key, "value": value, "default": defaults.get(key) == value}
        for key, value in _flat(json.loads(config))
    ]


@lru_cache(maxsize=1)
def _defaults() -> dict[str, str]:
    return dict(_flat(json.loads(parse_job('task = "task"').to_json())))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)

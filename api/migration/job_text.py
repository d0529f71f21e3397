"""Tables as a job file, in the order of its reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def job_text(said: str, task: str, rounds: int, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A job file with these tables; `said` is its first line."""
    lines = [f"# {said}", f'task = "{task}"', f"rounds = {rounds}"]
    for name in (
        "model",
        "cohort",
        "aggregation",
        "aggregation.server_optimizer",
        "evaluation",
        "simulation",
    ):
        if tables.get(name):
            lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in tables[name].items())]
    return "\n".join([*lines, ""])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }"
    return repr(value) if isinstance(value, float) else json.dumps(value)

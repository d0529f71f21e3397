"""Writes the tables of docs/privacy.md and docs/secure-aggregation.md: what leaves, and what is promised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from promises import PRIVACY, SECURE_AGGREGATION

from roundtable.core.observability.released import EVENTS, FIELDS, Tells, is_told
from roundtable.core.privacy_table import NoPrivacy, Private, privacy_from


def _level(**values: Any) -> NoPrivacy | Private:
    figures = {"noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
    return privacy_from(values if values["level"] == "none" else {**figures, **values})


LEVELS: Mapping[str, NoPrivacy | Private] = {
    "none": _level(level="none"),
    "none, masked": _level(level="none", secure_aggregation=True, clip_norm=1.0),
    "client": _level(level="client"),
    "client, known cohorts": _level(level="client", cohorts="known"),
    "dp_ftrl": _level(level="dp_ftrl"),
    "dp_ftrl, hidden cohorts": _level(level="dp_ftrl", cohorts="hidden", separation=4),
    "distributed": _level(level="distributed"),
    "client_local": _level(level="client_local"),
    "example": _level(level="example"),
}
"""One of each kind of job: whatever is decided by level can be tried on all."""


def markdown() -> tuple[str, str]:
    """Both tables as docs/privacy.md shows them: what is withheld where, and what each field tells."""
    return _levels(), _fields()


def _levels() -> str:
    lines = [f"| what is sent tells of | {' | '.join(f'`{name}`' for name in LEVELS)} |"]
    lines.append("| --- " * (len(LEVELS) + 1) + "|")
    for kind in Tells:
        cells = ("" if is_told(level, kind) else "withheld" for level in LEVELS.values())
        lines.append(f"| *{kind.name.lower()}*: {kind.value} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _fields() -> str:
    lines = ["| what leaves | of what it tells |", "| --- | --- |"]
    lines += [f"| {channel} | {_by_kind(table.items())} |" for channel, table in FIELDS.items()]
    for name, kind in EVENTS.items():
        said = [(f"message ({' and '.join(each.name.lower() for each in kind.message)})", kind.message[0])]
        lines.append(f"| event `{name}` | {_by_kind([*kind.detail.items(), *said])} |")
    return "\n".join(lines)


def _by_kind(items: Iterable[tuple[str, Tells]]) -> str:
    names: dict[Tells, list[str]] = {}
    for name, kind in items:
        names.setdefault(kind, []).append(name)
    ordered = [kind for kind in Tells if kind in names]
    return "; ".join(f"*{kind.name.lower()}*: {', '.join(names[kind])}" for kind in ordered)


if __name__ == "__main__":
    levels, fields = markdown()
    PRIVACY.write({"| what is sent tells of |": levels, "| what leaves |": fields})
    SECURE_AGGREGATION.write({})

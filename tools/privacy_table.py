"""Writes the tables of what leaves into docs/privacy.md, from core/observability/released.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roundtable.core.observability.released import EVENTS, FIELDS, Tells, is_told
from roundtable.core.privacy_table import NoPrivacy, Private, privacy_from

PAGE = Path(__file__).resolve().parents[1] / "docs" / "privacy.md"


def _level(**values: Any) -> NoPrivacy | Private:
    figures = {"noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}
    return privacy_from(values if values["level"] == "none" else {**figures, **values})


LEVELS: Mapping[str, NoPrivacy | Private] = {
    "none": _level(level="none"),
    "none, masked": _level(level="none", secure_aggregation=True, clip_norm=1.0),
    "client": _level(level="client"),
    "client, known cohorts": _level(level="client", cohorts="known"),
    "dp_ftrl": _level(level="dp_ftrl"),
    "distributed": _level(level="distributed"),
    "client_local": _level(level="client_local"),
    "example": _level(level="example"),
}
"""One of each kind of job: whatever is decided by level can be tried on all."""


def markdown() -> str:
    """Both tables as docs/privacy.md shows them: what is withheld where, and what each field tells."""
    return f"{_levels()}\n\n{_fields()}"


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


def main() -> int:
    """Replaces the tables that are there."""
    text = PAGE.read_text(encoding="utf-8")
    tables = r"\| what is sent tells of \|(?:.*\n\|)*.*\n\n\| what leaves \|(?:.*\n\|)*.*"
    PAGE.write_text(re.sub(tables, lambda _: markdown(), text, count=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the tables of docs/security.md.

Calls and roles come from server/auth/permissions.py, promises and the tests that attack them from
tests/security/promises.toml.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from roundtable.server.auth.permissions import as_markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
PROMISES = ROOT / "tests" / "security" / "promises.toml"
_HEAD = "| what is promised | who | tries | what stops it | attacked by |"


@dataclass(frozen=True)
class Promise:
    """What a part of docs/security.md promises against whom; `tests` as pytest names them, below tests/."""

    part: str
    who: str
    tries: str
    stops: str
    tests: tuple[str, ...]


def promises() -> tuple[Promise, ...]:
    """Every promise, in the order of the page."""
    rows = tomllib.loads(PROMISES.read_text(encoding="utf-8"))["promise"]
    return tuple(Promise(**{**row, "tests": tuple(row["tests"])}) for row in rows)


def promises_as_markdown() -> str:
    """The table as docs/security.md shows it."""
    lines = [_HEAD, "| --- " * 5 + "|"]
    before = ""
    for promise in promises():
        part = promise.part if promise.part != before else ""
        names = ", ".join(f"`{test.partition('::')[2]}`" for test in promise.tests)
        lines.append(f"| {part} | {promise.who} | {promise.tries} | {promise.stops} | {names} |")
        before = promise.part
    return "\n".join(lines)


def main() -> int:
    """Replaces the tables that are there."""
    text = PAGE.read_text(encoding="utf-8")
    for head, table in (("| call |", as_markdown()), (_HEAD, promises_as_markdown())):
        text = re.sub(rf"{re.escape(head)}(?:.*\n\|)*.*", lambda _, table=table: table, text, count=1)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

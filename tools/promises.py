"""Reads what pages of docs/ promise, with the tests that attack it, and writes the table of each page."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
_HEAD = "| what is promised | who | tries | what stops it | attacked by |"


@dataclass(frozen=True)
class Promise:
    """What a part of a page promises against whom; `tests` as pytest names them, below tests/."""

    part: str
    who: str
    tries: str
    stops: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A page of docs/, its promises below tests/, and `silent`, the headings that promise nothing themselves.

    `tool` writes its tables. What follows the heading `Promises` is the table, and what was tried beyond it.
    """

    name: str
    listed: str
    tool: str
    silent: frozenset[str]

    @property
    def path(self) -> Path:
        """The page."""
        return ROOT / "docs" / self.name

    def promises(self) -> tuple[Promise, ...]:
        """Every promise, in the order of the page."""
        rows = tomllib.loads((TESTS / self.listed).read_text(encoding="utf-8"))["promise"]
        return tuple(Promise(**{**row, "tests": tuple(row["tests"])}) for row in rows)

    def parts(self) -> Iterator[str]:
        """What the page states: its headings, and the bold words that points and paragraphs begin with."""
        text = self.path.read_text(encoding="utf-8").partition("\n## Promises")[0]
        yield from (name for name in re.findall(r"^##+ (.+)$", text, re.MULTILINE) if name not in self.silent)
        yield from (
            name.rstrip(".,:") for name in re.findall(r"^(?:[-*] )?\*\*(.+?)\*\*", text, re.MULTILINE)
        )

    def table(self) -> str:
        """The promises as the page shows them."""
        lines = [_HEAD, "| --- " * 5 + "|"]
        before = ""
        for promise in self.promises():
            part = promise.part if promise.part != before else ""
            names = ", ".join(f"`{test.partition('::')[2]}`" for test in promise.tests)
            lines.append(f"| {part} | {promise.who} | {promise.tries} | {promise.stops} | {names} |")
            before = promise.part
        return "\n".join(lines)

    def write(self, tables: dict[str, str]) -> None:
        """Replaces the tables that are there, each known by how its head begins, and that of the promises."""
        text = self.path.read_text(encoding="utf-8")
        for head, table in {**tables, _HEAD: self.table()}.items():
            text = re.sub(rf"{re.escape(head)}(?:.*\n\|)*.*", lambda _, table=table: table, text, count=1)
        self.path.write_text(text, encoding="utf-8")


SECURITY = Page(
    "security.md",
    "security/promises.toml",
    "security_table.py",
    frozenset({"Identity"}),
)
PRIVACY = Page(
    "privacy.md",
    "privacy/promises.toml",
    "privacy_table.py",
    frozenset({"What the number means", "How the traps are closed", "Accuracy", "Cost", "References"}),
)
SECURE_AGGREGATION = Page(
    "secure-aggregation.md",
    "privacy/secagg/promises.toml",
    "privacy_table.py",
    frozenset(
        {
            "Threat model",
            "Message flow",
            "In the service",
            "What a lying coordinator can still learn",
            "Poisoned inputs",
            "Proofs of a bounded norm",
            "Verifying the sum",
            "Cost",
        }
    ),
)
PAGES = (SECURITY, PRIVACY, SECURE_AGGREGATION)

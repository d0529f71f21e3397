"""Writes docs/upgrades.md: what each release changes in the database, from the docstrings of its migrations.

A release's newest tables are those of the database that it has left in tests/server/store/databases.
"""

from __future__ import annotations

import ast
import re
import runpy
import sqlite3

from environments import ROOT

PAGE = ROOT / "docs" / "upgrades.md"
MIGRATIONS = ROOT / "server" / "migrations" / "versions"
DATABASES = ROOT / "tests" / "server" / "store" / "databases"
HEAD = """# Upgrade notes

For operators before an upgrade. At the end you know what changes in the database with each version.

`tools/upgrade_notes.py` writes it from the migrations; what to do: [operator.md](operator.md#upgrade).

- A coordinator brings the tables to its own version when it starts, or when it becomes the active one: all
  migrations in one transaction, so a failure leaves the database as it was. Nothing is done by hand.
- There is no way back but the backup: a version refuses, before it writes, a database with newer tables than
  its own.
- `roundtable version` names the tables of the software as `schema`; `roundtable doctor --server FILE`
  changes nothing, and says beforehand what the coordinator would refuse.
- Tables of each version are brought to those of today, with their rows and the jobs that run; tests try all.
"""


def notes() -> dict[str, str]:
    """Number of each migration → what it says of itself, in one line; oldest first."""
    found = {}
    for file in sorted(MIGRATIONS.glob("v*_*.py")):
        told = ast.get_docstring(ast.parse(file.read_text())) or ""
        if not told:
            raise SystemExit(f"{file.relative_to(ROOT)} does not say what it changes: give it a docstring")
        found[file.stem[1:5]] = " ".join(told.split()).replace("|", "\\|")
    return found


def releases() -> list[tuple[str, str]]:
    """(version, its newest migration), oldest first."""
    found = []
    for folder in DATABASES.iterdir():
        if re.fullmatch(r"\d+\.\d+\.\d+", folder.name):
            connection = sqlite3.connect(f"file:{folder / 'coordinator.db'}?immutable=1", uri=True)
            (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            connection.close()
            found.append((folder.name, str(revision)))
    return sorted(found, key=lambda release: [int(part) for part in release[0].split(".")])


def page() -> str:
    """The whole page, newest release first."""
    rule = runpy.run_path(str(ROOT / "core" / "evidence" / "release.py"))
    known = notes()
    released = releases()
    sections, before = [], ""
    for version, newest in [*released, (rule["NEXT"], max(known))]:
        rows = [f"| {number} | {told} |" for number, told in known.items() if before < number <= newest]
        if rows:
            table = "\n".join(["| tables | what changes |", "| --- | --- |", *reversed(rows)])
            title = version if (version, newest) in released else f"{version}, not yet released"
            sections.append(f"\n## {title}\n\n{table}\n")
        before = newest
    return HEAD + "".join(reversed(sections))


if __name__ == "__main__":
    PAGE.write_text(page())

"""What a migration writes, what it carried and what it could not."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundtable.core.errors import ConfigError
from roundtable.migration.sources import Source

REPORT = "MIGRATION.md"


@dataclass(frozen=True)
class Lost:
    """Something that was not carried: what, where it stands, what to do here in its place."""

    what: str
    file: str
    line: int
    instead: str


@dataclass
class Migration:
    """Files by name with their text, for the folder `home`; settings that were carried, and the rest."""

    framework: str
    home: Path
    files: dict[str, str] = field(default_factory=dict)
    carried: list[tuple[str, str]] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)

    def lose(self, what: str, source: Source, node: ast.AST | int, instead: str) -> None:
        """Notes what is not carried, once for each line."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        found = Lost(what, source.shown, line, instead)
        if found not in self.lost:
            self.lost.append(found)

    def write(self) -> list[Path]:
        """Writes the files and MIGRATION.md; ConfigError where one of them is there already."""
        texts = {**self.files, REPORT: self.report()}
        there = [name for name in texts if (self.home / name).exists()]
        if there:
            raise ConfigError(
                f"{', '.join(there)} in {self.home}: there already, and nothing is overwritten. Move it away"
            )
        for name, text in texts.items():
            (self.home / name).write_text(text, encoding="utf-8")
        return [self.home / name for name in texts]

    def report(self) -> str:
        """MIGRATION.md."""
        lines = [
            f"# From {self.framework}",
            "",
            f"Made: {', '.join(f'`{name}`' for name in self.files)}.",
            "",
        ]
        if self.carried:
            lines += ["| there | here |", "| --- | --- |"]
            lines += [f"| {_cell(there)} | {_cell(here)} |" for there, here in self.carried]
            lines += [""]
        if not self.lost:
            return "\n".join([*lines, "Nothing was left out that could be read.", ""])
        lines += ["Not carried:", "", "| what | where | here |", "| --- | --- | --- |"]
        lines += [
            f"| {_cell(each.what)} | {each.file}, line {each.line} | {_cell(each.instead)} |"
            for each in self.lost
        ]
        return "\n".join([*lines, ""])

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "framework": self.framework,
            "folder": str(self.home),
            "files": [*self.files, REPORT],
            "carried": [{"there": there, "here": here} for there, here in self.carried],
            "not_carried": [vars(each) for each in self.lost],
        }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""What the site is built from: docs/ with the made reference beside it, in build/site-sources/.

Links out of docs/ lead to files of the source tree, which a site does not hold: they become the file's name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from environments import ROOT

from handbook.notebook_pages import DOWNLOAD, NOTEBOOKS, notebook_page
from handbook.reference_pages import PAGES

DOCS = ROOT / "docs"
SOURCES = ROOT / "build" / "site-sources"
CONFIG = ROOT / "mkdocs.yml"
FROM_THE_TOP = {"CHANGELOG.md": "changes.md", "SECURITY.md": "report-a-weakness.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def write_sources() -> Path:
    """Makes the folder anew and returns it."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    shutil.copytree(DOCS, SOURCES)
    for name, page in FROM_THE_TOP.items():
        (SOURCES / page).write_text((ROOT / name).read_text().replace("](docs/", "]("))
    for notebook in NOTEBOOKS:
        (SOURCES / "notebooks" / f"{notebook.stem}.md").write_text(notebook_page(notebook))
    for file in SOURCES.rglob("*.md"):
        file.write_text(_without_links_out(file, file.read_text()))
    reference = SOURCES / "reference"
    reference.mkdir(exist_ok=True)
    for name, made in PAGES.items():
        (reference / name).write_text("\n".join(made()))
    return SOURCES


def navigation() -> list[tuple[str, str]]:
    """(section, page) of each page of mkdocs.yml, in order; a page at the top has no section."""
    return list(_pages(yaml.safe_load(CONFIG.read_text())["nav"], ""))


def _pages(entries: list[Any], section: str) -> Iterator[tuple[str, str]]:
    for entry in entries:
        ((title, inner),) = entry.items() if isinstance(entry, dict) else ((entry, entry),)
        if isinstance(inner, list):
            yield from _pages(inner, section or title)
        else:
            yield section, inner


def _without_links_out(file: Path, text: str) -> str:
    def kept(found: re.Match[str]) -> str:
        target, _, anchor = found[3].partition("#")
        if target.endswith(".ipynb") and found[2] != DOWNLOAD:
            return f"{found[1]}[{found[2]}]({target.removesuffix('.ipynb')}.md)"
        if anchor and "--" in anchor and not re.match(r"[a-z]+:", found[3]):
            # Dashes that stand together are one in the site's anchors, and are kept where sources are shown.
            return f"{found[1]}[{found[2]}]({target}#{re.sub('-+', '-', anchor)})"
        if re.match(r"[a-z]+:", found[3]) or not target or _is_page(file.parent / target):
            return found[0]
        return found[2]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(kept, part) for part in parts)


def _is_page(target: Path) -> bool:
    place = target.resolve()
    made = place.parent == (SOURCES / "reference").resolve() and place.name in PAGES
    return made or (place.is_relative_to(SOURCES.resolve()) and place.is_file())

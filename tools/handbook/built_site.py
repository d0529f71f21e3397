"""Looks over the built site: dead links, images, anchors, pages that nothing leads to, addresses of others.

Zensical's own check misses images, links to folders and orphans. A site that loads something from elsewhere
tells others who reads it, and is broken where there is no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
NOT_REACHED = {"404.html"}


@dataclass
class _Page(HTMLParser):
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what the tag leads to, loads and is called."""
        values: dict[str, str] = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and "canonical" not in values.get("rel", ""):
            self.loaded.append(values.get("href", ""))
        if values.get(LOADS.get(tag, "")):
            self.loaded.append(values[LOADS[tag]])


def faults_of(site: Path) -> list[str]:
    """What is wrong, one line for each; empty for a site that is well."""
    pages: dict[Path, Any] = {}
    for file in sorted(site.rglob("*.html")):
        page = _Page()
        page.feed(file.read_text(encoding="utf-8"))
        pages[file.resolve()] = page
    return [*_dead(site.resolve(), pages), *_orphans(site.resolve(), pages), *_styles(site.resolve())]


def _dead(site: Path, pages: dict[Path, Any]) -> Iterator[str]:
    for file, page in pages.items():
        name = file.relative_to(site)
        for address in page.loaded:
            if urlsplit(address).netloc:
                yield f"{name} loads {address} from elsewhere"
        for address in dict.fromkeys([*page.links, *page.loaded]):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or file.name in NOT_REACHED:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file() or not target.is_relative_to(site):
                yield f"{name} leads to {address}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name} leads to {address}: no such anchor"


def _orphans(site: Path, pages: dict[Path, Any]) -> Iterator[str]:
    seen: set[Path] = set()
    waiting = [site / "index.html"]
    while waiting:
        file = waiting.pop()
        if file in seen or file not in pages:
            continue
        seen.add(file)
        parts = [urlsplit(link) for link in pages[file].links]
        waiting += [
            (file.parent / unquote(each.path)).resolve() for each in parts if each.path and not each.netloc
        ]
    for file in pages:
        if file not in seen and file.name not in NOT_REACHED:
            yield f"{file.relative_to(site)}: nothing leads to it from the start"


def _styles(site: Path) -> Iterator[str]:
    for file in sorted(site.rglob("*.css")):
        found = re.findall(
            r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", file.read_text(encoding="utf-8")
        )
        for address in found:
            yield f"{file.relative_to(site)} loads {address} from elsewhere"

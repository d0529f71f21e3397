"""Writes docs/gpu.md out of what the phases found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_page(
    page: Path, about: Mapping[str, str], phases: Mapping[str, str], found: Mapping[str, Any]
) -> None:
    """The figures of each phase, what failed, and what was skipped and why."""
    facts = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = ["# On a GPU", "", "For maintainers: what a GPU was asked, and what it answered.", ""]
    lines += [f"Written by `make gpu` ({facts}).", ""]
    for name, text in phases.items():
        result = found.get(name)
        lines += [f"## {name.capitalize()}", "", f"{text[0].upper()}{text[1:]}.", ""]
        if result is None:
            lines += ["Not run.", ""]
            continue
        if result["figures"]:
            lines += ["| what | figure |", "| --- | --- |"]
            lines += [f"| {what} | {figure} |" for what, figure in result["figures"].items()]
            lines.append("")
        lines += [f"- **Failed:** {_plain(each)}" for each in result["failed"]]
        lines += [f"- Skipped: {_plain(each)}" for each in result["skipped"]]
        lines += ["" if result["failed"] or result["skipped"] else "Nothing failed.", ""]
        lines += [f"It took {result['seconds']} s.", ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    page.write_text(text.rstrip() + "\n")


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())

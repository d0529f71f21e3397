"""The pages say what is true: links lead somewhere, commands exist, CI runs what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
MADE = set(re.findall(r'"([\w-]+\.md)": ', (ROOT / "tools/handbook/reference_pages.py").read_text()))
"""Pages of the site's reference, which are made out of the code."""
README = (ROOT / "README.md").read_text()


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get, as the usual renderers make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if file.parent == ROOT / "docs" / "reference" and file.name in MADE and not anchor:
            continue
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT), f"{page.name} links out of the project: {target}"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links to {target}, which has no such heading"
        )


def test_paths_in_the_maps_exist() -> None:
    """The tables and sections that say where things are: a path begins with a folder of the project."""
    folders = "|".join(sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()))
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"):
        paths = re.findall(rf"`((?:{folders}|tests|tools|docs)/[\w./-]*)`", page.read_text())
        assert len(paths) > 5
        missing = [path for path in paths if not (ROOT / path).exists()]
        assert missing == [], page.name


def commands_of(text: str) -> list[str]:
    """The lines of a page's `sh` blocks, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_ci_runs_what_the_readme_tells_a_newcomer_to_run() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in lines
    ran = [line for line in lines if line.startswith("make")]
    told = [command for command in commands_of(README) if command.startswith("make")]
    assert ran == ["make test", "make demo"]
    assert set(ran) <= set(told)


def test_every_target_of_make_is_a_command_of_the_house() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    shown = subprocess.run(
        [sys.executable, ROOT / "tools" / "house.py"], capture_output=True, text=True, check=False
    )
    described = re.findall(r"^ *(\w+)  +\S", shown.stdout, re.MULTILINE)
    assert shown.returncode == 2
    assert targets[1].split() == described
    for told in re.findall(r"(?m)(?:^|`)make (\w+)", README + (ROOT / "CONTRIBUTING.md").read_text()):
        assert told in described


def test_the_upgrade_notes_are_those_of_the_migrations() -> None:
    import upgrade_notes

    assert (ROOT / "docs" / "upgrades.md").read_text() == upgrade_notes.page(), (
        "python tools/upgrade_notes.py"
    )
    assert len(upgrade_notes.notes()) == len(list(upgrade_notes.MIGRATIONS.glob("v*.py")))


def test_commands_of_roundtable_that_pages_name_exist() -> None:
    import click

    from roundtable.cli.main import cli

    for page in PAGES:
        for line in commands_of(page.read_text()):
            words = line.removeprefix(".venv/bin/").split()
            if words[0] != "roundtable":
                continue
            command: click.Command = cli
            for word in words[1:]:
                lookup = getattr(command, "get_command", None)
                if lookup is None or word.startswith("-"):
                    break
                found = lookup(click.Context(command), word)
                assert found is not None, f"{page.name} names `{line}`, which does not exist"
                command = found
            options = {name for option in command.params for name in option.opts} | {"--help"}
            for word in words:
                if word.startswith("--"):
                    assert word.split("=")[0] in options, f"{page.name}: `{line}` has no {word}"


REFUSED = {
    r"\b(participant|institution)s?\b": "silo",
    r"\bhubs?\b": "coordinator",
    r"\bsay yes\b": "approve",
    r"\bstop(s|ped)? for good\b": "cancel",
    r"(?<!there )\b(is|are) no (?!longer|more|less|wider|larger|other)\w": "is not a",
}
"""By the words of docs/style.md, as far as a machine can tell; what to write in their place."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_one_word_for_one_thing(page: Path) -> None:
    if page.name in ("style.md", "CHANGELOG.md"):
        return
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    # Names of fields stand in tables that are written from the code.
    lines = [line for line in text.splitlines() if "*public*:" not in line]
    prose = re.sub(r"`[^`]*`", "", "\n".join(lines))
    found = [
        f"{match[0]!r}: write {word!r}"
        for pattern, word in REFUSED.items()
        for match in re.finditer(pattern, prose, re.IGNORECASE)
    ]
    assert found == []


def test_every_page_begins_with_who_needs_it() -> None:
    pages = [page for page in PAGES if ROOT / "docs" in page.parents and page.name != "index.md"]
    assert [page.name for page in pages if not page.read_text().partition("\n\n")[2].startswith("For ")] == []

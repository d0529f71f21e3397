"""Sites of several versions side by side in one folder, with a choice of them on every page.

Each is a folder: a release by its number, built from its tag by its own tools, and `latest`, this tree.
`versions.json` names them, newest first, as mike's does. `versions.js` says the same to the pages and holds
the choice: a page that is opened as a file can load a script, while the theme's own choice asks a server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from environments import ROOT
from packaging.version import Version

LATEST = "latest"
LISTED = "versions.json"
SCRIPT = "versions.js"
SELECTOR = ROOT / "tools" / "handbook" / "version_selector.js"
_RELEASE = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")


def releases(tree: Path = ROOT) -> list[str]:
    """The releases that tags of `tree` mark, newest first: the rule of core/evidence/release.py."""
    done = subprocess.run(
        ["git", "tag", "--list", "v*"], cwd=tree, capture_output=True, text=True, check=True
    )
    found = [name.removeprefix("v") for name in done.stdout.split()]
    return sorted(filter(_RELEASE.fullmatch, found), key=Version, reverse=True)


def add_release(version: str, folder: Path, tree: Path = ROOT) -> None:
    """Builds the site of a release from its tag and adds it. SystemExit where there is no such tag."""
    if version not in releases(tree):
        known = ", ".join(releases(tree)) or "none"
        raise SystemExit(f"there is no tag v{version}: the releases of this history are {known}")
    with tempfile.TemporaryDirectory() as outside:
        copy = Path(outside, version)
        _run(tree, "git", "worktree", "add", "--quiet", "--detach", str(copy), f"v{version}")
        try:
            _run(copy, sys.executable, "tools/tree.py")
            # Its own code before what this environment has installed.
            _run(
                copy, sys.executable, "tools/handbook/build_site.py", PYTHONPATH=str(copy / "build" / "tree")
            )
            add(copy / "build" / "site", version, folder)
        finally:
            _run(tree, "git", "worktree", "remove", "--force", str(copy))


def add(site: Path, version: str, folder: Path) -> None:
    """Puts a built site into `folder` as `version`, in the place of the one that it may have there."""
    there = folder / version
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(site, there)
    pages = sorted(page.relative_to(there).as_posix() for page in there.rglob("*.html"))
    for page in pages:
        way = os.path.relpath(folder / SCRIPT, (there / page).parent)
        text = (there / page).read_text(encoding="utf-8")
        (there / page).write_text(
            text.replace("</head>", f'<script src="{way}"></script></head>', 1), "utf-8"
        )
    entry = {"version": version, "title": version, "aliases": [], "properties": {"pages": pages}}
    others = [each for each in listed(folder) if each["version"] != version]
    released = [each for each in (*others, entry) if each["version"] != LATEST]
    released.sort(key=lambda each: Version(each["version"]), reverse=True)
    entries = [each for each in (*others, entry) if each["version"] == LATEST] + released
    told = json.dumps(entries, indent=1)
    (folder / LISTED).write_text(told + "\n")
    (folder / SCRIPT).write_text(SELECTOR.read_text().replace("VERSIONS", told))
    start = released[0]["version"] if released else LATEST
    way = f"{start}/index.html"
    (folder / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>Roundtable</title>\n'
        f'<meta http-equiv="refresh" content="0; url={way}"><a href="{way}">{start}</a>\n'
    )


def listed(folder: Path) -> list[dict[str, Any]]:
    """The versions that `folder` holds, newest first."""
    file = folder / LISTED
    entries: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    return entries


def _run(place: Path, *words: str, **environ: str) -> None:
    done = subprocess.run(words, cwd=place, env={**os.environ, **environ}, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed in the tree of {place.name}")

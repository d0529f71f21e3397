"""Which release this is, and of which commit: one rule, for what is built and for what runs.

A tree with a history asks git. A commit with the tag `v0.1.0` is release 0.1.0; any other is on the way to
`NEXT` and called `NEXT.devN+gCOMMIT`, N commits after the release before it (PEP 440), with `.dirty` behind
it where files differ from the commit. What is built from a tree carries the answer in `BUILT`, beside this
file. setup.py runs this file, and so does `python3 tools/house.py version`: it imports nothing of ours.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

# The release that this tree leads to: raised in the commit after a release.
NEXT = "0.1.0"
BUILT = "built.txt"
UNKNOWN = "0+unknown"
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_DESCRIBED = re.compile(r"(?:v([0-9.]+)-([0-9]+)-g)?([0-9a-f]{12,40})(-dirty)?")
_WRITTEN = re.compile(r"([0-9A-Za-z.+]{1,50}) ([0-9a-f]{40,64}) *\n")


class Release(NamedTuple):
    """`version` by PEP 440, at most 50 characters; `commit` in full, empty where nobody knows it."""

    version: str
    commit: str


@cache
def release() -> Release:
    """What this code is; version `UNKNOWN` for a copy that has neither a history nor `BUILT`."""
    return of_history(_ROOT) or of_build(_HERE) or Release(UNKNOWN, "")


def of_history(tree: Path) -> Release | None:
    """What git says of the tree whose top is `tree`; None where there is no git or no history."""
    if not (tree / ".git").exists():
        return None
    # A tag that names anything but three numbers marks no release.
    tags = ("--tags", "--match", "v[0-9]*.[0-9]*.[0-9]*", "--exclude", "v*[!0-9.]*")
    described = _DESCRIBED.fullmatch(
        _git(tree, "describe", "--always", "--long", "--abbrev=12", "--dirty", *tags)
    )
    commit = _git(tree, "rev-parse", "HEAD")
    if described is None:
        return None
    last, distance, short, dirty = described.groups()
    if distance == "0" and not dirty:
        return Release(last, commit)
    since = distance or _git(tree, "rev-list", "--count", "HEAD")
    kind = "post" if last == NEXT else "dev"
    local = f"g{short[:12]}" + (".dirty" if dirty else "")
    return Release(f"{NEXT}.{kind}{since}+{local}", commit)


def of_build(folder: Path) -> Release | None:
    """What the build has left in `folder`; None where it left nothing."""
    try:
        found = _WRITTEN.fullmatch((folder / BUILT).read_text())
    except FileNotFoundError:
        return None
    return Release(*found.groups()) if found else None


def written(this: Release) -> str:
    """What stands in `BUILT`. ValueError for a release that nobody knows: no build may hide what it is."""
    if this.version == UNKNOWN:
        raise ValueError(
            f"{_ROOT} has neither a history of git nor {_HERE / BUILT}: nobody can tell which commit "
            "this is. Write there what `python3 tools/house.py version` prints where this is copied from"
        )
    return f"{this.version} {this.commit}\n"


def _git(tree: Path, *words: str) -> str:
    """One line of git's, empty where it has none. A hook's variables would name another tree."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *words], env=own, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

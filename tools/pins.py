"""Writes constraints.txt: the installed versions of everything that an install with every extra brings."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Nothing here can speak to the stores that these are for, so nobody has them installed: pinned by hand.
BY_HAND = ("adlfs", "gcsfs")
HEAD = "# What is tested; `python3 tools/house.py pins` writes this file. Ranges are in setup.cfg.\n"


def closure(requirement: str) -> dict[str, str]:
    """Name → version of all that `requirement` needs on this machine, itself left out."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            installed = distribution(name)
            found[name] = installed.version.partition("+")[0]
            for line in installed.requires or ():
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    waiting.append(inner)
    found.pop("roundtable-fl", None)
    return found


if __name__ == "__main__":
    before = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    found = closure("roundtable-fl[all,dev,mlflow,wandb]") | {name: before[name] for name in BY_HAND}
    rows = (f"{name}=={version}\n" for name, version in sorted(found.items()))
    (ROOT / "constraints.txt").write_text(HEAD + "".join(rows))

"""Builds build/tree/roundtable out of links, so that static tools see the package under its import name."""

from __future__ import annotations

import configparser
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def package_dirs() -> dict[str, str]:
    """The `package_dir` table of setup.cfg: import name → folder."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    pairs = (line.split("=") for line in config["options"]["package_dir"].split("\n") if line.strip())
    return {name.strip(): folder.strip() for name, folder in pairs}


def build() -> Path:
    """Makes the tree anew and returns its folder."""
    tree = ROOT / "build" / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    dirs = package_dirs()
    face = tree / "roundtable"
    face.mkdir(parents=True)
    for entry in sorted((ROOT / dirs.pop("roundtable")).iterdir()):
        if entry.name != "__pycache__":
            (face / entry.name).symlink_to(entry)
    for name, folder in dirs.items():
        (face / name.removeprefix("roundtable.")).symlink_to(ROOT / folder)
    return tree


if __name__ == "__main__":
    print(build())

"""`roundtable version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, say

PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "sqlalchemy", "cryptography", "safetensors", "blake3")


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Roundtable and of what it runs on.

    Of its tables and protocol, of Python, and of what matters beneath.
    """
    installed_versions = versions()
    if as_json:
        print_json(installed_versions)
        return
    for name, number in installed_versions.items():
        say(f"{name} {number}")


def versions() -> dict[str, str]:
    """Name → version; "not installed" for what is missing, "unknown" for a commit that nobody noted."""
    from roundtable.core.evidence.release import release
    from roundtable.proto import PROTOCOL_VERSION

    numbers = {
        "roundtable": release().version,
        "commit": release().commit or "unknown",
        "schema": _schema(),
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            numbers[package] = installed(package)
        except PackageNotFoundError:
            numbers[package] = "not installed"
    return numbers


def _schema() -> str:
    """The newest migration's number, which is that of the tables that this version's coordinator writes.

    Read from the files' names: a silo has nothing installed that could import them.
    """
    found = find_spec("roundtable.server")
    folders = (found.submodule_search_locations if found else None) or []
    names = [
        file.stem for folder in folders for file in Path(folder, "migrations", "versions").glob("v*_*.py")
    ]
    return max(names, default="v0000").removeprefix("v").partition("_")[0]

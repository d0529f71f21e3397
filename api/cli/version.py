"""`roundtable version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

from roundtable import __version__
from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, say

PACKAGES = ("torch", "numpy", "grpcio", "protobuf", "sqlalchemy", "cryptography", "safetensors", "blake3")


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of Roundtable, Python and what matters beneath."""
    installed_versions = versions()
    if as_json:
        print_json(installed_versions)
        return
    for name, number in installed_versions.items():
        say(f"{name} {number}")


def versions() -> dict[str, str]:
    """Name → version; "not installed" for what is missing."""
    from roundtable.proto import PROTOCOL_VERSION

    numbers = {
        "roundtable": __version__,
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            numbers[package] = installed(package)
        except PackageNotFoundError:
            numbers[package] = "not installed"
    return numbers

"""What setup.cfg says is what the folders hold, and what is installed is what the folders hold."""

from __future__ import annotations

import configparser
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import entry_points, metadata
from pathlib import Path

import pytest

import roundtable
from roundtable.core.evidence.release import NEXT, of_history, release

ROOT = Path(__file__).resolve().parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def lines(section: str, key: str) -> list[str]:
    return CONFIG[section][key].split("\n")[1:]


PACKAGE_DIR = dict(re.split(r"\s*=\s*", line) for line in lines("options", "package_dir"))
PACKAGES = lines("options", "packages")
DATA = {name: re.split(r",\s*", patterns) for name, patterns in CONFIG["options.package_data"].items()}


def folders() -> Iterator[tuple[str, Path]]:
    """(import name, folder) of each folder that holds a package, nested ones included."""
    for name, folder in PACKAGE_DIR.items():
        for found in sorted((ROOT / folder).rglob("__init__.py")):
            inner = found.parent.relative_to(ROOT / folder).parts
            yield ".".join((name, *inner)), found.parent


FOLDERS = dict(folders())
MODULES = sorted(
    f"{name}.{file.stem}".removesuffix(".__init__")
    for name, folder in FOLDERS.items()
    for file in folder.glob("*.py")
    if file.stem not in ("__main__", "env")
)


def test_every_folder_is_a_package_of_the_wheel() -> None:
    assert sorted(PACKAGES) == sorted(FOLDERS)


def test_every_folder_with_python_has_an_init() -> None:
    for folder in PACKAGE_DIR.values():
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py"


def test_no_folder_shadows_the_package() -> None:
    assert not (ROOT / "roundtable").exists()


def test_every_other_file_is_named_as_package_data() -> None:
    for name, folder in FOLDERS.items():
        for file in folder.iterdir():
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                patterns = DATA.get(name, [])
                assert any(fnmatch(file.name, pattern) for pattern in patterns), (
                    f"{file} would not be installed"
                )


def test_tests_run_on_the_wheel_where_the_check_says_so() -> None:
    site = os.environ.get("ROUNDTABLE_WHEEL")
    if site is None:
        pytest.skip("ROUNDTABLE_WHEEL is not set: these tests run on the source tree")
    for name in PACKAGES:
        module = importlib.import_module(name)
        assert Path(str(module.__file__)).is_relative_to(site)
    for name, folder in FOLDERS.items():
        installed = Path(site, *name.split("."))
        for file in folder.iterdir():
            if file.is_file() and file.suffix != ".pyc":
                assert (installed / file.name).read_bytes() == file.read_bytes(), file
        for pattern in DATA.get(name, []):
            assert list(installed.glob(pattern)), f"{name} was installed without {pattern}"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_public_names_exist_and_are_sorted(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", [])

    def order(entry: str) -> tuple[int, str]:
        return (0 if entry.isupper() else 1 if entry[0].isupper() else 2, entry)

    assert public == sorted(public, key=order)
    for entry in public:
        assert hasattr(module, entry), f"{name}.__all__ names {entry}, which does not exist"


@pytest.mark.parametrize(
    "name",
    ["core", "aggregation", "privacy", "proto", "engine", "client", "cluster", "server", "simulation", "api"],
)
def test_a_folder_is_not_importable_under_its_own_name(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f"No module named '{name}'" in done.stderr


def test_the_version_is_written_once_and_the_wheel_says_it() -> None:
    said = [
        file
        for folder in PACKAGE_DIR.values()
        for file in (ROOT / folder).rglob("*.py")
        if f'"{NEXT}"' in file.read_text()
    ]
    assert said == [ROOT / "core" / "evidence" / "release.py"]
    assert "version" not in CONFIG["metadata"]
    if "ROUNDTABLE_WHEEL" in os.environ:
        assert metadata("roundtable-fl")["Version"] == roundtable.__version__ == release().version
        if (ROOT / ".git").exists():
            assert release() == of_history(ROOT)


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="roundtable")
    assert command.value == "roundtable.cli.main:main"
    assert callable(command.load())


def test_types_are_declared() -> None:
    assert (ROOT / "api" / "py.typed").exists()


def test_the_licence_is_there_and_says_what_the_metadata_says() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert metadata("roundtable-fl")["License-Expression"] == "Apache-2.0"

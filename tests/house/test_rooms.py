"""The rooms of the house: small folders, one meaning for each name, arrows that never lead back."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import rooms

ROOT = rooms.ROOT
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
FILES = rooms.modules()
CONTAINERS = sorted({name for name in FILES if FILES[name].name == "__init__.py" and name != "roundtable"})

MOST_MODULES = 20
GROWS = Path("server/migrations/versions")
"""A migration stays for good, and each is read alone: this folder only grows."""
SHARED_MODULE_NAMES = {
    "administration": "what an administrator asks for: the call, and who answers it",
    "audit": "who writes the audit log, and where it is stored",
    "backend": "a simulation's way to run clients: the protocol, and two that fill it",
    "config": "the settings of what the folder holds",
    "enrolment": "a silo's first certificate: its side, and the coordinator's",
    "ledger": "privacy spent: the arithmetic, the table, the simulation's",
    "metrics": "(sum, count) by name: at the client, and over clients",
}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The modules, parsed: once, and not where tests are only collected."""
    return rooms.trees(FILES)


@pytest.fixture(scope="module")
def graph(trees: dict[str, ast.Module]) -> rooms.Graph[str]:
    """Which module imports which."""
    return rooms.imports(trees)


def command(name: str) -> bool:
    """Whether a module holds commands of the command line, and is called as they are."""
    return name.startswith("roundtable.cli.")


def test_no_folder_holds_more_modules_than_one_takes_in() -> None:
    sizes = Counter(file.parent.relative_to(ROOT) for file in FILES.values() if file.stem != "__init__")
    assert {
        str(folder): size for folder, size in sizes.items() if size > MOST_MODULES and folder != GROWS
    } == {}


def test_a_module_shares_its_name_only_with_the_same_idea_at_another_layer() -> None:
    homes = defaultdict(list)
    for name, file in FILES.items():
        if file.stem not in ("__init__", "__main__") and not command(name):
            homes[file.stem].append(name)
    shared = {stem: names for stem, names in homes.items() if len(names) > 1}
    assert {stem: names for stem, names in shared.items() if stem not in SHARED_MODULE_NAMES} == {}
    assert SHARED_MODULE_NAMES.keys() <= shared.keys(), "an allowed name is no longer shared: strike it out"


def test_a_class_name_has_one_meaning(trees: dict[str, ast.Module]) -> None:
    homes = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert {cls: names for cls, names in homes.items() if len(names) > 1} == {}


def test_no_modules_import_each_other_in_a_circle(graph: rooms.Graph[str]) -> None:
    """Within functions and under TYPE_CHECKING neither, where import-linter or Python would not mind."""
    assert rooms.cycles(graph) == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_arrows_between_the_rooms_of_a_folder_never_lead_back(
    container: str, graph: rooms.Graph[str]
) -> None:
    home = rooms.room_in(container, FILES, alone=True)
    assert rooms.cycles(rooms.collapse(graph, home)) == []


def test_every_room_has_its_place_in_the_layers_of_its_folder() -> None:
    """A layers contract says what may point at what; a room that none names could point anywhere."""
    named = defaultdict(set)
    for section in CONFIG.sections():
        if section.startswith("importlinter:") and CONFIG[section].get("type") == "layers":
            layers = CONFIG[section]["layers"].replace("|", "\n").replace(":", "\n").split()
            for container in CONFIG[section]["containers"].split():
                named[container] |= {f"{container}.{layer}" for layer in layers}
    for container in CONTAINERS:
        folders = {name for name in CONTAINERS if name.rpartition(".")[0] == container}
        assert len(folders) < 2 or folders <= named[container], container


def test_the_picture_of_the_arrows_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "arrows.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

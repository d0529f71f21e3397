"""Promises that hold for every file: no pickle, no workplace, no dependency that nobody declared."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from roundtable.core.extras import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
FOLDERS = (
    "api",
    "core",
    "aggregation",
    "privacy",
    "proto",
    "engine",
    "client",
    "cluster",
    "server",
    "simulation",
)
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


@cache
def tracked() -> tuple[Path, ...]:
    """Files under version control, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return tuple(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


@cache
def sources() -> tuple[tuple[Path, ast.Module], ...]:
    """The package's own Python files, parsed."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    ours = (file for file in files if not re.search(r"_pb2(_grpc)?\.py$", file.name))
    return tuple((file, ast.parse(file.read_text(), str(file))) for file in ours)


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, those within functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, str(node.module)


CARRIES_ITS_OWN = Path("simulation/backends/carried_task.py")
"""The task of a notebook, to worker processes of the same user; nothing of it comes from elsewhere."""


def test_nothing_imports_pickle_or_its_kin() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file, tree in sources()
        if file.relative_to(ROOT) != CARRIES_ITS_OWN
        for line, name in imported(tree)
        if name.split(".")[0] in UNSAFE
    ]
    assert found == []


def test_code_is_carried_within_a_simulation_alone() -> None:
    """Neither agents, nor coordinators, nor relays, nor silos can unpack a task."""
    users = {
        file.relative_to(ROOT)
        for file, tree in sources()
        for _, name in imported(tree)
        if name == "roundtable.simulation.backends.carried_task"
    }
    workers = {"backends/process_worker.py", "backends/ray_cluster.py", "run_worker.py"}
    assert users == {Path("simulation", name) for name in (*workers, "choose_backend.py", "sweep.py")}


# The vectorised backend compiles the step that it has recorded itself; nothing of it was received.
COMPILES_ITS_OWN = {Path("simulation/backends/vectorised/program.py")}


def test_nothing_loads_what_may_hold_code() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}"
        for file, tree in sources()
        if file.relative_to(ROOT) not in COMPILES_ITS_OWN
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        in ("torch.load", "torch.save", "torch.jit.load", "eval", "exec", "yaml.load")
    ]
    assert found == []
    allowed = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
    ]
    assert allowed == []


def test_only_the_face_knows_the_face() -> None:
    """Folders import each other, never `roundtable` itself, which imports them all."""
    face = {file.stem for file in (ROOT / "api").glob("*.py")} | {"cli"}
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file, tree in sources()
        if file.relative_to(ROOT).parts[0] != "api"
        for line, name in imported(tree)
        if name == "roundtable" or (name.startswith("roundtable.") and name.split(".")[1] in face)
    ]
    assert found == []


def declared(*keys: tuple[str, str]) -> dict[str, Requirement]:
    """Name → requirement of the lists in setup.cfg."""
    rows = (Requirement(line) for section, key in keys for line in CONFIG[section][key].split("\n") if line)
    return {canonicalize_name(row.name): row for row in rows}


RUNTIME = declared(("options", "install_requires"))
EXTRAS = declared(*(("options.extras_require", key) for key in CONFIG["options.extras_require"]))


def test_every_library_that_is_imported_is_declared() -> None:
    homes = packages_distributions()
    missing = set()
    for file, tree in sources():
        for line, name in imported(tree):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "roundtable":
                continue
            names = {canonicalize_name(found) for found in homes.get(top, [top])}
            # grpcio and protobuf share the namespace package `google`.
            if not names & (RUNTIME.keys() | EXTRAS.keys()):
                missing.add(f"{file.relative_to(ROOT)}:{line}: {name} of {names}")
    assert not missing


def test_constraints_pin_every_declared_library_within_its_range() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    for name, requirement in {**RUNTIME, **EXTRAS}.items():
        if name != DISTRIBUTION:
            assert name in pinned, f"constraints.txt does not pin {name}: python3 tools/house.py pins"
            assert requirement.specifier.contains(pinned[name]), (
                f"{name}=={pinned[name]} is not in {requirement}"
            )


def test_every_declared_library_is_explained() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    explained = {canonicalize_name(name) for name in re.findall(r"^\| `([\w.-]+)`", page, re.MULTILINE)}
    assert explained == (RUNTIME.keys() | EXTRAS.keys()) - {DISTRIBUTION}


def test_no_file_speaks_of_one_machine() -> None:
    # One letter of each is in brackets, so that this line does not find itself.
    words = re.compile(r"/[w]ork/|/tmp/[h]q|/[f]arm/|/opt/[p]ypi|[p]ypi-more|\.[l]ibrary/")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for file in tracked()
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1)
        if words.search(line)
    ]
    assert found == []


def test_no_file_of_the_package_is_too_long_to_be_one_idea() -> None:
    long = {
        str(file.relative_to(ROOT)): count
        for file, _ in sources()
        if (count := len(file.read_text().splitlines())) > 400
    }
    assert long == {}


def test_a_constructor_says_what_it_keeps_line_by_line() -> None:
    """`self._a, self._b = a, b` hides which is which; unpacking one value does not."""
    packed = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file, tree in sources()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Tuple) and sum(isinstance(each, ast.Attribute) for each in target.elts) > 1
    ]
    assert packed == []


def test_the_layers_that_are_checked_are_those_that_the_plan_draws() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `\w+/` \| `roundtable\.(\w+)` \| .* \| ([\w, ]+) \|$", page, re.MULTILINE)
    drawn = {name: set() if may.startswith("nothing") else set(may.split(", ")) for name, may in rows}
    checked = {}
    for name in drawn:
        contract = CONFIG[f"importlinter:contract:{name}"]
        forbidden = {
            line.removeprefix("roundtable.") for line in contract["forbidden_modules"].split("\n")[1:]
        }
        assert contract["source_modules"] == f"roundtable.{name}"
        checked[name] = (drawn.keys() | {"cli"}) - forbidden - {name}
    assert len(drawn) == 9
    assert checked == drawn

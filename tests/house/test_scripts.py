"""Every script of `benchmarks/` and `tools/` finds what it imports in an extra, or says what it needs."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
EXTRAS = {"benchmarks": "bench", "tools": "dev"}
SCRIPTS = sorted(file for folder in EXTRAS for file in (ROOT / folder).rglob("*.py"))
OURS = {"roundtable", *EXTRAS, *(file.stem for file in (*SCRIPTS, *(ROOT / "tests" / "kit").glob("*.py")))}
OURS |= {folder.name for name in EXTRAS for folder in (ROOT / name).iterdir() if folder.is_dir()}
HOMES = packages_distributions()
BROUGHT = {"annotated-types": "pydantic", "pydantic-core": "pydantic", "jsonschema": "kubernetes-validate"}
"""What comes with a library that is declared."""
OWN_ENVIRONMENT = {
    "aggregation.py": "aggregation-requirements.txt",
    "attacks_peer.py": "aggregation-requirements.txt",
    "compression.py": "compression-requirements.txt",
    "secagg_flower.py": "secagg-requirements.txt",
    "simulation_fedjax.py": "simulation-fedjax-requirements.txt",
    "simulation_flower.py": "simulation-flower-requirements.txt",
    "simulation_pfl.py": "simulation-pfl-requirements.txt",
}
"""Scripts that measure other frameworks, each with the file of the environment that holds these."""


def brought_by(extra: str) -> set[str]:
    """Libraries that come with an extra and all that it names."""
    found: set[str] = set()
    for line in filter(None, CONFIG["options.extras_require"][extra].split("\n")):
        row = Requirement(line)
        if canonicalize_name(row.name) == "roundtable-fl":
            found |= {name for each in row.extras for name in brought_by(each)}
        else:
            found.add(canonicalize_name(row.name))
    return found


def libraries(file: Path) -> Iterator[str]:
    """The distributions that a script imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for top in {name.partition(".")[0] for name in names} - OURS - set(sys.stdlib_module_names):
            # grpcio and protobuf share the namespace package `google`.
            home = "protobuf" if top == "google" else HOMES.get(top, [top])[0]
            yield canonicalize_name(home)


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_script_imports_is_brought_by_its_extra(file: Path) -> None:
    always = {
        canonicalize_name(Requirement(line).name)
        for line in CONFIG["options"]["install_requires"].split("\n")
        if line
    }
    known = always | brought_by(EXTRAS[file.relative_to(ROOT).parts[0]])
    if own := OWN_ENVIRONMENT.get(file.name):
        listed = (ROOT / "benchmarks" / own).read_text()
        known |= {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)", listed, re.MULTILINE)}
        # In the script, or in the one that calls it.
        assert own in file.read_text() or own in (ROOT / "benchmarks" / f"{own.split('-')[0]}.py").read_text()
    assert {BROUGHT.get(name, name) for name in libraries(file)} <= known

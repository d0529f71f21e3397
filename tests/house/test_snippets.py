"""Blocks of pages that no other test runs: files are accepted, Python is Python and imports what there is.

Tutorials, how-to pages and the `sh` blocks of the two administrators' pages are run by their own tests.
"""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roundtable.client.policy.config import load_agent_config
from roundtable.core.config import load_job
from roundtable.core.errors import ConfigError
from roundtable.relay.config import load_relay_config
from roundtable.server.config import load_server_config
from roundtable.surveys import load_survey

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^ *```(\w+)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
KINDS: dict[str, tuple[Callable[[Path], Any], dict[str, str]]] = {
    "job": (load_job, {"task": 'task = "digits"'}),
    "agent": (load_agent_config, {"coordinator": 'coordinator = "a:1"', "tasks": '[tasks]\ndigits = "d.py"'}),
    "coordinator": (load_server_config, {}),
    "survey": (
        load_survey,
        {
            "table": 'table = "t"',
            "columns": "[columns.age]",
            "questions": '[[questions]]\nask = "describe"\ncolumns = ["age"]',
        },
    ),
    "relay": (load_relay_config, {"coordinator": 'coordinator = "a:1"'}),
}
"""The files of Roundtable: what reads one, and what an excerpt of it may leave out."""
ELSEWHERE = ("[project.entry-points", "mine.py:every_region")
"""In blocks that are no file of ours, or that tests/simulation/test_doors.py runs."""


def blocks(language: str) -> Iterator[Any]:
    for page in sorted(DOCS.glob("*.md")):
        for number, (found, text) in enumerate(BLOCK.findall(page.read_text()), 1):
            if found == language and not any(told in text for told in ELSEWHERE):
                yield pytest.param(textwrap.dedent(text), id=f"{page.stem}-{number}")


@pytest.mark.parametrize("text", list(blocks("toml")))
def test_a_block_is_accepted_as_one_of_our_files(text: str, tmp_path: Path) -> None:
    # A digest is shown as dots.
    text = text.replace('blake3 = "…"', f'blake3 = "{"0" * 64}"')
    keys = tomllib.loads(text)
    refusals = []
    for kind, (load, rest) in KINDS.items():
        missing = [line for key, line in rest.items() if key not in keys]
        first = [line for line in missing if not line.startswith("[")]
        last = [line for line in missing if line.startswith("[")]
        file = tmp_path / f"{kind}.toml"
        file.write_text("\n".join([*first, text, *last]) + "\n")
        try:
            load(file)
        except ConfigError as error:
            refusals.append(f"as {kind}: {error}")
        else:
            return
    pytest.fail("\n".join(refusals))


@pytest.mark.parametrize("text", list(blocks("python")))
def test_a_block_of_python_names_what_there_is(text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "roundtable":
            module = importlib.import_module(str(node.module))
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rt":
            assert hasattr(importlib.import_module("roundtable"), node.attr), f"there is no rt.{node.attr}"

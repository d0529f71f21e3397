"""Blocks of pages that no other test runs: files are accepted, Python imports what there is, commands exist.

Tutorials, how-to pages and the `sh` blocks of the two administrators' pages are run by their own tests.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from roundtable.cli.main import cli
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


def commands(text: str) -> Iterator[list[str]]:
    """What follows `roundtable` in each command of a block, up to where a shell's own words begin."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.wordchars += "~:/=.,@%{}+*[]$!?…"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(lexer.punctuation_chars):
                while words and (words[0] == "sudo" or "=" in words[0]):
                    words = words[1:]
                if "roundtable" in words[:1]:
                    yield words[1:]
                words = []
            else:
                words.append(word)


@pytest.mark.parametrize(
    "page", sorted([*DOCS.glob("*.md"), *DOCS.glob("*/*.md")]), ids=lambda page: str(page.relative_to(DOCS))
)
def test_every_command_of_a_page_is_one_that_there_is(page: Path) -> None:
    for language, text in BLOCK.findall(page.read_text()):
        for words in commands(textwrap.dedent(text)) if language == "sh" else ():
            check(cli, click.Context(cli, info_name="roundtable"), words)


def check(command: click.Command, context: click.Context, words: list[str]) -> None:
    """Options are known, and what stands where a group has its commands is one."""
    known = {
        name: option
        for option in command.get_params(context)
        for name in (*option.opts, *option.secondary_opts)
        if isinstance(option, click.Option)
    }
    while words:
        word, *words = words
        name = word.partition("=")[0]
        if word.startswith("-"):
            assert name in known, f"{context.command_path} has no option {name}"
            alone = known[name].is_flag or known[name].count or name != word
            words = words if alone else words[1:]
        elif isinstance(command, click.Group) or (command.name, word) == ("server", "install"):
            found = command.get_command(context, word)  # type: ignore[attr-defined]
            assert found is not None, f"{context.command_path} has no command {word}"
            check(found, click.Context(found, info_name=word, parent=context), words)
            return

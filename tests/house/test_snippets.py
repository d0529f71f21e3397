"""Blocks of pages that no other test runs: files are accepted, Python runs, commands and their options exist.

Tutorials, how-to pages and the `sh` blocks of the two administrators' pages are run by their own tests.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch

import roundtable as rt
from roundtable.cli.main import cli
from roundtable.client.policy.config import load_agent_config
from roundtable.core.config import load_job
from roundtable.core.errors import ConfigError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.privacy import Budget
from roundtable.privacy.example_level import SiloAccount, make_private
from roundtable.relay.config import load_relay_config
from roundtable.server.config import load_server_config
from roundtable.surveys import load_survey

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
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


def around_aggregation() -> dict[str, Any]:
    names = [f"silo-{number}" for number in range(10)]
    made = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    return {"silos": [(name, 10) for name in names], "updates": made}


def around_privacy() -> dict[str, Any]:
    model, data = torch.nn.Linear(4, 3), torch.randn(40, 5)
    made = {"level": "example", "noise_multiplier": 1.0, "delta": 1e-5, "clip_norm": 1.0, "batch_size": 8}
    return {
        "make_private": make_private,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss_fn": lambda model, batch: model(batch[:, :4]).square().mean(),
        "fetch": lambda indices: data[indices],
        "data": data,
        "config": ExampleLevel.model_validate(made),
        "steps": 3,
        "account": SiloAccount(Budget("ward", 50.0, 1e-5)),
        "proximal": lambda: None,
        **{"job": "job-1", "round": 1, "attempt": 1},
    }


def around_simulation() -> dict[str, Any]:
    shutil.copytree(ROOT / "examples/digits", ".", dirs_exist_ok=True)
    job = Path("job.toml").read_text()
    Path("job.toml").write_text(f"{job}\n[keep]\nevery = 20\n")
    return {"labels": np.arange(200) % 10}


def around_analytics() -> dict[str, Any]:
    Path("examples").symlink_to(ROOT / "examples")
    return {}


AROUND = {
    "aggregation": around_aggregation,
    "privacy": around_privacy,
    "simulation": around_simulation,
    "analytics": around_analytics,
}
"""What the pages' blocks are given, as their text says; the working folder is an empty one."""


@pytest.mark.parametrize("page", sorted({each.id.rpartition("-")[0] for each in blocks("python")}))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"rt": rt, "torch": torch, "np": np, **AROUND.get(page, dict)()}
    for block in blocks("python"):
        if block.id.rpartition("-")[0] == page:
            exec(compile(block.values[0], block.id, "exec"), names)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*/*.md")), ids=lambda page: page.stem)
def test_python_whose_surroundings_a_reader_has_names_what_there_is(page: Path) -> None:
    for language, text in BLOCK.findall(page.read_text()):
        for node in ast.walk(ast.parse(textwrap.dedent(text))) if language == "python" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rt":
                assert hasattr(rt, node.attr), f"there is no rt.{node.attr}"


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

"""The page's scripts: their types, where a compiler is here, and the commands that they tell people."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from roundtable.cli.main import cli

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("api/*/static/*.js"))


def test_types_hold() -> None:
    """JSDoc types of all scripts together, as strictly as TypeScript looks."""
    compiler = shutil.which("tsc")
    if compiler is None:
        pytest.skip("no tsc here: npm install --global typescript")
    said = subprocess.run([compiler, "-p", ROOT / "tools" / "tsconfig.json"], capture_output=True, text=True)
    assert said.stdout == ""


def test_every_command_that_a_page_names_is_one() -> None:
    told = {
        words
        for script in SCRIPTS
        for words in re.findall(r"[`\"']roundtable((?: [a-z][a-z-]*(?![\w.-]))+)", script.read_text())
    }
    assert len(told) > 4
    for words in told:
        command: click.Command = cli
        for word in words.split():
            # What follows a command that has none below it is taken for its argument.
            assert isinstance(command, click.Group), f"roundtable {words}: {word} is no part of the command"
            assert word in command.commands, f"roundtable {words}"
            command = command.commands[word]

"""Every command that tells a result tells it to programs too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from roundtable.cli.main import cli, run
from roundtable.cli.shared.install import install_server

WITHOUT = {
    "client": "runs until it is stopped; its log is JSON by log.format",
    "relay": "runs until it is stopped; its log is JSON by log.format",
    "server": "runs until it is stopped; its log is JSON by log.format",
    "client requests show": "prints the report itself, byte for byte, which is JSON",
    "completion": "prints a script for a shell",
    "privacy export": "prints the ledger itself, as JSON or CSV by --format",
}
"""Commands without `--json`, and why."""


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Everything that can be called, by the words after `roundtable`."""
    if isinstance(command, click.Group):
        for name, each in command.commands.items():
            yield from commands(each, (*path, name))
        if not command.invoke_without_command:
            return
    yield " ".join(path), command


def test_every_command_has_json_or_a_reason() -> None:
    found = {**dict(commands(cli)), "server install": install_server}
    assert len(found) > 60
    lacking = {
        name for name, each in found.items() if "--json" not in {o for p in each.params for o in p.opts}
    }
    assert lacking == set(WITHOUT)


def told(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """What a command prints, all of which must be JSON."""
    assert run([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_commands_did_is_json_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = tmp_path / "ca"
    assert told(capsys, "ca", "init", ca)["certificate"] == str(ca / "ca.crt")
    issued = told(capsys, "ca", "issue", "north", "--role", "agent", "--ca", ca, "--out", tmp_path / "north")
    assert (issued["name"], issued["role"]) == ("north", "agent")
    assert told(capsys, "ca", "issuing", ca)["certificate"] == str(ca / "issuing.crt")
    listed = told(capsys, "ca", "revoke", tmp_path / "north" / "node.crt", "--ca", ca)["list"]
    assert Path(listed).is_file()
    (tmp_path / "blobs.py").write_text("import roundtable as rt\n")
    agent = tmp_path / "agent.toml"
    agent.write_text('coordinator = "localhost:1"\ncredentials = "north"\n[tasks]\nblobs = "blobs.py"\n')
    client = ("client", "--config", agent)
    assert told(capsys, *client, "drain", "--reason", "cooling")["changed"] is True
    assert told(capsys, *client, "drain", "--reason", "cooling")["changed"] is False
    assert told(capsys, *client, "resume") == {"drained": False, "changed": True}
    assert len(told(capsys, *client, "hash", "blobs")["blake3"]) == 64
    assert told(capsys, *client, "page")["address"].startswith("http://")
    unit = told(capsys, *client, "install", "--systemd", "--out", tmp_path)["unit"]
    assert Path(unit).is_file()


@pytest.mark.parametrize("words", [("approve", "job-1"), ("requests", "approve", "request-1")])
def test_what_asks_a_person_takes_json_with_yes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (tmp_path / "agent.toml").write_text('coordinator = "localhost:1"\n')
    assert run(["client", "--config", str(tmp_path / "agent.toml"), *words, "--json"]) == 2
    said = capsys.readouterr()
    assert "say --yes" in said.err
    assert said.out == ""

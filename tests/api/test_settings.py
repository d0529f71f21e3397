"""The variables beside a coordinator's settings: every command sees the database that the service uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundtable.core.errors import ConfigError
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.server.store import Database
from roundtable.settings import coordinator_settings, take_variables

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put into the environment goes when the test ends."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("ROUNDTABLE_DATABASE", "INVOCATION_ID"):
        os.environ.pop(name, None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Settings that name no database; the one that is used stands in the file of variables."""
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "credentials", ["127.0.0.1"])
    Database.open(f"sqlite:///{tmp_path / 'used.db'}").close()
    (tmp_path / "coordinator.env").write_text(f"ROUNDTABLE_DATABASE=sqlite:///{tmp_path / 'used.db'}\n")
    (tmp_path / "coordinator.toml").write_text('listen = "127.0.0.1:0"\n')
    return tmp_path / "coordinator.toml"


def test_a_backup_is_of_the_database_that_the_service_uses(file: Path, roundtable: Command) -> None:
    said = roundtable("backup", file, file.parent / "monday")
    assert said.code == 0, said.err
    assert (file.parent / "monday" / "manifest.json").exists()


def test_a_backup_and_its_return_are_json_for_programs(file: Path, roundtable: Command) -> None:
    said = json.loads(roundtable("backup", file, file.parent / "monday", "--json").out)
    assert (said["folder"], said["artifacts"]) == (str(file.parent / "monday"), 0)
    (file.parent / "drill.toml").write_text('state = "drill"\n')
    os.environ["ROUNDTABLE_DATABASE"] = f"sqlite:///{file.parent / 'new.db'}"
    back = json.loads(roundtable("restore", file.parent / "monday", file.parent / "drill.toml", "--json").out)
    assert back["created"] == said["created"]


@pytest.mark.slow
def test_every_line_of_a_json_log_is_json(file: Path) -> None:
    file.write_text('listen = "127.0.0.1:0"\nlog_format = "json"\n')
    line = [sys.executable, "-m", "roundtable", "server", str(file)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        second = subprocess.run(line, capture_output=True, text=True, check=False)
        process.terminate()
        out, err = process.communicate()
    assert "is listening on" in json.loads(first)["message"]
    assert second.returncode == 1
    lines = [*out.splitlines(), *err.splitlines(), *second.stdout.splitlines(), *second.stderr.splitlines()]
    messages = [json.loads(each)["message"] for each in lines]
    assert any(message.startswith("Error: ") for message in messages)


def test_so_is_what_the_doctor_looks_at(file: Path, roundtable: Command) -> None:
    said = roundtable("doctor", "--server", file)
    assert "used.db can be read" in said.out


def test_a_backup_is_restored_to_where_the_variable_points(file: Path, roundtable: Command) -> None:
    assert roundtable("backup", file, file.parent / "monday").code == 0
    place = file.parent / "elsewhere"
    (file.parent / "drill.toml").write_text('state = "drill"\n')
    os.environ["ROUNDTABLE_DATABASE"] = f"sqlite:///{place / 'new.db'}"
    said = roundtable("restore", file.parent / "monday", file.parent / "drill.toml")
    assert said.code == 0, said.err
    assert (place / "new.db").exists()


def test_what_the_environment_says_wins_over_the_file(file: Path) -> None:
    os.environ["ROUNDTABLE_DATABASE"] = "sqlite:////elsewhere/other.db"
    assert coordinator_settings(file).database == "sqlite:////elsewhere/other.db"


def test_variables_are_written_as_systemd_takes_them(tmp_path: Path) -> None:
    (tmp_path / "hub.env").write_text("# a remark\n; another\n\nRT_A=one=1\n RT_B=\"two words\"\nRT_C=''\n")
    take_variables(tmp_path / "hub.toml")
    assert [os.environ[f"RT_{letter}"] for letter in "ABC"] == ["one=1", "two words", ""]


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "hub.env").write_text("RT_A=1\nnonsense\n")
    with pytest.raises(ConfigError, match=r"hub\.env:2: expected NAME=value"):
        take_variables(tmp_path / "hub.toml")


def test_a_file_that_cannot_be_read_is_named_and_left_to_systemd(file: Path, roundtable: Command) -> None:
    (file.parent / "coordinator.env").unlink()
    (file.parent / "coordinator.env").mkdir()
    said = roundtable("backup", file, file.parent / "monday")
    assert said.code == 2
    assert "coordinator.env cannot be read: Is a directory" in said.err
    os.environ["INVOCATION_ID"] = "a service's"
    os.environ["ROUNDTABLE_DATABASE"] = f"sqlite:///{file.parent / 'used.db'}"
    said = roundtable("backup", file, file.parent / "monday")
    assert said.code == 0, said.err


def test_a_folder_that_cannot_be_written_is_one_line(file: Path, roundtable: Command) -> None:
    said = roundtable("backup", file, file / "monday")
    assert said.code == 1
    assert said.err.startswith(f"Error: {file / 'monday'}")
    assert said.err.count("\n") == 1


def test_backups_are_for_their_maker_alone(file: Path, roundtable: Command) -> None:
    assert roundtable("backup", file, file.parent / "monday").code == 0
    assert (file.parent / "monday").stat().st_mode & 0o077 == 0

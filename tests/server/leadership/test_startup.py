"""What keeps a coordinator from starting: one line that says what to do, before anything is changed."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import pytest
from postgresql import PostgreSQL
from processes import Federation
from service import running

from roundtable.core.errors import ConfigError, ResourceError, RoundtableError, StorageError
from roundtable.core.identity.credentials import issue
from roundtable.server import Coordinator, ServerConfig, load_server_config, run_server

Settings = Callable[..., ServerConfig]


def complaint(config: ServerConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a coordinator ends with that cannot start."""
    with pytest.raises(RoundtableError) as caught:
        run_server(config)
    assert capsys.readouterr().out == ""
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_port_in_use(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        said = complaint(settings(listen=listen), capsys)
    assert f"cannot listen on {listen}: Address already in use" in said
    assert "--listen" in said


def test_an_address_that_is_not_ours(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot listen on 192.0.2.1:7443" in complaint(settings(listen="192.0.2.1:7443"), capsys)


def test_certificates(
    settings: Settings, certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = datetime.now(UTC) - timedelta(days=30)
    authority = certificates / "ca"
    expired = issue(authority, "old", "coordinator", tmp_path / "old", ("localhost",), days=10, start=old)
    mixed = shutil.copytree(certificates / "coordinator", tmp_path / "mixed")
    shutil.copy(certificates / "alder" / "node.key", mixed / "node.key")
    for folder, words in (
        (tmp_path / "nowhere", "there is no file"),
        (expired, "expired on"),
        (mixed, "is not the key of"),
        (certificates / "alder", "a coordinator needs its own"),
    ):
        assert words in complaint(settings(credentials=folder), capsys)


def test_folders(settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    said = complaint(settings(artifacts=tmp_path / "file" / "artifacts"), capsys)
    assert "the artifact folder" in said
    assert "cannot be used" in said


def test_databases(settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a database " * 100)
    for address, words in (
        (f"sqlite:///{tmp_path / 'file'}", "damaged or is none of ours"),
        ("oracle://x", "not supported"),
    ):
        said = complaint(settings(database=address), capsys)
        assert words in said
        assert "hidden" not in said


def test_a_database_that_refuses_is_not_waited_for(
    settings: Settings, postgresql: PostgreSQL, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "does not exist" in complaint(settings(database=f"{postgresql.address}-nowhere"), capsys)


def test_a_database_that_comes_later_is_waited_for(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that boots: systemd hears of the wait, and READY only then; SIGHUP ends nothing."""
    federation = Federation(tmp_path, silos=(), settings={"database": postgresql.fresh()})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        told: list[str] = []

        def hear(words: str) -> None:
            while words not in "\n".join(told[-1:]):
                told.append(systemd.recv(4096).decode())

        postgresql.stop()
        try:
            starting = Thread(target=federation.coordinator)
            starting.start()
            hear("STATUS=waiting for the database: ")
            process = federation.processes["hub"]
            process.send_signal(signal.SIGHUP)
            federation.until(lambda: "SIGHUP: log levels are as they are" in federation.log("hub"))
            assert any("EXTEND_TIMEOUT_USEC=" in each for each in told)
            assert not any("READY=1" in each for each in told)
            assert process.poll() is None
        finally:
            postgresql.start()
        hear("STATUS=active\nREADY=1")
        starting.join()
        process.send_signal(signal.SIGHUP)
        federation.until(lambda: federation.log("hub").count("SIGHUP: log levels are as they are") == 2)
        process.send_signal(signal.SIGINT)
        assert federation.died("hub") == 130


async def test_a_second_coordinator_on_the_same_files(settings: Settings) -> None:
    async with running(settings()):
        with pytest.raises(ResourceError, match="in use by another coordinator"):
            await Coordinator(settings()).start()


async def test_artifacts_of_another_coordinator(settings: Settings, tmp_path: Path) -> None:
    async with running(settings()):
        pass
    other = settings(database=f"sqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(StorageError, match="belongs to coordinator"):
        await Coordinator(other).start()


def test_settings_files(tmp_path: Path) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('listen = "0.0.0.0:9000"\nstate = "s"\nheartbeat = "5s"\n')
    config = load_server_config(file, {"listen": "127.0.0.1:1", "state": None})
    assert (config.listen, config.heartbeat) == ("127.0.0.1:1", 5.0)
    assert config.state == str(tmp_path / "s")
    assert config.database == f"sqlite:///{tmp_path / 's' / 'coordinator.db'}"
    for text, words in (
        ('lissen = "x"', "did you mean 'listen'"),
        ('listen = "7443"', "is not host:port"),
        ('heartbeat = "soon"', "is not a duration"),
        ("keep_models = 0", "greater than or equal to 1"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            load_server_config(file)
        assert f"{file}:1" in str(caught.value)

"""A coordinator on loopback with real certificates, and the databases that it is tested on."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from service import AGENTS, Operator, model_bytes, running

from roundtable.core import Layout, Model
from roundtable.core.identity import create_ca, issue
from roundtable.server import Coordinator, ServerConfig, load_server_config


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with credentials for a coordinator, three agents and two operators."""
    folder = tmp_path_factory.mktemp("certificates")
    create_ca(folder / "ca")
    issue(
        folder / "ca", "coordinator", "coordinator", folder / "coordinator", hosts=("localhost", "127.0.0.1")
    )
    for name in AGENTS:
        issue(folder / "ca", name, "agent", folder / name)
    for name in ("olga", "oskar"):
        issue(folder / "ca", name, "operator", folder / name)
    return folder


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The address of a PostgreSQL server of our own; skipped where its programs are absent."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    user = _ordinary_user()
    # pytest's own folders are closed to other users, and the server may have to be another one.
    folder = Path(tempfile.mkdtemp(prefix="roundtable-postgresql-"))
    if user is not None:
        shutil.chown(folder, user)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder}"
    control = [str(programs[-1] / "pg_ctl"), "-D", str(data), "-l", str(folder / "log"), "-w"]
    _run([str(programs[-1] / "initdb"), "-D", str(data), "-U", "roundtable", "-A", "trust"], user)
    _run([*control, "-o", options, "start"], user)
    yield f"postgresql://roundtable@127.0.0.1:{port}/postgres"
    _run([*control, "-m", "immediate", "stop"], user)
    shutil.rmtree(folder)


def _ordinary_user() -> str | None:
    """PostgreSQL refuses to run as root; the user to run it as then."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    found = next((name for name in ("postgres", "nobody") if name in names), None)
    if found is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no other user")
    return found


def _run(command: list[str], user: str | None) -> None:
    done = subprocess.run(
        command,
        user=user,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'coordinator.db'}"
    return _fresh(request.getfixturevalue("postgresql"), tmp_path)


def _fresh(server: str, tmp_path: Path) -> str:
    import psycopg

    name = f"t{blake3(str(tmp_path).encode()).hexdigest()[:16]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.rsplit("/", 1)[0] + f"/{name}"


@pytest.fixture
def settings(tmp_path: Path, certificates: Path) -> Callable[..., ServerConfig]:
    """Makes settings for a coordinator in this test's folder."""

    def make(**changes: Any) -> ServerConfig:
        values = {
            "listen": "127.0.0.1:0",
            "state": str(tmp_path / "state"),
            "credentials": str(certificates / "coordinator"),
        }
        return load_server_config(None, {**values, **changes})

    return make


@pytest.fixture
async def coordinator(settings: Callable[..., ServerConfig]) -> AsyncIterator[Coordinator]:
    """A running coordinator on SQLite."""
    async with running(settings()) as started:
        yield started


@pytest.fixture
async def operator(coordinator: Coordinator, certificates: Path) -> AsyncIterator[Operator]:
    """An operator of the running coordinator."""
    async with Operator(coordinator.port, certificates / "olga") as found:
        yield found


@pytest.fixture
def saved_model() -> bytes:
    """A small model artifact."""
    layout = Layout.of({"w": torch.zeros(4)})
    return model_bytes(Model(layout, torch.zeros(4)))

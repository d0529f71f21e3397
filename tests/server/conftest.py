"""A coordinator on loopback with real certificates, and the databases that it is tested on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from postgresql import PostgreSQL
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, model_bytes, running

from roundtable.core import Layout, Model
from roundtable.core.identity.credentials import create_ca, issue
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
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server of our own; skipped where its programs are absent."""
    server = PostgreSQL()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'coordinator.db'}"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.fresh()


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


@pytest.fixture
async def pair(coordinator: Coordinator, certificates: Path) -> AsyncIterator[list[ScriptedAgent]]:
    """Two connected agents."""
    agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS[:2]]
    async with agents[0], agents[1]:
        yield agents

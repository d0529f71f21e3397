"""A coordinator on loopback with a page, and a browser where the machine has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundtable.core.identity.credentials import create_ca, issue
from roundtable.server import ServerConfig, load_server_config


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Credentials of a coordinator, an operator and two agents."""
    folder = tmp_path_factory.mktemp("certificates")
    create_ca(folder / "ca")
    issue(
        folder / "ca", "coordinator", "coordinator", folder / "coordinator", hosts=("localhost", "127.0.0.1")
    )
    issue(folder / "ca", "olga", "operator", folder / "olga")
    issue(folder / "ca", "ada", "admin", folder / "ada")
    for name in ("alder", "birch"):
        issue(folder / "ca", name, "agent", folder / name)
    return folder


@pytest.fixture
def settings(tmp_path: Path, certificates: Path) -> Callable[..., ServerConfig]:
    """Makes settings for a coordinator with a page in this test's folder."""

    def make(**dashboard: Any) -> ServerConfig:
        values = {
            "listen": "127.0.0.1:0",
            "state": str(tmp_path / "state"),
            "credentials": str(certificates / "coordinator"),
            "dashboard": {"listen": "127.0.0.1:0", **dashboard},
        }
        return load_server_config(None, values)

    return make

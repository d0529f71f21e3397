"""The databases that durability is tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgresql import PostgreSQL


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server of our own; skipped where its programs are absent."""
    server = PostgreSQL()
    yield server
    server.remove()

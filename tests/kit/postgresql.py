"""A PostgreSQL server of a test's own, which can be stopped and started again."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from become import become


class PostgreSQL:
    """The server; `fresh` makes an empty database and gives its address."""

    def __init__(self) -> None:
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not programs:
            pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
        self._programs = programs[-1]
        self._user = _ordinary_user()
        # pytest's own folders are closed to other users, and the server may have to be another one.
        self._folder = Path(tempfile.mkdtemp(prefix="roundtable-postgresql-"))
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        data = str(self._folder / "data")
        self._run(str(self._programs / "initdb"), "-D", data, "-U", "roundtable", "-A", "trust")
        self.start()

    @property
    def address(self) -> str:
        """Gives the address of the server's own database."""
        return f"postgresql://roundtable@127.0.0.1:{self.port}/postgres"

    def fresh(self) -> str:
        """The address of a new, empty database."""
        import psycopg

        name = f"t{secrets.token_hex(8)}"
        with psycopg.connect(self.address, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.address.rsplit("/", 1)[0] + f"/{name}"

    def start(self) -> None:
        """Starts it and waits until it answers."""
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -k {self._folder}"
        self._control("start", "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        """Stops it; "immediate" is a crash."""
        self._control("stop", "-m", mode)

    def remove(self) -> None:
        """Stops it for good."""
        self.stop()
        shutil.rmtree(self._folder)

    def _control(self, *words: str) -> None:
        log = str(self._folder / "log")
        self._run(str(self._programs / "pg_ctl"), "-D", str(self._folder / "data"), "-l", log, "-w", *words)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            become(self._user, *command) if self._user else command,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert done.returncode == 0, done.stderr.decode()


def _ordinary_user() -> str | None:
    """PostgreSQL refuses to run as root; the user to run it as then."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = next((name for name in ("postgres", "nobody") if name in names), None)
    if user is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no other user")
    return user

"""Which versions of TLS a coordinator speaks that was started as people start it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundtable.child_processes import Child, Children
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.demo import free_port

PATIENCE = 200.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    create_ca(folder / "ca")
    issue(folder / "ca", "hub", "coordinator", folder / "hub", ["localhost", "127.0.0.1"], enrols=True)
    issue(folder / "ca", "olga", "operator", folder / "olga")
    return folder


@pytest.fixture(scope="module")
def doors(place: Path) -> Iterator[dict[str, int]]:
    """Ports of a coordinator in a process of its own, as the command line starts it."""
    ports = {"listen": free_port(), "enrolment": free_port()}
    options = [part for name, port in ports.items() for part in (f"--{name}", f"127.0.0.1:{port}")]
    command = ["server", *options, "--credentials", str(place / "hub"), "--state", str(place / "state")]
    with Children(place) as children:
        child = children.start("hub", command)
        for port in ports.values():
            _wait_for(port, child)
        yield ports


def _wait_for(port: int, child: Child) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert child.process.poll() is None, child.tail()
            assert time.monotonic() < end, child.tail()
            time.sleep(0.05)


def spoken(port: int, folder: Path, least: ssl.TLSVersion, most: ssl.TLSVersion) -> str | None:
    """The version that was agreed on, by a client that offers these, with every cipher that it has."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "node.crt", folder / "node.key")
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = least, most
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), 10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        assert connection.recv(1), "the coordinator speaks first in HTTP/2"
        return connection.version()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("door", ["listen", "enrolment"])
def test_tls_1_3_and_nothing_older(door: str, doors: dict[str, int], place: Path) -> None:
    versions = ssl.TLSVersion
    assert spoken(doors[door], place / "olga", versions.TLSv1_2, versions.TLSv1_3) == "TLSv1.3"
    for old in (versions.TLSv1, versions.TLSv1_1, versions.TLSv1_2):
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            spoken(doors[door], place / "olga", versions.TLSv1, old)

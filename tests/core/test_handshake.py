"""A failed connection is explained: each case against a real gRPC server or socket."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from roundtable.core.errors import ConfigError, IdentityError, ProtocolError, UnavailableError
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.identity.handshake import check_connection, split_address


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    """A bare gRPC server with these credentials that wants a client certificate; gives its port."""
    server = grpc.server(ThreadPoolExecutor(1))
    pair = ((folder / "node.key").read_bytes(), (folder / "node.crt").read_bytes())
    trusted = (folder / "ca.crt").read_bytes()
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([pair], trusted, require_client_auth=True)
    )
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_ca(tmp_path / "ca")
    return tmp_path / "ca"


@pytest.fixture
def operator(ca: Path, tmp_path: Path) -> Path:
    return issue(ca, "ada", "operator", tmp_path / "ada")


def test_nothing_to_say_when_it_works(ca: Path, operator: Path, tmp_path: Path) -> None:
    with serving(issue(ca, "hub", "coordinator", tmp_path / "hub", ["localhost"])) as port:
        check_connection(f"localhost:{port}", operator)


def test_another_name(ca: Path, operator: Path, tmp_path: Path) -> None:
    hub = issue(ca, "hub", "coordinator", tmp_path / "hub", ["hub.example"])
    refusal = pytest.raises(IdentityError, match=r"is not for the name 'localhost'.*--host localhost")
    with serving(hub) as port, refusal:
        check_connection(f"localhost:{port}", operator)


def test_expired_server(ca: Path, operator: Path, tmp_path: Path) -> None:
    start = datetime.now(UTC) - timedelta(days=9)
    hub = issue(ca, "hub", "coordinator", tmp_path / "hub", ["localhost"], days=1, start=start)
    with serving(hub) as port, pytest.raises(IdentityError, match="has expired"):
        check_connection(f"localhost:{port}", operator)


def test_another_authority(operator: Path, tmp_path: Path) -> None:
    create_ca(tmp_path / "other")
    hub = issue(tmp_path / "other", "hub", "coordinator", tmp_path / "hub", ["localhost"])
    with serving(hub) as port, pytest.raises(IdentityError, match="is from another authority"):
        check_connection(f"localhost:{port}", operator)


def test_a_client_that_the_server_does_not_accept(ca: Path, tmp_path: Path) -> None:
    create_ca(tmp_path / "other")
    stranger = issue(tmp_path / "other", "eve", "operator", tmp_path / "eve")
    shutil.copy(ca / "ca.crt", stranger / "ca.crt")
    hub = issue(ca, "hub", "coordinator", tmp_path / "hub", ["localhost"])
    with serving(hub) as port, pytest.raises(IdentityError, match=r"does not accept .*eve/node\.crt"):
        check_connection(f"localhost:{port}", stranger)


def test_nobody_there_and_no_tls(operator: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"nothing listens at {address}"):
            check_connection(address, operator)
    plain = grpc.server(ThreadPoolExecutor(1))
    port = plain.add_insecure_port("127.0.0.1:0")
    plain.start()
    with pytest.raises(ProtocolError, match="does not speak TLS"):
        check_connection(f"127.0.0.1:{port}", operator)
    plain.stop(None).wait()


def test_the_port_of_a_page(ca: Path, operator: Path, tmp_path: Path) -> None:
    hub = issue(ca, "hub", "coordinator", tmp_path / "hub", ["localhost"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(hub / "node.crt", hub / "node.key")
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            for _ in range(2):  # What is wrong is looked at once more.
                with context.wrap_socket(listening.accept()[0], server_side=True) as connection:
                    connection.recv(1)

        served = pool.submit(serve)
        with pytest.raises(ProtocolError, match=r"speaks TLS and no gRPC, as the coordinator's page does"):
            check_connection(f"localhost:{listening.getsockname()[1]}", operator)
        served.result()


def test_a_host_without_address(operator: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be resolved"):
        check_connection("no-such-host.invalid:7443", operator)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":7443", "host:port", "host:0", "host:70000", "https://host:7443"]
)
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_address(address)


def test_addresses() -> None:
    assert split_address("hub.example:7443") == ("hub.example", 7443)
    assert split_address("[::1]:7443") == ("::1", 7443)


def test_a_coordinator_that_was_killed_in_a_handshake_is_not_one_that_refuses(tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "silo", "agent", tmp_path / "silo")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def accept_and_die() -> None:
            connection, _ = listening.accept()
            listening.close()
            connection.recv(100)
            connection.close()

        dying = threading.Thread(target=accept_and_die)
        dying.start()
        with pytest.raises(UnavailableError, match="nothing listens"):
            check_connection(address, tmp_path / "silo")
        dying.join()

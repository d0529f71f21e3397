"""Certificates: what is issued can be used, and each mistake is one clear message."""

from __future__ import annotations

import shutil
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from roundtable.core.errors import IdentityError
from roundtable.core.identity import (
    create_ca,
    identity_of,
    issue,
    load_credentials,
    load_silo_identity,
    verify_identity,
)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    create_ca(tmp_path / "ca")
    return tmp_path / "ca"


@pytest.fixture
def agent(ca: Path, tmp_path: Path) -> Path:
    return issue(ca, "hospital-a", "agent", tmp_path / "hospital-a")


def test_issued_credentials_load_and_say_who_they_are(agent: Path) -> None:
    credentials = load_credentials(agent)
    assert (credentials.name, credentials.role) == ("hospital-a", "agent")
    assert identity_of(credentials.certificate) == ("hospital-a", "agent")
    assert len(credentials.fingerprint) == 64
    assert b"PRIVATE" in credentials.key
    assert "PRIVATE" not in repr(credentials)


def test_keys_are_readable_by_their_owner_only(ca: Path, agent: Path) -> None:
    for path in (ca / "ca.key", agent / "node.key", agent / "identity.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_overwritten(ca: Path, agent: Path) -> None:
    before = {path: path.read_bytes() for folder in (ca, agent) for path in folder.iterdir()}
    with pytest.raises(IdentityError, match=r"ca\.key already exists"):
        create_ca(ca)
    with pytest.raises(IdentityError, match=r"node\.key already exists"):
        issue(ca, "hospital-a", "agent", agent)
    assert {path: path.read_bytes() for path in before} == before


def _handshake(server: Path, client: Path, host: str) -> str | None:
    """The version that both sides agreed on, over a real socket pair."""
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.minimum_version = ssl.TLSVersion.TLSv1_3
    listening.load_cert_chain(server / "node.crt", server / "node.key")
    listening.load_verify_locations(server / "ca.crt")
    listening.verify_mode = ssl.CERT_REQUIRED
    dialling = ssl.create_default_context(cafile=str(client / "ca.crt"))
    dialling.load_cert_chain(client / "node.crt", client / "node.key")
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with listening.wrap_socket(theirs, server_side=True) as connection:
                connection.sendall(b"!")
        except ssl.SSLError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with dialling.wrap_socket(ours, server_hostname=host) as connection:
            assert connection.recv(1) == b"!"
            return connection.version()
    finally:
        ours.close()
        thread.join()


def test_both_sides_accept_each_other_over_tls_1_3(ca: Path, agent: Path, tmp_path: Path) -> None:
    server = issue(ca, "coordinator", "coordinator", tmp_path / "server", ["localhost", "127.0.0.1"])
    assert _handshake(server, agent, "localhost") == "TLSv1.3"
    assert _handshake(server, agent, "127.0.0.1") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        _handshake(server, agent, "elsewhere.example")


def test_an_agent_cannot_pose_as_the_coordinator(ca: Path, agent: Path, tmp_path: Path) -> None:
    false_server = issue(ca, "mallory", "agent", tmp_path / "mallory", ["localhost"])
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        _handshake(false_server, agent, "localhost")


def test_expired_and_future_certificates(ca: Path, tmp_path: Path) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=40)
    old = issue(ca, "old", "agent", tmp_path / "old", days=30, start=long_ago)
    with pytest.raises(IdentityError, match=r"old/node\.crt expired on .* `roundtable ca issue`"):
        load_credentials(old)
    early = issue(ca, "early", "agent", tmp_path / "early", start=datetime.now(UTC) + timedelta(days=1))
    with pytest.raises(IdentityError, match=r"early/node\.crt is valid only from .* clock"):
        load_credentials(early)


def test_certificate_of_another_authority(agent: Path, tmp_path: Path) -> None:
    other = create_ca(tmp_path / "other")
    shutil.copy(other, agent / "ca.crt")
    with pytest.raises(IdentityError, match=r"node\.crt was not issued by .*ca\.crt"):
        load_credentials(agent)


def test_key_of_another_certificate(ca: Path, agent: Path, tmp_path: Path) -> None:
    other = issue(ca, "other", "agent", tmp_path / "other")
    shutil.copy(other / "node.key", agent / "node.key")
    with pytest.raises(IdentityError, match=r"node\.key is not the key of .*node\.crt"):
        load_credentials(agent)


@pytest.mark.parametrize("name", ["ca.crt", "node.crt", "node.key"])
def test_missing_and_broken_files_are_named(agent: Path, name: str) -> None:
    (agent / name).write_text("nonsense")
    with pytest.raises(IdentityError, match=rf"{name} is not an? .*PEM"):
        load_credentials(agent)
    (agent / name).unlink()
    with pytest.raises(IdentityError, match=rf"there is no file .*{name}.*roundtable ca issue"):
        load_credentials(agent)


def test_issue_refuses_what_could_not_be_used(ca: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(IdentityError, match="--host"):
        issue(ca, "coordinator", "coordinator", out)
    with pytest.raises(IdentityError, match="cannot be a name"):
        issue(ca, "../escape", "agent", out)
    with pytest.raises(IdentityError, match="unknown role"):
        issue(ca, "a", "admin", out)  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match="neither an IP address nor"):
        issue(ca, "c", "coordinator", out, ["bücher.example"])
    with pytest.raises(IdentityError, match=r"ca\.crt"):
        issue(tmp_path / "nowhere", "a", "agent", out)
    assert not out.exists()


def test_folder_that_cannot_be_made(ca: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="cannot be written"):
        issue(ca, "a", "agent", tmp_path / "file" / "out")


def test_a_certificate_without_our_roles(ca: Path) -> None:
    with pytest.raises(IdentityError, match="names the role none"):
        identity_of((ca / "ca.crt").read_bytes())


def test_an_agent_gets_a_signing_identity_that_others_can_check(ca: Path, agent: Path) -> None:
    identity = load_silo_identity(agent)
    name, key = verify_identity(identity.certificate, (ca / "ca.crt").read_bytes())
    assert (name, key) == ("hospital-a", identity.key.public_key().public_bytes_raw())
    assert "key" not in repr(identity)


def test_only_agents_sign(ca: Path, tmp_path: Path) -> None:
    operator = issue(ca, "ada", "operator", tmp_path / "ada")
    with pytest.raises(IdentityError, match="secure aggregation; issue the agent's credentials anew"):
        load_silo_identity(operator)


def test_false_identities_are_refused(ca: Path, agent: Path, tmp_path: Path) -> None:
    authority = (ca / "ca.crt").read_bytes()
    create_ca(tmp_path / "other")
    stranger = issue(tmp_path / "other", "hospital-a", "agent", tmp_path / "stranger")
    with pytest.raises(IdentityError, match="was not issued by the authority"):
        verify_identity((stranger / "identity.crt").read_bytes(), authority)
    with pytest.raises(IdentityError, match="not an agent's Ed25519 certificate"):
        verify_identity((agent / "node.crt").read_bytes(), authority)
    later = datetime.now(UTC) + timedelta(days=3660)
    with pytest.raises(IdentityError, match="of 'hospital-a' expired"):
        verify_identity((agent / "identity.crt").read_bytes(), authority, now=later)
    shutil.copy(stranger / "identity.key", agent / "identity.key")
    with pytest.raises(IdentityError, match=r"identity\.key is not the key of identity\.crt"):
        load_silo_identity(agent)

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
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given
from hypothesis import strategies as st

from roundtable.core.errors import ConfigError, IdentityError
from roundtable.core.identity.certificates import (
    certificates_in,
    key_in_request,
    pem_of,
    pem_of_key,
    public_bytes,
    signing_request,
)
from roundtable.core.identity.credentials import (
    ROLES,
    Authority,
    check_chain,
    create_ca,
    identity_of,
    issue,
    load_credentials,
    load_silo_identity,
    renew_issuing,
    verify_identity,
)
from roundtable.core.identity.invitation import Invitation, Secret
from roundtable.core.identity.lifetimes import Lifetimes
from roundtable.core.identity.revocation import NOTHING, load_list, newer, parse_list, revoke


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
        issue(ca, "a", "emperor", out)  # type: ignore[arg-type]
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


def test_older_credentials_without_a_signing_identity_are_named(agent: Path) -> None:
    (agent / "identity.key").unlink()
    with pytest.raises(IdentityError, match=r"secure aggregation.*issue the credentials anew"):
        load_silo_identity(agent)


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


def test_the_issuing_key_certifies_agents_and_nobody_else(ca: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    issuing, root = Authority.issuing(ca), (ca / "ca.crt").read_bytes()
    for role in ROLES:
        folder = tmp_path / role
        folder.mkdir()
        (folder / "ca.crt").write_bytes(root)
        (folder / "node.key").write_bytes(pem_of_key(key))
        (folder / "node.crt").write_bytes(issuing.certify(key.public_key(), "x", role, ["localhost"]))
        if role == "agent":
            assert load_credentials(folder).name == "x"
        else:
            with pytest.raises(IdentityError, match="may certify agents only"):
                load_credentials(folder)


def test_a_server_below_the_issuing_key_is_refused_by_tls_itself(
    ca: Path, agent: Path, tmp_path: Path
) -> None:
    false, key = tmp_path / "false", ec.generate_private_key(ec.SECP256R1())
    false.mkdir()
    (false / "ca.crt").write_bytes((ca / "ca.crt").read_bytes())
    (false / "node.key").write_bytes(pem_of_key(key))
    chain = Authority.issuing(ca).certify(key.public_key(), "coordinator", "coordinator", ["localhost"])
    (false / "node.crt").write_bytes(chain)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        _handshake(false, agent, "localhost")


def test_a_sealed_key_opens_with_its_passphrase_only(
    ca: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDTABLE_PASSPHRASE", "correct horse")
    sealed = issue(ca, "hospital-b", "agent", tmp_path / "b")
    assert b"ENCRYPTED" in (sealed / "node.key").read_bytes()
    assert b"ENCRYPTED" in (sealed / "identity.key").read_bytes()
    assert b"ENCRYPTED" not in load_credentials(sealed).key
    monkeypatch.setenv("ROUNDTABLE_PASSPHRASE", "battery staple")
    with pytest.raises(IdentityError, match=r"passphrase of .*node\.key is wrong") as caught:
        load_credentials(sealed)
    assert "battery staple" not in str(caught.value)
    monkeypatch.delenv("ROUNDTABLE_PASSPHRASE")
    with pytest.raises(IdentityError, match="is sealed"):
        load_credentials(sealed)
    (tmp_path / "passphrase").write_text("correct horse\n")
    monkeypatch.setenv("ROUNDTABLE_PASSPHRASE_FILE", str(tmp_path / "passphrase"))
    assert load_silo_identity(sealed).key


def test_an_identity_that_the_root_must_vouch_for(ca: Path, agent: Path) -> None:
    root, key = (ca / "ca.crt").read_bytes(), ed25519.Ed25519PrivateKey.generate().public_key()
    online = Authority.issuing(ca).certify(key, "hospital-c", "agent")
    assert verify_identity(online, root) == ("hospital-c", key.public_bytes_raw())
    with pytest.raises(IdentityError, match="not from the root"):
        verify_identity(online, root, from_root=True)
    offline = (agent / "identity.crt").read_bytes()
    assert verify_identity(offline, root, from_root=True)[0] == "hospital-a"


def test_a_list_of_revoked_certificates_is_signed_by_the_root(ca: Path, agent: Path, tmp_path: Path) -> None:
    revoke(ca, agent / "node.crt")
    own = x509.load_pem_x509_certificate((agent / "node.crt").read_bytes())
    assert load_list(ca).serials == {own.serial_number}
    revoke(ca, agent / "identity.crt")
    listed = revoke(ca, agent / "node.crt")
    found = load_list(ca)
    assert (found.number, len(found.serials)) == (3, 2)
    assert load_list(agent) is NOTHING
    create_ca(tmp_path / "other")
    strangers = x509.load_pem_x509_certificates((tmp_path / "other" / "ca.crt").read_bytes())
    with pytest.raises(IdentityError, match="not signed by the authority"):
        parse_list(listed.read_bytes(), strangers, listed)
    with pytest.raises(IdentityError, match="was not issued by"):
        revoke(tmp_path / "other", agent / "node.crt")


def test_an_older_list_replaces_no_newer_one(ca: Path, agent: Path) -> None:
    revoke(ca, agent / "node.crt")
    old = load_list(ca)
    revoke(ca, agent / "identity.crt")
    new = load_list(ca)
    assert newer(new, old, "crl.pem") is new
    assert newer(new, new, "crl.pem") is new
    with pytest.raises(IdentityError, match=r"list number 1 of .* and number 2 is known"):
        newer(old, new, "crl.pem")
    # An authority that has lost its list, or has another copy of it, takes nothing back either.
    (ca / "crl.pem").unlink()
    for name in ("node.crt", "node.crt"):
        revoke(ca, agent / name)
    assert load_list(ca).number == new.number
    with pytest.raises(IdentityError, match=r"needs it in the authority's folder"):
        newer(load_list(ca), new, "crl.pem")


def test_what_builds_upon_a_revoked_authority_is_revoked(ca: Path, agent: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    online = x509.load_pem_x509_certificates(Authority.issuing(ca).certify(key, "south", "agent"))
    (tmp_path / "south.crt").write_bytes(pem_of(online[0]))
    other = x509.load_pem_x509_certificates(Authority.issuing(ca).certify(key, "east", "agent"))
    revoke(ca, tmp_path / "south.crt")
    load_list(ca).check(other, "east")
    with pytest.raises(IdentityError, match="the certificate of south has been revoked"):
        load_list(ca).check(online, "south")
    revoke(ca, ca / "issuing.crt")
    with pytest.raises(IdentityError, match="the authority 'Roundtable CA issuing' that issued"):
        load_list(ca).check(other, "east")
    offline = x509.load_pem_x509_certificates((agent / "node.crt").read_bytes())
    load_list(ca).check(offline, "hospital-a")


def test_requests_prove_the_possession_of_their_key() -> None:
    for key in (ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()):
        found = key_in_request(signing_request(key))
        assert public_bytes(found) == public_bytes(key.public_key())
    with pytest.raises(IdentityError, match="P-256"):
        key_in_request(signing_request(ec.generate_private_key(ec.SECP384R1())))
    with pytest.raises(IdentityError, match="cannot be read"):
        key_in_request(b"nonsense")


@given(raw=st.binary(max_size=120))
def test_secrets_are_parsed_or_refused(raw: bytes) -> None:
    text = raw.decode(errors="replace")
    for prefix in ("rt-invite.", "rt-token.", ""):
        with pytest.raises(ConfigError):
            Invitation.parse(prefix + text)
        with pytest.raises(IdentityError):
            Secret.of_token(prefix + text)


def test_invitations_and_tokens_come_back_whole() -> None:
    secret = Secret.fresh()
    invitation = Invitation(secret, bytes(range(32)))
    assert Invitation.parse(f" {invitation}\n") == invitation
    assert Secret.of_token(secret.to_token()) == secret
    assert secret.fits(secret.digest)
    assert not Secret.fresh().fits(secret.digest)
    assert secret.secret.hex() not in repr(invitation)


def test_how_long_certificates_hold_is_read_from_the_files_of_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", ["hub"], days=20, enrols=True)
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "new", ["hub"], days=300)
    lifetimes = Lifetimes(tmp_path / "hub")
    before = lifetimes.now()
    assert list(before) == ["own", "issuing", "ca"]
    assert before["own"].expires < before["issuing"].expires < before["ca"].expires
    shutil.copy(tmp_path / "new" / "node.crt", tmp_path / "hub" / "node.crt")
    after = lifetimes.now()
    assert after["own"].expires - before["own"].expires == pytest.approx(280 * 86400, abs=60)
    (tmp_path / "hub" / "node.crt").write_text("half a file")
    assert [lifetimes.now(), lifetimes.now()] == [after, after]
    assert caplog.text.count("cannot be read") == 1


def test_a_new_issuing_authority_certifies_under_the_same_root(tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "old", "coordinator", tmp_path / "old", ["hub"], enrols=True)
    renew_issuing(tmp_path / "ca")
    issue(tmp_path / "ca", "new", "coordinator", tmp_path / "new", ["hub"], enrols=True)
    roots = certificates_in((tmp_path / "ca" / "ca.crt").read_bytes(), "ca.crt")
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    for folder in ("old", "new"):
        silo = Authority.issuing(tmp_path / folder).certify(key, "elm", "agent")
        assert check_chain(certificates_in(silo, "elm"), roots, datetime.now(UTC)) == 1
    both = [(tmp_path / folder / "issuing.crt").read_bytes() for folder in ("old", "new")]
    assert both[0] != both[1]

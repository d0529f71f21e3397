"""Who is let in: invitations, roles, tokens, revocation, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from definite import definite
from scripted_agent import ScriptedAgent, secure_channel
from service import Operator, running

from roundtable.administration import Administrator
from roundtable.client.agent.enrolment import enroll
from roundtable.core.errors import IdentityError, RoundtableError, UnavailableError
from roundtable.core.identity.credentials import (
    OPERATOR_ROLES,
    create_ca,
    identity_of,
    issue,
    load_credentials,
)
from roundtable.core.identity.invitation import Invitation, Secret
from roundtable.core.identity.revocation import revoke
from roundtable.core.identity.signing import check_submission, job_values
from roundtable.operator import OperatorClient
from roundtable.proto import (
    administration_pb2,
    agent_pb2,
    common_pb2,
    operator_pb2,
    operator_pb2_grpc,
    relay_pb2,
)
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.auth.permissions import CALLERS, PERMISSIONS, as_markdown
from roundtable.server.services.agents import AgentService

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a coordinator that enrols, an agent, and an operator of each role."""
    folder = tmp_path_factory.mktemp("parties")
    create_ca(folder / "ca")
    hosts = ("localhost", "127.0.0.1")
    issue(folder / "ca", "coordinator", "coordinator", folder / "coordinator", hosts, enrols=True)
    for name in ("agent", *OPERATOR_ROLES):
        issue(folder / "ca", name, name, folder / name)
    issue(folder / "ca", "relay", "relay", folder / "relay", hosts)
    return folder


@pytest.fixture
async def open_coordinator(
    settings: Callable[..., ServerConfig], parties: Path, tmp_path: Path
) -> AsyncIterator[Coordinator]:
    """A coordinator with both doors; its credentials are a copy that a test may change."""
    shutil.copytree(parties / "coordinator", tmp_path / "own")
    config = settings(credentials=str(tmp_path / "own"), enrolment="127.0.0.1:0")
    async with running(config) as started:
        yield started


def address(coordinator: Coordinator) -> str:
    return f"localhost:{coordinator.port}"


def door(coordinator: Coordinator) -> str:
    return f"localhost:{coordinator.security.enrolment_port}"


async def invite(coordinator: Coordinator, parties: Path, silo: str, **changes: Any) -> Invitation:
    def ask() -> str:
        with Administrator(address(coordinator), parties / "operator") as operator:
            return operator.invite(silo, changes.get("seconds", 3600), changes.get("uses", 1)).invitation

    return Invitation.parse(await asyncio.to_thread(ask))


async def enrolled(coordinator: Coordinator, invitation: Invitation, folder: Path) -> Any:
    return await asyncio.to_thread(enroll, door(coordinator), invitation, folder)


async def audited(coordinator: Coordinator) -> list[dict[str, Any]]:
    lines = [line async for page in coordinator.security.audit.lines(1) for line in page]
    return [json.loads(line)["entry"] for line in lines if line.startswith('{"entry"')]


async def test_an_invited_silo_enrols_and_connects(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    invitation = await invite(open_coordinator, parties, "north")
    found = await enrolled(open_coordinator, invitation, tmp_path / "north")
    assert (found.name, found.role) == ("north", "agent")
    for name in ("node.key", "identity.key"):
        assert (tmp_path / "north" / name).stat().st_mode & 0o077 == 0
    identity = (tmp_path / "north" / "identity.crt").read_bytes()
    agent = ScriptedAgent(open_coordinator.port, tmp_path / "north")
    assert (await agent.connect(identity=identity)).WhichOneof("message") == "welcome"
    await agent.close()
    actions = [(entry["actor"], entry["action"]) for entry in await audited(open_coordinator)]
    assert ("operator/operator", "Administration/Invite") in actions
    assert ("agent/north", "enrolled") in actions


async def test_an_invitation_holds_once_and_the_same_keys_may_ask_again(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    invitation = await invite(open_coordinator, parties, "north")
    await enrolled(open_coordinator, invitation, tmp_path / "north")
    with pytest.raises(IdentityError, match=r"does not hold.*ask for a new one"):
        await enrolled(open_coordinator, invitation, tmp_path / "thief")
    for name in ("ca.crt", "node.crt", "identity.crt"):
        (tmp_path / "north" / name).unlink()
    assert (await enrolled(open_coordinator, invitation, tmp_path / "north")).name == "north"


async def test_an_invitation_counts_its_uses(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    invitation = await invite(open_coordinator, parties, "north", uses=2)
    for name in ("one", "two"):
        await enrolled(open_coordinator, invitation, tmp_path / name)
    with pytest.raises(IdentityError, match="does not hold"):
        await enrolled(open_coordinator, invitation, tmp_path / "three")


async def test_an_invitation_ends(
    settings: Callable[..., ServerConfig], parties: Path, tmp_path: Path
) -> None:
    config = settings(credentials=str(parties / "coordinator"), enrolment="127.0.0.1:0")
    async with running(config) as coordinator:
        invitation = await invite(coordinator, parties, "north", seconds=60)
        later = coordinator.clock() + 61
        coordinator.security.enrolment._clock = lambda: later
        with pytest.raises(IdentityError, match="does not hold"):
            await enrolled(coordinator, invitation, tmp_path / "north")


async def test_nothing_is_sent_to_a_coordinator_of_another_authority(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    invitation = await invite(open_coordinator, parties, "north")
    other = Invitation(invitation.secret, bytes(32))
    with pytest.raises(IdentityError, match="another fingerprint"):
        await enrolled(open_coordinator, other, tmp_path / "north")
    assert not (tmp_path / "north").exists()
    assert (await enrolled(open_coordinator, invitation, tmp_path / "north")).name == "north"


async def test_guessing_locks_an_invitation_out_but_nobody_with_a_certificate(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    invitation = await invite(open_coordinator, parties, "north")
    wrong = Invitation(Secret(invitation.secret.identifier, bytes(32)), invitation.fingerprint)
    for _ in range(5):
        with pytest.raises(IdentityError, match="does not hold"):
            await enrolled(open_coordinator, wrong, tmp_path / "guess")
    with pytest.raises(IdentityError, match=r"too many wrong tokens.*try again in"):
        await enrolled(open_coordinator, invitation, tmp_path / "north")
    async with Operator(open_coordinator.port, parties / "operator") as operator:
        await operator.stub.Status(operator_pb2.StatusRequest())
    refused = [entry for entry in await audited(open_coordinator) if entry["action"] == "refused"]
    assert len(refused) >= 6


async def test_only_a_coordinator_with_the_issuing_key_enrols(
    coordinator: Coordinator, certificates: Path
) -> None:
    def ask() -> None:
        with Administrator(address(coordinator), certificates / "olga") as operator:
            operator.invite("north", 3600, 1)

    with pytest.raises(RoundtableError, match="does not enrol silos"):
        await asyncio.to_thread(ask)


async def test_revocation_ends_open_connections_at_once_and_for_good(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    await enrolled(open_coordinator, await invite(open_coordinator, parties, "north"), tmp_path / "north")
    agent = ScriptedAgent(open_coordinator.port, tmp_path / "north")
    await agent.connect()

    def revoke_north() -> int:
        with Administrator(address(open_coordinator), parties / "operator") as operator:
            return operator.revoke("north", "the laptop was stolen").calls

    await asyncio.to_thread(revoke_north)
    with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
        await agent.next()
    # The same TLS connection, another call.
    with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
        await agent.download("0" * 64)
    await agent.close()
    again = ScriptedAgent(open_coordinator.port, tmp_path / "north")
    with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
        await again.connect()
    await again.close()
    await enrolled(open_coordinator, await invite(open_coordinator, parties, "north"), tmp_path / "new")
    fresh = ScriptedAgent(open_coordinator.port, tmp_path / "new")
    assert (await fresh.connect()).WhichOneof("message") == "welcome"
    await fresh.close()


async def test_revocation_cuts_a_call_that_runs(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    await enrolled(open_coordinator, await invite(open_coordinator, parties, "north"), tmp_path / "north")
    agent = ScriptedAgent(open_coordinator.port, tmp_path / "north")
    await agent.connect()
    assert open_coordinator.security.access.cut(("agent", "north")) == 1
    with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
        await agent.next()
    await agent.close()


async def test_a_call_cut_off_in_its_first_message_is_told_so(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enrolled(open_coordinator, await invite(open_coordinator, parties, "north"), tmp_path / "north")
    welcome, access = AgentService._welcome, open_coordinator.security.access

    def cut_while_it_is_sent(agents: AgentService, *others: Any) -> Any:
        asyncio.get_running_loop().call_soon(access.cut, ("agent", "north"))
        return welcome(agents, *others)

    monkeypatch.setattr(AgentService, "_welcome", cut_while_it_is_sent)
    agent = ScriptedAgent(open_coordinator.port, tmp_path / "north")
    # The welcome is lost where the call's end is known by the time it is read.
    with contextlib.suppress(grpc.aio.AioRpcError):
        await agent.connect()
    with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
        await agent.next()
    await agent.close()


async def test_a_list_made_offline_counts(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    shutil.copytree(parties / "ca", tmp_path / "ca")
    listed = revoke(tmp_path / "ca", parties / "viewer" / "node.crt")
    shutil.copy(listed, tmp_path / "own" / "crl.pem")
    await open_coordinator.security.principals.refresh()
    async with Operator(open_coordinator.port, parties / "viewer") as viewer:
        with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
            await viewer.stub.Status(operator_pb2.StatusRequest())
    async with Operator(open_coordinator.port, parties / "operator") as operator:
        await operator.stub.Status(operator_pb2.StatusRequest())


async def test_agents_are_handed_the_list_and_each_new_one(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    shutil.copytree(parties / "ca", tmp_path / "ca")
    trust, own = open_coordinator.security.principals, tmp_path / "own" / "crl.pem"
    async with ScriptedAgent(open_coordinator.port, parties / "agent") as agent:
        assert agent.welcome.revocations == b""
        first = revoke(tmp_path / "ca", parties / "viewer" / "node.crt").read_bytes()
        own.write_bytes(first)
        await trust.refresh()
        for _ in range(2):
            await agent.say(heartbeat=agent_pb2.Heartbeat(state="available"))
        kinds = [await agent.next() for _ in range(3)]
        assert [kind.WhichOneof("message") for kind in kinds] == ["heartbeat", "revocations", "heartbeat"]
        assert kinds[1].revocations == first
    second = revoke(tmp_path / "ca", parties / "admin" / "node.crt").read_bytes()
    own.write_bytes(second)
    os.utime(own, (1, 1))
    await trust.refresh()
    async with ScriptedAgent(open_coordinator.port, parties / "agent") as agent:
        assert agent.welcome.revocations == second
    own.write_bytes(first)
    os.utime(own, (2, 2))
    with pytest.raises(IdentityError, match="number 2 is known"):
        await trust.refresh()
    own.unlink()
    await trust.refresh()
    assert trust.list_for_agents == second


async def test_what_a_revoked_issuing_authority_has_certified_is_void(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    await enrolled(open_coordinator, await invite(open_coordinator, parties, "north"), tmp_path / "north")
    agent = ScriptedAgent(open_coordinator.port, tmp_path / "north")
    assert (await agent.connect()).WhichOneof("message") == "welcome"
    await agent.close()
    shutil.copytree(parties / "ca", tmp_path / "ca")
    shutil.copy(revoke(tmp_path / "ca", parties / "ca" / "issuing.crt"), tmp_path / "own" / "crl.pem")
    await open_coordinator.security.principals.refresh()
    again = ScriptedAgent(open_coordinator.port, tmp_path / "north")
    with pytest.raises(grpc.aio.AioRpcError, match="has been revoked"):
        await again.connect()
    await again.close()
    async with ScriptedAgent(open_coordinator.port, parties / "agent") as offline:
        assert offline.welcome is not None


async def test_the_coordinators_certificate_is_changed_while_agents_stay(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    async with ScriptedAgent(open_coordinator.port, parties / "agent") as agent:

        async def shown_at_the_door() -> str:
            port = open_coordinator.security.enrolment_port
            return await asyncio.to_thread(ssl.get_server_certificate, ("localhost", port))

        before = await shown_at_the_door()
        fresh = issue(parties / "ca", "coordinator", "coordinator", tmp_path / "fresh", ["localhost"])
        for name in ("node.key", "node.crt"):
            shutil.copy(fresh / name, tmp_path / "own" / name)
            os.utime(tmp_path / "own" / name, (1, 1))
        after = await shown_at_the_door()
        assert after != before
        assert after.strip() == (fresh / "node.crt").read_text().strip()
        await agent.say(heartbeat=agent_pb2.Heartbeat(state="available"))
        await agent.expect("heartbeat")


async def test_a_certificate_that_ends_ends_on_open_connections_too(
    open_coordinator: Coordinator, parties: Path
) -> None:
    async with Operator(open_coordinator.port, parties / "viewer") as viewer:
        await viewer.stub.Status(operator_pb2.StatusRequest())
        later = load_credentials(parties / "viewer").expires.timestamp() + 1
        open_coordinator.security.principals._clock = lambda: later
        with pytest.raises(grpc.aio.AioRpcError, match="has expired"):
            await viewer.stub.Status(operator_pb2.StatusRequest())


async def test_tokens_hold_until_they_are_revoked(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    def use() -> None:
        with Administrator(address(open_coordinator), parties / "admin") as admin:
            made = admin.create_token("dashboard", "viewer", 3600)
            folder = tmp_path / "dashboard"
            folder.mkdir()
            shutil.copy(parties / "admin" / "ca.crt", folder / "ca.crt")
            (folder / "token").write_text(made.token)
            with pytest.raises(IdentityError, match="chmod 600"):
                OperatorClient(door(open_coordinator), folder)
            (folder / "token").chmod(0o600)
            with OperatorClient(door(open_coordinator), folder) as viewer:
                assert viewer.status().clients_online == 0
                with pytest.raises(IdentityError, match="'token:dashboard' is here as viewer"):
                    viewer.cancel("x")
                admin.revoke_token("dashboard")
                with pytest.raises(IdentityError, match="not known here, has expired or was revoked"):
                    viewer.status()
            (only,) = admin.tokens()
            assert only.revoked
            assert made.token.split(".")[1] not in str(only)

    await asyncio.to_thread(use)
    text = "\n".join(str(entry) for entry in await audited(open_coordinator))
    assert "Administration/CreateToken" in text


async def test_a_token_asks_for_a_job_by_the_coordinators_word(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    def create() -> None:
        with Administrator(address(open_coordinator), parties / "admin") as admin:
            (tmp_path / "token").write_text(admin.create_token("alice", "data-scientist", 3600).token)

    await asyncio.to_thread(create)
    ca = (parties / "ca" / "ca.crt").read_bytes()
    secure = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(ca), grpc.access_token_call_credentials((tmp_path / "token").read_text())
    )
    async with (
        ScriptedAgent(open_coordinator.port, parties / "agent") as agent,
        Operator(open_coordinator.port, parties / "admin") as alice,
    ):
        async with grpc.aio.secure_channel(door(open_coordinator), secure) as channel:
            alice.stub = operator_pb2_grpc.OperatorsStub(channel)
            await alice.submit("[cohort]\nminimum = 1")
        asked = await agent.expect("instruction")
    said = asked.submission
    assert (said.submitter, identity_of(said.certificate)) == ("token:alice", ("coordinator", "coordinator"))
    values = job_values(
        asked.job_config,
        said.initial_model,
        said.request_id,
        submitter="token:alice",
        coordinator="coordinator",
        time=said.time,
    )
    assert (said.coordinator, asked.step.job) == ("coordinator", values["job"])
    check_submission(said.certificate, ca, values, said.signature, "token:alice")
    with pytest.raises(IdentityError, match="is not right"):
        check_submission(said.certificate, ca, values, said.signature, "token:bob")


def _methods() -> dict[str, Any]:
    services = [
        (agent_pb2, "Agents"),
        (operator_pb2, "Operators"),
        (administration_pb2, "Administration"),
        (administration_pb2, "Enrolment"),
        (relay_pb2, "Relays"),
    ]
    return {
        f"{name}/{method.name}": method
        for module, name in services
        for method in module.DESCRIPTOR.services_by_name[name].methods
    }


def test_every_call_is_in_the_table() -> None:
    assert _methods().keys() == PERMISSIONS.keys()


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert as_markdown() in page, "the table has changed: python tools/security_table.py"


async def _refused(channel: Any, name: str, method: Any) -> bool:
    """Whether the gate refuses this caller; an empty request is refused later, if at all, in other words."""
    sides = [method.client_streaming, method.server_streaming]
    shape = "_".join("stream" if streams else "unary" for streams in sides)
    call = getattr(channel, shape)(f"/roundtable.v1.{name}")

    async def once() -> None:
        request = iter([b""]) if method.client_streaming else b""
        if method.server_streaming:
            async for _ in call(request, timeout=10):
                break
        else:
            await call(request, timeout=10)

    try:
        await definite(once)
    except grpc.aio.AioRpcError as error:
        said = error.details() or ""
        return "this call needs" in said or "Socket closed" in said or "failed to connect" in said
    return False


@pytest.mark.parametrize("role", CALLERS)
@pytest.mark.parametrize("how", ["certificate", "token"])
async def test_every_cell_of_the_table(
    open_coordinator: Coordinator, parties: Path, role: str, how: str
) -> None:
    ca = (parties / "ca" / "ca.crt").read_bytes()
    secure = grpc.ssl_channel_credentials(ca)
    if role == "nobody":
        channel = grpc.aio.secure_channel(door(open_coordinator), secure)
    elif how == "certificate":
        channel = secure_channel(open_coordinator.port, parties / role)
    elif role in OPERATOR_ROLES:
        token = await asyncio.to_thread(_token, open_coordinator, parties, role)
        both = grpc.composite_channel_credentials(secure, grpc.access_token_call_credentials(token))
        channel = grpc.aio.secure_channel(door(open_coordinator), both)
    else:
        pytest.skip("only operators have tokens")
    async with channel:
        found = {name: await _refused(channel, name, method) for name, method in _methods().items()}
    expected = {name: role not in permission.callers for name, permission in PERMISSIONS.items()}
    if role == "coordinator":
        # Its certificate is a server's: TLS itself does not accept it from a client.
        expected = dict.fromkeys(PERMISSIONS, True)
    assert found == expected


def _token(coordinator: Coordinator, parties: Path, role: str) -> str:
    with Administrator(address(coordinator), parties / "admin") as admin:
        return admin.create_token(f"t-{role}", role, 3600).token


async def test_a_data_scientist_changes_jobs_of_their_own_only(
    open_coordinator: Coordinator, parties: Path
) -> None:
    async with (
        Operator(open_coordinator.port, parties / "operator") as operator,
        Operator(open_coordinator.port, parties / "data-scientist") as scientist,
    ):
        theirs = await operator.submit(request="theirs")
        own = await scientist.submit(request="own")
        with pytest.raises(grpc.aio.AioRpcError, match="jobs of their own only"):
            await scientist.stub.CancelJob(operator_pb2.JobRequest(job=theirs.id))
        assert (await scientist.stub.CancelJob(operator_pb2.JobRequest(job=own.id))).status == "cancelled"
        await operator.stub.CancelJob(operator_pb2.JobRequest(job=theirs.id))
    noted = [(entry["actor"], entry["action"]) for entry in await audited(open_coordinator)]
    assert ("data-scientist/data-scientist", "Operators/CancelJob") in noted
    assert ("data-scientist/data-scientist", "refused") in noted


async def test_renewal_gives_new_certificates_for_the_same_keys(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    from roundtable.client.agent.renewal import keep_renewed

    north = tmp_path / "north"
    await enrolled(open_coordinator, await invite(open_coordinator, parties, "north"), north)
    before, key = load_credentials(north), (north / "node.key").read_bytes()
    agent = ScriptedAgent(open_coordinator.port, north)
    open_coordinator.security.enrolment._days = 200.0
    # Far from its end it is left alone.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(keep_renewed(agent.stub, north), 0.2)
    import roundtable.client.agent.renewal as renewal

    original = renewal.REMAINING
    renewal.REMAINING = 1.5
    try:
        with pytest.raises(UnavailableError, match="was renewed"):
            await asyncio.wait_for(keep_renewed(agent.stub, north), 10)
    finally:
        renewal.REMAINING = original
    after = load_credentials(north)
    assert after.fingerprint != before.fingerprint
    assert after.expires > before.expires
    assert (north / "node.key").read_bytes() == key
    await agent.close()


@pytest.mark.parametrize("stolen", ["the connection's key", "own node key", "another identity", "old"])
async def test_nobody_renews_for_keys_that_are_not_the_silos(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path, stolen: str
) -> None:
    """Who has got the key of a silo's connection gets no certificate for keys of his own."""
    from roundtable.client.agent.renewal import renewal_request

    for name in ("north", "south"):
        await enrolled(open_coordinator, await invite(open_coordinator, parties, name), tmp_path / name)
    north, thief = tmp_path / "north", tmp_path / "thief"
    shutil.copytree(north, thief)
    fresh = issue(parties / "ca", "fresh", "agent", tmp_path / "fresh")
    if stolen == "the connection's key":
        # His own identity beside the silo's connection, under the silo's certificate.
        shutil.copy(tmp_path / "south" / "identity.key", thief)
        shutil.copy(tmp_path / "south" / "identity.crt", thief)
    elif stolen == "own node key":
        shutil.copy(fresh / "node.key", thief)
    request = renewal_request(thief)
    if stolen == "another identity":
        request.identity = (tmp_path / "south" / "identity.crt").read_bytes()
    elif stolen == "old":
        later = open_coordinator.clock() + 3600
        open_coordinator.security.enrolment._clock = lambda: later
    agent = ScriptedAgent(open_coordinator.port, north)
    with pytest.raises(grpc.aio.AioRpcError, match=r"request is for others|another time than now"):
        await agent.stub.Renew(request)
    request = renewal_request(north)
    request.signature = bytes(64)
    with pytest.raises(grpc.aio.AioRpcError, match=r"under this renewal is not right|another time"):
        await agent.stub.Renew(request)
    await agent.close()
    assert not [entry for entry in await audited(open_coordinator) if entry["action"] == "renewed"]
    refused = [entry for entry in await audited(open_coordinator) if entry["object"] == "Agents/Renew"]
    assert [(entry["actor"], entry["action"]) for entry in refused] == [("agent/north", "refused")] * 2


async def test_a_request_cannot_choose_its_name_or_a_weak_key(
    open_coordinator: Coordinator, parties: Path, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    from roundtable.core.identity.certificates import signing_request
    from roundtable.core.identity.credentials import identity_of
    from roundtable.proto import administration_pb2_grpc

    invitation = await invite(open_coordinator, parties, "north", uses=3)
    node, identity = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    secure = grpc.ssl_channel_credentials((parties / "ca" / "ca.crt").read_bytes())
    async with grpc.aio.secure_channel(door(open_coordinator), secure) as channel:
        stub: Any = administration_pb2_grpc.EnrolmentStub(channel)

        async def ask(node_request: bytes, identity_request: bytes) -> common_pb2.Certificates:
            requests = common_pb2.CertificateRequests(node=node_request, identity=identity_request)
            secret = invitation.secret
            return await stub.Enroll(
                administration_pb2.EnrollRequest(
                    identifier=secret.identifier, secret=secret.secret, requests=requests
                )
            )

        found = await ask(signing_request(node, "admin"), signing_request(identity, "admin"))
        assert identity_of(found.node) == ("north", "agent")
        assert identity_of(found.identity) == ("north", "agent")
        weak = ec.generate_private_key(ec.SECP192R1())
        for bad in (signing_request(weak), b"x", b"x" * 100_000, signing_request(identity)):
            with pytest.raises(grpc.aio.AioRpcError, match=r"request|connects with"):
                await ask(bad, signing_request(identity))

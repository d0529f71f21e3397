"""A coordinator or a peer whose certificate is on the root's list is refused, over real TLS."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from roundtable.client.agent import revocations
from roundtable.client.agent.agent import Agent
from roundtable.client.agent.connection import open_channel
from roundtable.client.agent.first_contact import check_first_contact
from roundtable.client.agent.release_ledger import NAME, ReleaseLedger
from roundtable.client.agent.revocations import Revocations
from roundtable.client.agent.secure_attempts import SecureAttempts, certificate_of
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.step_key import StepKey
from roundtable.core import parse_job
from roundtable.core.errors import IdentityError, UnavailableError
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.identity.handshake import trusted_root
from roundtable.core.identity.revocation import load_list, revoke
from roundtable.operator import OperatorClient
from roundtable.proto import agent_pb2
from roundtable.proto.pieces import agents_stub

Listening: TypeAlias = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An authority, two certificates of a coordinator, a silo and an operator."""
    create_ca(tmp_path / "ca")
    for name in ("hub", "fresh"):
        issue(tmp_path / "ca", "hub", "coordinator", tmp_path / name, ["127.0.0.1", "localhost"])
    issue(tmp_path / "ca", "north", "agent", tmp_path / "north")
    issue(tmp_path / "ca", "olga", "operator", tmp_path / "olga")
    (tmp_path / "state").mkdir()
    return tmp_path


@asynccontextmanager
async def agent_of(place: Path, port: int, trainer: Any) -> AsyncIterator[None]:
    config = AgentConfig(
        coordinator=f"localhost:{port}",
        credentials=place / "north",
        state=place / "state",
        tasks={"t": "t.py:T"},
        device="cpu",
        folder=place,
    )
    agent = Agent(config, trainer)
    running = asyncio.create_task(agent.run())
    try:
        yield
    finally:
        agent.stop()
        await asyncio.wait([running])


class NoTrainer:
    """Nothing is trained here."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def put_on_the_list(place: Path, *certificates: str, into: str = "north") -> None:
    for certificate in certificates:
        shutil.copy(revoke(place / "ca", place / certificate), place / into / "crl.pem")


async def test_a_revoked_coordinator_is_refused_and_its_new_certificate_is_not(
    place: Path, log: Any, listening: Listening
) -> None:
    put_on_the_list(place, "hub/node.crt")
    async with listening(place / "hub") as coordinator, agent_of(place, coordinator.port, NoTrainer()):
        said = await log.until("has been revoked")
        assert said.startswith("not connected: the certificate of the coordinator at localhost:")
        assert "nothing was sent. Its operator must issue a new one" in said
        assert coordinator.hellos == []
        port = coordinator.port
    async with listening(place / "fresh", port) as coordinator, agent_of(place, port, NoTrainer()):
        await coordinator.until(lambda: coordinator.hellos)


async def test_first_contact_and_operators_refuse_it_as_well(place: Path, listening: Listening) -> None:
    put_on_the_list(place, "hub/node.crt")
    put_on_the_list(place, "hub/node.crt", into="olga")
    async with listening(place / "hub") as coordinator:
        address = f"localhost:{coordinator.port}"
        with pytest.raises(IdentityError, match="has been revoked"):
            await asyncio.to_thread(check_first_contact, [address], place / "north", place / "never")
        with pytest.raises(IdentityError, match="has been revoked"):
            await asyncio.to_thread(OperatorClient, address, place / "olga")


async def test_another_certificate_cannot_be_slipped_in_after_the_look(
    place: Path, listening: Listening
) -> None:
    """The coordinator shows a good certificate, and a revoked one to the connection that follows."""
    put_on_the_list(place, "hub/node.crt")
    listed = load_list(place / "north")
    async with listening(place / "fresh") as coordinator:
        port = coordinator.port
        pinned = await asyncio.to_thread(trusted_root, f"localhost:{port}", place / "north", revoked=listed)
        assert pinned.strip() == (place / "fresh" / "node.crt").read_bytes().strip()
        async with open_channel(f"localhost:{port}", place / "north", listed) as channel:
            # Connects with its first call: by then another server has taken the port.
            await coordinator.stop()
            async with listening(place / "hub", port) as other:
                stub = agents_stub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="failed to connect") as refused:
                    await stub.Renew(agent_pb2.RenewRequest(), timeout=20)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert other.hellos == []


async def test_a_list_that_comes_while_connected_ends_the_connection(
    place: Path, log: Any, monkeypatch: pytest.MonkeyPatch, listening: Listening
) -> None:
    monkeypatch.setattr(revocations, "LOOK_SECONDS", 0.05)
    async with listening(place / "hub") as coordinator, agent_of(place, coordinator.port, NoTrainer()):
        await coordinator.until(lambda: coordinator.hellos)
        # The coordinator may hand it on itself: it need not be believed for that.
        coordinator.say(revocations=revoke(place / "ca", place / "hub" / "node.crt").read_bytes())
        await log.until("the certificate of the coordinator at")
        assert len(coordinator.hellos) == 1
    assert load_list(place / "north").number == 0
    assert Revocations(place / "north", place / "state").current().number == 1


async def test_a_list_of_another_authority_is_refused(place: Path, log: Any, listening: Listening) -> None:
    create_ca(place / "other")
    issue(place / "other", "hub", "coordinator", place / "theirs", ["localhost"])
    false = revoke(place / "other", place / "theirs" / "node.crt")
    known = Revocations(place / "north", place / "state")
    known.learn(false.read_bytes())
    assert "not signed by the authority of ca.crt" in await log.until("was not learnt from the coordinator")
    known.learn(b"x" * (3 << 20))
    await log.until("more than 2097152 are not taken")
    known.learn(b"-----BEGIN X509 CRL-----\nnonsense\n-----END X509 CRL-----\n")
    await log.until("is not a PEM list")
    assert known.current().number == 0
    shutil.copy(false, place / "north" / "crl.pem")
    with pytest.raises(IdentityError, match=r"north/crl\.pem is not signed by the authority"):
        known.current()
    async with listening(place / "hub") as coordinator, agent_of(place, coordinator.port, NoTrainer()):
        assert "is not signed by the authority" in await log.until("not connected")
        assert coordinator.hellos == []


async def test_an_older_list_takes_nothing_back(place: Path, log: Any, listening: Listening) -> None:
    older = revoke(place / "ca", place / "olga" / "node.crt").read_bytes()
    put_on_the_list(place, "hub/node.crt")
    known = Revocations(place / "north", place / "state")
    assert known.current().number == 2
    known.learn(older)
    assert known.current().number == 2
    (place / "north" / "crl.pem").write_bytes(older)
    assert known.current().number == 2
    await log.until("is list number 1 of what the root has revoked, and number 2 is known")
    (place / "north" / "crl.pem").unlink()
    # Neither does a new start.
    again = Revocations(place / "north", place / "state")
    assert (again.current().number, len(again.current().serials)) == (2, 2)
    async with listening(place / "hub") as coordinator:
        with pytest.raises(IdentityError, match="has been revoked"):
            async with open_channel(f"localhost:{coordinator.port}", place / "north", again.current()):
                pass


async def test_peers_on_the_list_are_no_peers(place: Path, listening: Listening) -> None:
    names = ("alder", "birch", "cedar")
    for name in names:
        issue(place / "ca", name, "agent", place / name)
    shown = [certificate_of(place / name) for name in names]
    config = AgentConfig(
        "127.0.0.1:1", place / "alder", place / "state", policy=PolicyTable(minimum_cohort=3)
    )
    job = parse_job('task = "t"\n[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0\n')

    def begin(config: AgentConfig, name: str, attempt: int) -> None:
        attempts = SecureAttempts(config, name, ReleaseLedger(config.state / NAME))
        attempts.begin(StepKey("j", 1, attempt, "train"), job, 8, "model", shown, bytes(32))

    begin(config, "alder", 1)
    put_on_the_list(place, "cedar/identity.crt", into="alder")
    with pytest.raises(WorkFailed, match="peer cannot be trusted: the certificate of the silo 'cedar'"):
        begin(config, "alder", 2)
    other = replace(config, state=place / "second")
    put_on_the_list(place, "ca/issuing.crt", into="birch")
    with pytest.raises(WorkFailed, match="cedar"):
        begin(replace(other, credentials=place / "birch"), "birch", 1)


async def test_nobody_listens_where_a_list_is_known(place: Path, listening: Listening) -> None:
    put_on_the_list(place, "hub/node.crt")
    with pytest.raises(UnavailableError, match="nothing listens at"):
        await asyncio.to_thread(trusted_root, "127.0.0.1:1", place / "north")

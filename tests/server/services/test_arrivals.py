"""What agents that come at once cost the coordinator, counted in transactions and statements."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from cryptography.hazmat.primitives.asymmetric import ed25519
from scripted_agent import secure_channel

from roundtable.core.identity import credentials
from roundtable.core.identity.credentials import SiloIdentity, issue, load_silo_identity
from roundtable.core.identity.signing import passage_values, sign
from roundtable.proto import (
    MOST_TOGETHER,
    PROTOCOL_VERSION,
    TOGETHER_BYTES,
    agent_pb2,
    relay_pb2,
    relay_pb2_grpc,
)
from roundtable.server import Coordinator
from roundtable.server.services.lines import GATHERING, Outbox
from roundtable.server.services.relays import AT_ONCE, _Trunk
from roundtable.server.store import AgentRow, Database
from roundtable.server.store.agent_rows import remember, stored_clients
from roundtable.server.store.group_commit import ANSWERED_AT_ONCE, Gathered
from roundtable.server.store.trust_rows import InstallationRow, bind_installations

SILOS = 60


class Comer:
    """A silo behind the relay."""

    def __init__(self, name: str, identity: SiloIdentity) -> None:
        self.name, self._identity = name, identity
        self._installation = ed25519.Ed25519PrivateKey.generate()

    def hello(self) -> agent_pb2.FromAgent:
        key = self._installation.public_key().public_bytes_raw()
        signature = sign(self._identity, "passage", passage_values(self.name, "north", key))
        return agent_pb2.FromAgent(
            hello=agent_pb2.Hello(
                version="test",
                protocol=PROTOCOL_VERSION,
                tasks=["t"],
                clock=time.time(),
                identity=self._identity.certificate,
                installation=key,
                passage=agent_pb2.Passage(relay="north", signature=signature),
            )
        )

    def proof(self, nonce: bytes) -> agent_pb2.FromAgent:
        values = {"nonce": nonce.hex(), "name": self.name}
        return agent_pb2.FromAgent(proof=sign(SiloIdentity(b"", self._installation), "installation", values))


@pytest.fixture(scope="module")
def comers(certificates: Path) -> list[Comer]:
    with patch("os.fsync"):
        issue(certificates / "ca", "north", "relay", certificates / "north", hosts=("localhost",))
        names = [f"comer{number}" for number in range(SILOS)]
        folders = [issue(certificates / "ca", name, "agent", certificates / name) for name in names]
    return [Comer(name, load_silo_identity(folder)) for name, folder in zip(names, folders, strict=True)]


class Turns:
    """How many turns the event loop has made."""

    count = 0

    def next(self) -> None:
        self.count += 1
        self.handle = asyncio.get_running_loop().call_soon(self.next)


@contextmanager
def counted_turns() -> Iterator[Turns]:
    turns = Turns()
    turns.next()
    try:
        yield turns
    finally:
        turns.handle.cancel()


class ManualClock:
    """Time that passes by sleeping alone."""

    Event = asyncio.Event
    slept = 0.0

    def monotonic(self) -> float:
        return 1.0 + self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds


@contextmanager
def counted(database: Database) -> Iterator[dict[str, int]]:
    """Transactions, and statements within them."""
    counts = {"transactions": 0, "statements": 0}

    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        counts["transactions" if statement.startswith("BEGIN") else "statements"] += 1

    engines = database._writer, database._reader
    for engine in engines:
        sa.event.listen(engine, "before_cursor_execute", count)
    try:
        yield counts
    finally:
        for engine in engines:
            sa.event.remove(engine, "before_cursor_execute", count)


async def come(coordinator: Coordinator, certificates: Path, together: int) -> tuple[Any, Any]:
    """A relay's channel and its trunk, welcomed."""
    channel = secure_channel(coordinator.port, certificates / "north")
    stub: Any = relay_pb2_grpc.RelaysStub(channel)
    trunk = stub.Trunk()
    hello = relay_pb2.RelayHello(
        version="test", protocol=PROTOCOL_VERSION, clock=time.time(), together=together
    )
    await trunk.write(relay_pb2.FromRelay(hello=hello))
    welcome = (await trunk.read()).welcome
    assert welcome.together == MOST_TOGETHER
    return channel, trunk


async def say(trunk: Any, said: Sequence[tuple[str, agent_pb2.FromAgent]], together: int) -> None:
    """What silos say, in as few messages as the relay may."""
    messages = [
        relay_pb2.FromRelay(said=relay_pb2.SaidBySilo(silo=silo, message=message)) for silo, message in said
    ]
    if together:
        messages = [relay_pb2.FromRelay(several=relay_pb2.SeveralFromRelay(messages=messages))]
    for message in messages:
        await trunk.write(message)


async def arrive(coordinator: Coordinator, certificates: Path, comers: Sequence[Comer], together: int) -> int:
    """A relay comes with all of them, and goes once all were welcomed; how many messages it was sent."""
    channel, trunk = await come(coordinator, certificates, together)
    named = {comer.name: comer for comer in comers}
    await say(trunk, [(comer.name, comer.hello()) for comer in comers], together)
    welcomed, messages = set[str](), 0
    while len(welcomed) < len(comers):
        message = await trunk.read()
        messages += 1
        several = message.WhichOneof("message") == "several"
        proofs = []
        for each in message.several.messages if several else [message]:
            silo, told = each.said.silo, each.said.message
            assert told.WhichOneof("message") in ("challenge", "welcome"), f"{silo} was told {told}"
            if told.challenge:
                proofs.append((silo, named[silo].proof(told.challenge)))
            else:
                welcomed.add(silo)
        if proofs:
            await say(trunk, proofs, together)
    await channel.close()
    return messages


async def test_silos_that_come_by_a_relay_at_once_share_transactions_and_statements(
    coordinator: Coordinator, certificates: Path, comers: list[Comer]
) -> None:
    """One by one they would take five transactions each, and more statements. A busy machine takes them in
    more than one go."""
    for comes, together in (("first", 0), ("again", 500)):
        with counted(coordinator._database) as counts:
            messages = await arrive(coordinator, certificates, comers, together)
        assert counts["transactions"] <= SILOS, comes
        assert counts["statements"] <= 2 * SILOS, comes
        # One by one two for each silo; a relay that does not say that it takes several gets them so.
        assert (messages == 2 * SILOS) if not together else (messages <= SILOS / 2)
    stored = await coordinator._database.read(lambda c: stored_clients(c, [each.name for each in comers]))
    assert {name: row.metadata["relay"] for name, row in stored.items()} == {
        comer.name: "north" for comer in comers
    }


async def test_a_relay_whose_call_was_cancelled_as_it_was_ended_is_not_locked_out(
    coordinator: Coordinator, certificates: Path, comers: list[Comer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC cancels a call whose connection is gone, also while the streams of its silos are ended."""
    ending, go, close = asyncio.Event(), asyncio.Event(), _Trunk.close

    async def slowly(trunk: _Trunk) -> None:
        ending.set()
        await go.wait()
        await close(trunk)

    monkeypatch.setattr(_Trunk, "close", slowly)
    channel, trunk = await come(coordinator, certificates, MOST_TOGETHER)
    await trunk.done_writing()
    await ending.wait()
    trunk.cancel()
    while coordinator.security.access._active:  # noqa: ASYNC110
        await asyncio.sleep(0)
    go.set()
    again, _ = await come(coordinator, certificates, MOST_TOGETHER)
    await again.close()
    await channel.close()


async def test_more_messages_in_one_than_may_be_end_a_relays_stream(
    coordinator: Coordinator, certificates: Path, comers: list[Comer]
) -> None:
    channel, trunk = await come(coordinator, certificates, MOST_TOGETHER)
    beat = relay_pb2.FromRelay(beat=relay_pb2.RelayBeat())
    several = relay_pb2.SeveralFromRelay(messages=[beat] * (MOST_TOGETHER + 1))
    await trunk.write(relay_pb2.FromRelay(several=several))
    assert "the messages of a relay in one" in (await trunk.read()).refused
    await channel.close()


async def test_of_what_many_relays_say_at_once_few_messages_are_heard_in_a_turn_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they lead to shares the loop with calls of operators."""
    heard, beat = list[tuple[str, int]](), relay_pb2.FromRelay(beat=relay_pb2.RelayBeat())
    monkeypatch.setattr(_Trunk, "_hear", lambda trunk, _: heard.append((trunk._relay, turns.count)))

    async def said() -> AsyncIterator[relay_pb2.FromRelay]:
        yield relay_pb2.FromRelay(several=relay_pb2.SeveralFromRelay(messages=[beat] * 50))
        yield beat

    hearing, nobody = asyncio.Lock(), cast(Any, SimpleNamespace(heartbeat=30.0, list_for_agents=b""))
    trunks = [_Trunk(name, b"", "", nobody, nobody, nobody, nobody, hearing) for name in "abc"]
    with counted_turns() as turns:
        await asyncio.gather(*(trunk.listen(said()) for trunk in trunks))
    assert Counter(relay for relay, _ in heard) == dict.fromkeys("abc", 51)
    assert max(Counter(turn for _, turn in heard).values()) <= AT_ONCE
    # None of them waits until another has said everything.
    assert {relay for relay, _ in heard[: 3 * AT_ONCE]} == set("abc")


async def test_of_those_who_asked_together_few_go_on_in_a_turn_of_the_event_loop() -> None:
    async def run(work: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        return work(None)

    gathered: Gathered[int, int] = Gathered(run, lambda _, asked: [2 * each for each in asked])
    went_on = list[int]()

    async def ask(number: int) -> None:
        assert await gathered.ask(number) == 2 * number
        went_on.append(turns.count)

    with counted_turns() as turns:
        await asyncio.gather(*(ask(number) for number in range(60)))
    assert len(went_on) == 60
    assert max(Counter(went_on).values()) <= ANSWERED_AT_ONCE


async def test_an_outbox_that_was_emptied_lets_more_gather_for_the_next_message() -> None:
    """A peer that takes one at a time waits for nothing, nor does what is more than one message holds."""
    ended, clock = [relay_pb2.ToRelay(ended=f"silo{number}") for number in range(7)], ManualClock()
    with patch.multiple("roundtable.server.services.lines", time=clock, asyncio=clock):
        outbox: Outbox[relay_pb2.ToRelay] = Outbox()
        slept = []
        for count, most, wanted in ((1, 3, 1), (2, 3, 2), (4, 3, 3), (0, 3, 1), (1, 1, 1)):
            for message in ended[:count]:
                outbox.put(message)
            before = clock.slept
            assert len(await outbox.take(most)) == wanted
            slept.append(clock.slept - before)
    assert slept == pytest.approx([0.0, GATHERING, GATHERING, 0.0, 0.0])


async def test_an_outbox_gives_in_one_what_may_travel_in_one_and_keeps_the_order() -> None:
    outbox: Outbox[relay_pb2.ToRelay] = Outbox()
    small = [relay_pb2.ToRelay(ended=f"silo{number}") for number in range(5)]
    large = [relay_pb2.ToRelay(revocations=bytes([n]) * TOGETHER_BYTES) for n in range(2)]
    for message in [*small, *large, small[0], None, small[1]]:
        outbox.put(message)
    taken = [await outbox.take(3) for _ in range(6)]
    assert taken == [small[:3], small[3:], [large[0]], [large[1]], [small[0]], []]


async def test_what_waits_for_who_reads_nothing_is_dropped_and_ends_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each silo that a relay names and that is not here it is told so: it can name more than it reads."""
    monkeypatch.setattr("roundtable.server.services.lines.MOST_WAITING", 3)
    outbox: Outbox[relay_pb2.ToRelay] = Outbox()
    ended = [relay_pb2.ToRelay(ended=f"silo{number}") for number in range(9)]
    for message in ended[:3]:
        outbox.put(message)
    assert await outbox.take(9) == ended[:3]
    for message in ended:
        outbox.put(message)
        assert len(outbox._waiting) <= 3
    assert await outbox.take(9) == []


async def test_of_two_installations_that_come_in_one_transaction_the_first_is_bound(
    coordinator: Coordinator,
) -> None:
    rows = [InstallationRow("k" * 64, "alder", letter * 64, 1.0) for letter in "ab"]
    other = InstallationRow("m" * 64, "birch", "c" * 64, 1.0)
    write = coordinator._database.write
    assert await write(lambda c: bind_installations(c, [rows[0], other, rows[1]])) == [
        rows[0],
        other,
        rows[0],
    ]
    assert await write(lambda c: bind_installations(c, [rows[1]])) == [rows[0]]


async def test_who_comes_twice_in_one_transaction_is_stored_as_it_came_last(coordinator: Coordinator) -> None:
    first, second, other = (
        AgentRow(name, version, ("t",), {}, (), 1.0, seen)
        for name, version, seen in (("alder", "1", 2.0), ("alder", "2", 3.0), ("birch", "1", 2.0))
    )
    database = coordinator._database
    await database.write(lambda c: remember(c, [first, other, second]))
    await database.write(lambda c: remember(c, [other]))
    stored = await database.read(lambda c: stored_clients(c, ["alder", "birch", "cedar"]))
    assert {name: (row.version, row.last_seen) for name, row in stored.items()} == {
        "alder": ("2", 3.0),
        "birch": ("1", 2.0),
    }


def test_certificates_of_the_same_bytes_are_followed_to_the_root_once(
    certificates: Path, comers: list[Comer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their time is judged each time; what is longer than certificates are is not remembered."""
    followed = []
    follow = credentials._depth
    monkeypatch.setattr(credentials, "_depth", lambda *of: followed.append(of) or follow(*of))
    credentials._vouched.cache_clear()
    authority, comer = (certificates / "ca" / "ca.crt").read_bytes(), comers[0]
    shown = comer.hello().hello.identity
    for _ in range(3):
        assert credentials.verify_identity(bytes(bytearray(shown)), authority)[0] == comer.name
    assert len(followed) == 1
    padded = shown + b"\n" * credentials.SHORT
    assert credentials.verify_identity(padded, authority)[0] == comer.name
    assert (len(followed), credentials._vouched.cache_info().currsize) == (2, 1)
    late = credentials.datetime.now(credentials.UTC).replace(year=9000)
    with pytest.raises(credentials.IdentityError, match="expired on"):
        credentials.verify_identity(shown, authority, now=late)

"""What a relay adds up and when, against a coordinator that counts: each update once, whatever happens."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.aggregation.rows.row_digests import DamagedRows
from roundtable.client.agent.connection import Backoff, Link
from roundtable.core.errors import TransferError
from roundtable.core.identity.credentials import SiloIdentity, create_ca, issue, load_silo_identity
from roundtable.privacy.secagg.masks import MASKED, pack
from roundtable.proto import agent_pb2, common_pb2, relay_pb2
from roundtable.relay.held_updates import Held, RelaySpool
from roundtable.relay.made_sums import SumSpool
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.silos import Silo, Silos
from roundtable.relay.sum_orders import SumOrder, SumTerms
from roundtable.relay.sums_below import SumsBelow
from roundtable.server.auth.access import Refusal
from roundtable.server.door.from_agents import offer_of

TERMS = SumTerms("examples", "float32", "1" * 64, "2" * 64)
ASKED = ("job", 1, 1, "train")
ORDER = SumOrder(TERMS, 3600.0)
ACCEPTED, STALE = agent_pb2.UploadReceipt.ACCEPTED, agent_pb2.UploadReceipt.STALE


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> SiloIdentity:
    folder = tmp_path_factory.mktemp("relay")
    create_ca(folder / "ca")
    issue(folder / "ca", "east", "relay", folder / "east", hosts=("localhost",))
    return load_silo_identity(folder / "east")


@pytest.fixture(scope="module")
def west_identity(identity: SiloIdentity, tmp_path_factory: pytest.TempPathFactory) -> SiloIdentity:
    ca = next(tmp_path_factory.getbasetemp().glob("relay*/ca"))
    issue(ca, "west", "relay", ca.parent / "west", hosts=("localhost",))
    return load_silo_identity(ca.parent / "west")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundtable.relay.relay_sums.Backoff", lambda: Backoff(0.01, 0.05))


class Counting:
    """A coordinator of one step: it takes sums of silos about which nothing was decided, and counts.

    After `outages` calls have failed it answers; a `lost` answer is one of a sum that counts.
    """

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()
        self.decided: dict[str, int] = {}
        self.total, self.weight = np.zeros(3), 0
        self.sums: list[list[str]] = []
        self.outages = self.lost = 0
        self.problem = ""

    async def Sum(self, parts: AsyncIterator[Any], metadata: Any = ()) -> Any:
        header = (await anext(parts)).header
        if self.outages:
            self.outages -= 1
            raise failed()
        if self.problem:
            return relay_pb2.SumReceipt(problem=self.problem)
        members = everyone(header)
        names = sorted(members)
        if any(name in self.decided for name in names):
            return self._receipt([name for name in names if name in self.decided])
        if header.ask:
            return relay_pb2.SumReceipt()
        data = b"".join([part.chunk.data async for part in parts])
        assert blake3(data).hexdigest() == header.content.digest
        weight = sum(members.values())
        self.total += weight * np.frombuffer(data, np.float32)
        self.weight += weight
        self.sums.append(names)
        for name in names:
            self.decide(name)
        if self.lost:
            self.lost -= 1
            raise failed()
        return self._receipt(names)

    def decide(self, name: str, status: int = ACCEPTED) -> None:
        self.decided[name] = status
        self.counted[name] += status == ACCEPTED

    def _receipt(self, names: list[str]) -> Any:
        members = [
            relay_pb2.MemberReceipt(silo=name, receipt=agent_pb2.UploadReceipt(status=self.decided[name]))
            for name in names
        ]
        return relay_pb2.SumReceipt(taken=True, members=members)


def everyone(header: Any) -> dict[str, int]:
    """The examples of all silos in a sum; nobody is in it twice."""
    parts = [{each.silo: each.header.examples} for each in header.members]
    parts += [everyone(below.header) for below in header.sums]
    found = {silo: examples for part in parts for silo, examples in part.items()}
    assert len(found) == sum(map(len, parts))
    return found


class Behind:
    """What a relay behind another one calls: all of its silos have said that it may speak for them."""

    def __init__(self, upper: Region, folder: Path, authority: bytes) -> None:
        self._upper = upper
        self._folder = folder
        self._authority = authority
        self._sums: RelaySums | None = None

    def caller(self, relay: str, silo: str, way: tuple[str, ...]) -> None:
        assert way == ("west",)

    async def asked(self, silo: str, header: Any) -> Any:
        above: Any = self._upper.above
        status = above.decided.get(silo)
        receipt = None if status is None else agent_pb2.UploadReceipt(status=status)
        return agent_pb2.UploadState(wanted=status is None, receipt=receipt)

    async def Sum(self, parts: AsyncIterator[Any], metadata: Any = ()) -> Any:
        if self._sums is not self._upper.sums:
            self._sums = self._upper.sums
            relayed: Any = self
            self._door = SumsBelow(
                self._folder,
                self._upper.silos,
                relayed,
                self._authority,
                self._sums,
                self.asked,
                self._upper.threads,
            )
        call = asyncio.create_task(self._door.receive("west", parts))
        self._upper.calls.add(call)
        try:
            return await call
        except (Refusal, asyncio.CancelledError) as error:
            if isinstance(error, Refusal) or not self._ended():
                raise failed() from error
            raise
        finally:
            call.cancel()
            self._upper.calls.discard(call)

    def _ended(self) -> bool:
        """Whether it is the caller that was cancelled, and not the relay that answers it."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0


def failed() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "away", ""
    )


class Region:
    """A relay's sums on a folder, before a `Counting` coordinator; `restart` is what a kill leaves."""

    def __init__(
        self, folder: Path, identity: SiloIdentity, above: Counting | Behind, name: str = "east"
    ) -> None:
        self._folder, self._identity, self.above, self._name = folder, identity, above, name
        self.threads = ThreadPoolExecutor(1)
        self.silos = Silos()
        self.spool = RelaySpool(folder / "updates")
        self.waiting: dict[str, asyncio.Task[Any]] = {}
        self.calls: set[asyncio.Task[Any]] = set()
        self._begin()

    def _begin(self) -> None:
        link = Link()
        stub: Any = self.above
        link.attach(stub, asyncio.Queue())
        self.spooled = SumSpool(self._folder / "sums", self._name, self._identity)
        self.sums = RelaySums(link, self.spooled, self.silos, lambda _: None, self.threads)

    def ask(self, *names: str) -> None:
        for name in names:
            if self.silos.get(name) is None:
                self.silos.open(Silo(name, agent_pb2.FromAgent()))
            self.sums.ordered(name, ASKED, ORDER)

    def hold(
        self, name: str, vector: Any, examples: int = 10, terms: SumTerms = TERMS, **changes: Any
    ) -> Held:
        data = vector.astype(np.float32).tobytes() if isinstance(vector, np.ndarray) else bytes(vector)
        fields = {"layout": TERMS.layout, "model": TERMS.model, "encoding": TERMS.encoding, **changes}
        header = agent_pb2.UploadHeader(
            step=common_pb2.Step(job="job", round=1, attempt=1, phase="train"),
            content=common_pb2.Artifact(digest=blake3(data).hexdigest(), size=len(data)),
            examples=examples,
            **fields,
        )
        writer = self.spool.writer(name, offer_of(header))
        writer.open()
        writer.write(data)
        writer.finish()
        writer.close()
        return self.spool.keep(name, header, relay_pb2.Bearer(silo=name), terms)

    def deliver(self, held: Held) -> None:
        async def wait() -> Any:
            receipt = await self.sums.outcome(held)
            if receipt is not None:
                self.spool.remove(held)
            return receipt

        self.waiting[held.silo] = asyncio.create_task(wait())

    async def restart(self) -> None:
        tasks = [*self.waiting.values(), *self.calls]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sums.close()
        self.waiting.clear()
        self._begin()
        self.sums.recover()
        for held in self.spool.recover():
            assert held.terms == TERMS
            self.deliver(held)
        await asyncio.sleep(0)
        self.sums.start()

    async def result(self, name: str) -> Any:
        async with asyncio.timeout(20):
            return await self.waiting[name]

    async def close(self) -> None:
        await self.sums.close()
        self.threads.shutdown()


async def settled(region: Region, *names: str) -> list[int]:
    return [(await region.result(name)).status for name in names]


async def test_a_sum_waits_for_all_that_can_come_and_for_nobody_else(
    tmp_path: Path, identity: SiloIdentity
) -> None:
    above = Counting()
    region = Region(tmp_path, identity, above)
    region.ask(*"abcd")
    region.deliver(region.hold("b", np.ones(3), 30))
    region.deliver(region.hold("a", 5 * np.ones(3), 10))
    await asyncio.sleep(0.05)
    assert above.sums == []
    region.sums.excused("c", ASKED)
    assert region.silos.close(region.silos.get("d"))
    region.sums.left()
    assert await settled(region, "a", "b") == [ACCEPTED] * 2
    region.ask("d")
    region.deliver(region.hold("d", np.zeros(3)))
    await settled(region, "d")
    assert above.sums == [["a", "b"], ["d"]]
    np.testing.assert_allclose(above.total / above.weight, [1.6] * 3, rtol=1e-6)
    assert not list((tmp_path / "updates").iterdir())
    assert not list((tmp_path / "sums").iterdir())
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 2
    await region.close()


async def test_the_log_of_sums_is_two_files_of_a_size_and_the_page_counts(
    tmp_path: Path, identity: SiloIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundtable.relay.made_sums.LOG_BYTES", 5000)
    above = Counting()
    region = Region(tmp_path, identity, above)
    for number, name in enumerate("abcdef"):
        above.problem = "no more" if name == "f" else ""
        region.ask(name)
        region.deliver(region.hold(name, np.full(3, float(number))))
        await region.result(name)
    assert region.spooled.told == {"taken": 5, "refused": 1}
    assert (region.spooled.summed, region.sums.undecided) == (5, 0)
    files = [tmp_path / "sums.1.jsonl", tmp_path / "sums.jsonl"]
    line = max(map(len, files[1].read_bytes().splitlines()))
    assert all(0 < file.stat().st_size <= 5000 + line for file in files)
    outcomes = [json.loads(each)["outcome"] for file in files for each in file.read_text().splitlines()]
    assert outcomes[-2:] == ["taken", "no more"]
    await region.close()


async def test_what_cannot_be_added_up_goes_on_by_itself(tmp_path: Path, identity: SiloIdentity) -> None:
    above = Counting()
    region = Region(tmp_path, identity, above)
    region.ask(*"abcdefg")
    region.deliver(region.hold("a", np.array([1.0, np.nan, 1.0])))
    region.deliver(region.hold("b", np.ones(3), model="3" * 64))
    region.deliver(region.hold("c", np.ones(4)))
    region.deliver(region.hold("d", np.ones(3), 0))
    damaged = region.hold("e", 2 * np.ones(3))
    damaged.path.write_bytes(bytes(12))
    region.deliver(damaged)
    for name in "fg":
        region.deliver(region.hold(name, np.ones(3)))
    assert await settled(region, "f", "g") == [ACCEPTED] * 2
    assert [await region.result(name) for name in "abcd"] == [None] * 4
    with pytest.raises(TransferError, match="send it again"):
        await region.result("e")
    assert above.sums == [["f", "g"]]
    above.problem = "another layout"
    region.ask("h")
    region.deliver(region.hold("h", np.ones(3)))
    assert await region.result("h") is None
    await region.close()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_each_update_counts_once_whoever_is_killed_or_goes_another_way(
    tmp_path_factory: pytest.TempPathFactory,
    identity: SiloIdentity,
    west_identity: SiloIdentity,
    data: st.DataObject,
) -> None:
    """Three of them are behind a relay behind the one that speaks to the coordinator, or none is."""
    names = "abcde"
    behind = data.draw(st.sampled_from(["", "abc"]))

    async def play() -> None:
        above = Counting()
        east = Region(tmp_path_factory.mktemp("region"), identity, above)
        ca = next(tmp_path_factory.getbasetemp().glob("relay*/ca/ca.crt")).read_bytes()
        door = Behind(east, tmp_path_factory.mktemp("below"), ca)
        west = Region(tmp_path_factory.mktemp("behind"), west_identity, door, "west")
        east.ask(*names)
        west.ask(*behind)
        vectors = {name: np.full(3, float(place + 1)) for place, name in enumerate(names)}
        examples = {name: 10 * (place + 1) for place, name in enumerate(names)}
        direct: set[str] = set()

        async def begin_anew(region: Region) -> None:
            """The coordinator asks again those that it waits for, once they are back."""
            await region.restart()
            here = names if region is east else behind
            region.ask(*(name for name in here if name not in above.decided))

        left = list(names)
        while left:
            name = data.draw(st.sampled_from(left))
            region = west if name in behind else east
            match data.draw(st.sampled_from(["deliver", "deliver", "direct", "late", "restart", "lost"])):
                case "deliver":
                    region.deliver(region.hold(name, vectors[name], examples[name]))
                    left.remove(name)
                case "direct" if name not in above.decided:
                    # It came to the coordinator itself, and is here all the same.
                    above.decide(name)
                    direct.add(name)
                    region.deliver(region.hold(name, vectors[name], examples[name]))
                    left.remove(name)
                case "late" if name not in above.decided:
                    above.decide(name, STALE)
                    region.deliver(region.hold(name, vectors[name], examples[name]))
                    left.remove(name)
                case "restart":
                    await begin_anew(region)
                case "lost":
                    above.lost = 1
            for _ in range(data.draw(st.integers(0, 3))):
                await asyncio.sleep(0.002)
        for region in (east, west):
            if data.draw(st.booleans()):
                await begin_anew(region)
        await asyncio.gather(
            *(region.result(name) for region in (east, west) for name in list(region.waiting))
        )
        assert above.counted == {name: above.decided[name] == ACCEPTED for name in names}
        summed = [name for names in above.sums for name in names]
        assert set(summed) == {name for name in names if above.counted[name]} - direct
        expected = sum((examples[name] * vectors[name] for name in summed), np.zeros(3))
        np.testing.assert_allclose(above.total, expected, rtol=1e-6)
        await west.close()
        await east.close()

    asyncio.run(play())


def test_masked_updates_are_added_in_the_ring(tmp_path: Path, identity: SiloIdentity) -> None:
    """Of one the bits behind the last number are set: it is no vector of the ring, and is handed on."""

    async def added() -> None:
        region = Region(tmp_path, identity, Counting())
        rows = np.random.default_rng(3).integers(0, 1 << 12, (3, 5)).astype(np.uint16)
        terms = SumTerms("uniform", MASKED, TERMS.layout, TERMS.model, 12)
        fields = {"encoding": MASKED, "terms": terms, "examples": 0}
        held = [region.hold(name, pack(row, 12), **fields) for name, row in zip("zxy", rows, strict=True)]
        spoiled = bytes(pack(rows[0], 12))[:-1] + b"\xff"
        odd = region.hold("w", spoiled, **fields)
        spool = SumSpool(tmp_path / "sums", "east", identity)
        assert spool.make([*held, odd], terms).odd == [odd]
        (kept,) = (each for each in region.spool.recover() if each.silo == "z")
        made = spool.make([kept, *held[1:]], terms).made
        assert made is not None
        assert list(made.members) == list("xyz")
        assert made.path.read_bytes() == bytes(pack(rows.sum(0, dtype=np.uint16) & 0xFFF, 12))
        held[0].path.write_bytes(bytes(8))
        with pytest.raises(DamagedRows, match="have changed on the disk"):
            spool.make(held, terms)
        await region.close()

    asyncio.run(added())


def test_the_relays_mean_is_the_flat_one(tmp_path: Path, identity: SiloIdentity) -> None:
    """In bfloat16, in whatever order updates came: the same bytes; a signed statement names all members."""

    async def both() -> list[str]:
        digests = []
        chance = np.random.default_rng(7)
        vectors = {name: torch.from_numpy(chance.normal(size=64)).to(torch.bfloat16) for name in "xyz"}
        terms = SumTerms("uniform", "bfloat16", TERMS.layout, TERMS.model)
        for order in ("xyz", "zxy"):
            region = Region(tmp_path / order, identity, Counting())
            held = []
            for name in order:
                bits = vectors[name].view(torch.uint8).numpy().tobytes()
                header = agent_pb2.UploadHeader(
                    step=common_pb2.Step(job="job", round=1, attempt=1, phase="train"),
                    content=common_pb2.Artifact(digest=blake3(bits).hexdigest(), size=len(bits)),
                    examples=3,
                    layout=terms.layout,
                    model=terms.model,
                    encoding="bfloat16",
                )
                path = tmp_path / order / name
                path.write_bytes(bits)
                held.append(Held(name, header, offer_of(header), relay_pb2.Bearer(silo=name), path, terms))
            made = SumSpool(tmp_path / order / "sums", "east", identity).make(held, terms).made
            assert made is not None
            assert list(made.members) == list("xyz")
            mean = torch.from_numpy(np.frombuffer(made.path.read_bytes(), np.float32).copy())
            flat = torch.stack([vector.float() for vector in vectors.values()]).mean(0)
            torch.testing.assert_close(mean, flat, rtol=1e-6, atol=1e-7)
            digests.append(made.offer.digest)
            await region.close()
        return digests

    assert len(set(asyncio.run(both()))) == 1

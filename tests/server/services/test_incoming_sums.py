"""What a relay may and may not send as the sum of its silos' updates."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import sqlalchemy as sa
import torch
from blake3 import blake3
from scripted_agent import ScriptedAgent, header_for, secure_channel
from service import AGENTS, Operator

from roundtable.administration import Administrator
from roundtable.core.identity.credentials import SiloIdentity, issue, load_silo_identity
from roundtable.core.identity.signing import open_envelope, passage_values, sign
from roundtable.proto import PROTOCOL_VERSION, agent_pb2, common_pb2, relay_pb2, relay_pb2_grpc
from roundtable.proto.receipts import sum_values, update_values
from roundtable.server import Coordinator
from roundtable.server.store import tables

Status = agent_pb2.UploadReceipt
JOB = """[cohort]
size = 3
wait = "60s"
[evaluation]
every = 0
[regions]
sum = true
[aggregation.validation]
norm_ratio = "off"
weight_ratio = "off"
"""
CHANGES = {"alder": torch.ones(4), "birch": torch.tensor([4.0, 0.0, 0.0, 0.0]), "cedar": -torch.ones(4)}
EXAMPLES = {"alder": 10, "birch": 30, "cedar": 20}


@pytest.fixture(scope="module")
def east(certificates: Path) -> SiloIdentity:
    """The identity of a relay that the root has certified."""
    if not (certificates / "east").exists():
        issue(certificates / "ca", "east", "relay", certificates / "east", hosts=("localhost",))
    return load_silo_identity(certificates / "east")


class Silo:
    """An agent with an identity, and what it has signed as its update of the first round."""

    def __init__(self, agent: ScriptedAgent, name: str, identity: SiloIdentity) -> None:
        self.agent, self.name, self.identity = agent, name, identity
        self.data = CHANGES[name].numpy().tobytes()
        self.asked: Any = None

    def header(self, model: str = "", **changes: Any) -> agent_pb2.UploadHeader:
        made = header_for(self.asked, self.data, EXAMPLES[self.name], loss=1.0)
        made.model, made.time = model or self.asked.train.model.digest, time.time()
        made.signature = sign(self.identity, "update", update_values(self.name, made))
        for name, value in changes.items():
            setattr(made, name, value)
        return made


class Relay:
    """A relay's connection, for silos that have signed that it may speak for them."""

    def __init__(self, port: int, credentials: Path, identity: SiloIdentity) -> None:
        self.channel = secure_channel(port, credentials)
        self.stub: Any = relay_pb2_grpc.RelaysStub(self.channel)
        self.identity = identity

    async def speak_for(self, *silos: Silo, behind: str = "") -> None:
        """The silo `behind` is behind west, which is behind this relay."""
        self.trunk = self.stub.Trunk()
        hello = relay_pb2.RelayHello(version="test", protocol=PROTOCOL_VERSION, clock=time.time())
        await self.trunk.write(relay_pb2.FromRelay(hello=hello))
        assert (await self.trunk.read()).WhichOneof("message") == "welcome"
        for silo in silos:
            way = "west/east" if silo.name == behind else "east"
            passage = agent_pb2.Passage(relay=way)
            passage.signature = sign(silo.identity, "passage", passage_values(silo.name, way, bytes(32)))
            bearer = relay_pb2.Bearer(
                silo=silo.name, identity=silo.identity.certificate, installation=bytes(32), passage=passage
            )
            await self.trunk.write(relay_pb2.FromRelay(bearer=bearer))
        await self.trunk.write(relay_pb2.FromRelay(beat=relay_pb2.RelayBeat()))
        while (await self.trunk.read()).WhichOneof("message") != "beat":
            pass

    def header(
        self, *silos: Silo, data: bytes = b"", within: Sequence[relay_pb2.RegionRound] = (), **changes: Any
    ) -> tuple[relay_pb2.SumHeader, bytes]:
        model = within[-1].made if within else ""
        weights = [EXAMPLES[silo.name] for silo in silos]
        rows = torch.stack([CHANGES[silo.name] for silo in silos])
        mean = (torch.tensor(weights, dtype=torch.float32) @ rows / sum(weights)).numpy().tobytes()
        data = data or mean
        header = relay_pb2.SumHeader(
            step=silos[0].asked.step,
            content=common_pb2.Artifact(digest=blake3(data).hexdigest(), size=len(data)),
            members=[relay_pb2.SumMember(silo=silo.name, header=silo.header(model)) for silo in silos],
            within=within,
            time=time.time(),
            certificate=self.identity.certificate,
        )
        header.signature = sign(self.identity, "sum", sum_values("east", header))
        for name, value in changes.items():
            setattr(header, name, value)
        return header, data

    async def send(self, header: relay_pb2.SumHeader, data: bytes) -> Any:
        async def parts() -> AsyncIterator[relay_pb2.SumPart]:
            yield relay_pb2.SumPart(header=header)
            if not header.ask:
                yield relay_pb2.SumPart(
                    chunk=common_pb2.Chunk(offset=header.offset, data=data[header.offset :])
                )

        return await self.stub.Sum(parts(), timeout=20.0)

    async def refused(self, header: relay_pb2.SumHeader, data: bytes) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.send(header, data)
        said = caught.value.details() or ""
        assert "Traceback" not in said
        return caught.value.code(), said


@pytest.fixture
async def region(
    coordinator: Coordinator, certificates: Path, east: SiloIdentity
) -> AsyncIterator[tuple[Relay, list[Silo]]]:
    """A relay, and three agents that have identities."""
    silos = []
    for name in AGENTS[:3]:
        identity = load_silo_identity(certificates / name)
        agent = ScriptedAgent(coordinator.port, certificates / name)
        await agent.connect(identity=identity.certificate)
        silos.append(Silo(agent, name, identity))
    relay = Relay(coordinator.port, certificates / "east", east)
    yield relay, silos
    for silo in silos:
        await silo.agent.close()
    await relay.channel.close()


async def started(operator: Operator, silos: list[Silo], text: str = JOB, rounds: int = 1) -> str:
    job = await operator.submit(text, rounds=rounds)
    for silo in silos:
        silo.asked = await silo.agent.expect("instruction")
    return str(job.id)


async def test_a_sum_counts_once_for_each_of_its_silos_whatever_way_they_come(
    coordinator: Coordinator, operator: Operator, region: tuple[Relay, list[Silo]], certificates: Path
) -> None:
    relay, silos = region
    alder, birch, cedar = silos
    job = await started(operator, silos)
    await relay.speak_for(*silos)
    # One has moved, and its update came by itself: no sum with it is taken, and the relay hears of it.
    assert (await alder.agent.upload(alder.header(), alder.data)).status == Status.ACCEPTED
    told = await relay.send(*relay.header(*silos))
    assert not told.taken
    assert [(each.silo, each.receipt.status) for each in told.members] == [("alder", Status.ACCEPTED)]
    header, data = relay.header(birch, cedar)
    assert (await relay.send(relay.header(birch, cedar, ask=True)[0], b"")).offset == 0
    for _ in range(2):
        # A relay that lost the answer asks again, and is told the same.
        told = await relay.send(header, data)
        assert told.taken
        assert [each.receipt.status for each in told.members] == [Status.ACCEPTED] * 2
    # One of them comes by itself afterwards.
    assert (await cedar.agent.upload(cedar.header(), cedar.data)).status == Status.ACCEPTED
    await operator.watch_until(job, "finished")
    detail = await operator.job(job)
    record = json.loads(detail.history[0])
    assert record["weights"] == pytest.approx({"alder": 1 / 6, "birch": 1 / 2, "cedar": 1 / 3})
    expected = sum(EXAMPLES[name] * CHANGES[name] for name in CHANGES) / 60
    file = await operator.fetch(detail.job.model.digest)
    made = torch.frombuffer(bytearray(file[-16:]), dtype=torch.float32)
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-7)
    (row,) = await coordinator._database.read(
        lambda found: found.execute(sa.select(tables.relayed_sums)).all()
    )
    ca = (certificates / "ca" / "ca.crt").read_bytes()
    kept = open_envelope(json.loads(row.statement), ca, "relay", "sum")
    assert kept.signer == "east"
    assert kept.values["members"] == {
        silo.name: [blake3(silo.data).hexdigest(), EXAMPLES[silo.name]] for silo in (birch, cedar)
    }


async def test_a_sum_that_is_not_of_those_who_signed_is_refused(
    operator: Operator, region: tuple[Relay, list[Silo]], certificates: Path
) -> None:
    relay, silos = region
    alder, birch, _ = silos
    await started(operator, silos)
    await relay.speak_for(alder, birch)
    denied = grpc.StatusCode.PERMISSION_DENIED
    forged, data = relay.header(alder, birch)
    forged.members[0].header.examples = 1000
    assert (await relay.refused(forged, data))[0] == denied
    forged.signature = sign(relay.identity, "sum", sum_values("east", forged))
    code, said = await relay.refused(forged, data)
    assert (code, "not signed by the silo's identity" in said) == (denied, True)
    code, said = await relay.refused(*relay.header(*silos))
    assert (code, "does not speak for a silo of this name" in said) == (denied, True)
    own = relay.identity
    relay.identity = load_silo_identity(certificates / "cedar")
    assert (await relay.refused(*relay.header(alder, birch)))[0] == denied
    relay.identity = own
    twice, data = relay.header(alder, alder)
    assert (await relay.refused(twice, data))[0] == grpc.StatusCode.INVALID_ARGUMENT
    spoiled = torch.full((4,), torch.nan).numpy().tobytes()
    assert "not finite" in (await relay.send(*relay.header(alder, birch, data=spoiled))).problem
    assert "5 bytes" in (await relay.send(*relay.header(alder, birch, data=bytes(5)))).problem
    told = await relay.send(*relay.header(alder, birch))
    assert told.taken


async def test_a_silo_that_is_revoked_while_its_update_is_at_the_relay_costs_the_others_nothing(
    coordinator: Coordinator, operator: Operator, region: tuple[Relay, list[Silo]], certificates: Path
) -> None:
    relay, (alder, birch, cedar) = region
    await started(operator, [alder, birch, cedar])
    await relay.speak_for(alder, birch, cedar)

    def revoke() -> None:
        with Administrator(f"localhost:{coordinator.port}", certificates / "olga") as olga:
            olga.revoke("alder", "its laptop was stolen")

    await asyncio.to_thread(revoke)
    told = await relay.send(*relay.header(alder, birch, cedar))
    assert not told.taken
    assert [(each.silo, each.receipt.status) for each in told.members] == [("alder", Status.REJECTED)]
    assert "has been revoked" in told.members[0].receipt.reason
    told = await relay.send(*relay.header(birch, cedar))
    assert told.taken


async def test_a_sum_in_a_sum_is_signed_by_a_relay_on_its_silos_way(
    coordinator: Coordinator, operator: Operator, region: tuple[Relay, list[Silo]], certificates: Path
) -> None:
    relay, (alder, birch, cedar) = region
    await started(operator, [alder, birch, cedar])
    await relay.speak_for(alder, birch, cedar, behind="alder")
    issue(certificates / "ca", "west", "relay", certificates / "west", hosts=("localhost",))
    west = load_silo_identity(certificates / "west")

    def below(silo: Silo, signer: SiloIdentity = west) -> relay_pb2.SumBelow:
        header, _ = relay.header(silo, certificate=signer.certificate)
        header.signature = sign(signer, "sum", sum_values("west", header))
        return relay_pb2.SumBelow(relay="west", header=header)

    def within(*sums: relay_pb2.SumBelow) -> tuple[relay_pb2.SumHeader, bytes]:
        header, data = relay.header(birch, data=bytes(16))
        header.sums.extend(sums)
        header.signature = sign(relay.identity, "sum", sum_values("east", header))
        return header, data

    denied, invalid = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT
    assert (await relay.refused(*within(below(alder, relay.identity))))[0] == denied
    code, said = await relay.refused(*within(below(cedar)))
    assert (code, "not by the relays 'west/east'" in said) == (denied, True)
    assert (await relay.refused(*within(below(birch))))[0] == invalid
    assert (await relay.refused(*within(below(alder), below(alder))))[0] == invalid
    unsigned, data = within(below(alder))
    unsigned.sums[0].header.time += 1
    assert (await relay.refused(unsigned, data))[0] == denied
    told = await relay.send(*within(below(alder)))
    assert told.taken
    assert [(each.silo, each.receipt.status) for each in told.members] == [
        ("alder", Status.ACCEPTED),
        ("birch", Status.ACCEPTED),
    ]
    (row,) = await coordinator._database.read(
        lambda found: found.execute(sa.select(tables.relayed_sums)).all()
    )
    ca = (certificates / "ca" / "ca.crt").read_bytes()
    (inner,) = json.loads(row.statement)["sums"]
    assert open_envelope(inner, ca, "relay", "sum").signer == "west"


async def test_a_job_that_says_nothing_of_sums_takes_none(
    operator: Operator, region: tuple[Relay, list[Silo]]
) -> None:
    relay, silos = region
    job = await started(operator, silos, JOB.replace("sum = true", "sum = false"))
    await relay.speak_for(*silos)
    assert "regions.sum" in (await relay.send(*relay.header(*silos))).problem
    assert json.loads((await operator.job(job)).job_config)["regions"]["sum"] is False
    await asyncio.gather(*(silo.agent.upload(silo.header(), silo.data) for silo in silos))
    await operator.watch_until(job, "finished")


def chain(*models: str, first: int = 1) -> list[relay_pb2.RegionRound]:
    """Rounds within a region that lead from one model to the next."""
    return [
        relay_pb2.RegionRound(round=number, model=model, made=made, silos=3, examples=60, members="5" * 64)
        for number, (model, made) in enumerate(pairwise(models), start=first)
    ]


async def test_a_sum_after_rounds_within_the_region_leads_to_it_from_the_coordinators_model(
    coordinator: Coordinator, operator: Operator, region: tuple[Relay, list[Silo]]
) -> None:
    """The coordinator asks for round 3, and then for the last: rounds 1 and 2 are the relay's."""
    relay, silos = region
    text = JOB.replace("sum = true", "sum = true\nrounds = 3")
    job = await started(operator, silos, text, rounds=4)
    assert {silo.asked.step.round for silo in silos} == {3}
    await relay.speak_for(*silos)
    start, one, two = silos[0].asked.train.model.digest, "1" * 64, "2" * 64
    for within, says in (
        (chain(start, one), "the rounds within its region that lead to the sum of round 3 are 1, 2"),
        (chain(start, one, two, "3" * 64), "are 1, 2"),
        (chain("9" * 64, one, two), "round 1 began with 999999999999"),
        ([*chain(start, one), *chain(start, two, first=2)], f"began with {start[:12]}, and {one[:12]}"),
    ):
        assert says in (await relay.send(*relay.header(*silos, within=within))).problem
    good = chain(start, one, two)
    # Who trained from another model than the region's last is in no sum of it.
    header, data = relay.header(*silos, within=good)
    header.members[0].header.CopyFrom(silos[0].header(one))
    header.signature = sign(relay.identity, "sum", sum_values("east", header))
    code, said = await relay.refused(header, data)
    assert (code, "was asked about" in said) == (grpc.StatusCode.PERMISSION_DENIED, True)
    assert (await relay.send(*relay.header(*silos, within=good))).taken
    for silo in silos:
        silo.asked = await silo.agent.expect("instruction")
    assert {silo.asked.step.round for silo in silos} == {4}
    assert "are none" in (await relay.send(*relay.header(*silos, within=good))).problem
    assert (await relay.send(*relay.header(*silos))).taken
    await operator.watch_until(job, "finished")
    detail = await operator.job(job)
    records = [json.loads(each) for each in detail.history]
    assert [each["round"] for each in records] == [3, 4]
    assert [each["within"] for each in records] == [{"east": [[1, 3, 60, one], [2, 3, 60, two]]}, {}]
    assert (detail.job.rounds_done, detail.job.rounds) == (4, 4)


async def test_a_single_update_after_rounds_within_a_region_is_rejected(
    operator: Operator, region: tuple[Relay, list[Silo]]
) -> None:
    _, (alder, *_) = region
    await started(operator, region[1], JOB.replace("sum = true", "sum = true\nrounds = 3"), rounds=3)
    receipt = await alder.agent.upload(alder.header(), alder.data)
    assert receipt.status == Status.REJECTED
    assert "counts only in the sum of its relay" in receipt.reason

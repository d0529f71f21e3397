"""What a relay does between two rounds that go up, against a plain computation: each update once, whatever
happens, and the model that hierarchical FedAvg gives."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.client.agent.connection import Link
from roundtable.client.door.incoming import message_of
from roundtable.client.door.model_names import ArtifactName
from roundtable.client.policy.region_models import RegionWord, check_region
from roundtable.core import JobConfig
from roundtable.core.errors import IdentityError, ResourceError
from roundtable.core.identity.credentials import SiloIdentity, create_ca, issue, load_silo_identity
from roundtable.core.identity.signing import sign
from roundtable.core.layout import Layout
from roundtable.core.models import Model, model_digest, open_model, save_model
from roundtable.proto import agent_pb2, common_pb2, relay_pb2
from roundtable.proto.receipts import update_values
from roundtable.relay.cache import RegionCache
from roundtable.relay.from_coordinator import FromCoordinator
from roundtable.relay.held_updates import RelaySpool
from roundtable.relay.made_sums import SumSpool
from roundtable.relay.region_spans import RegionSpan, SpanFolder
from roundtable.relay.regional import RegionalRounds
from roundtable.relay.regional_table import RegionalTable
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.silos import Silo, Silos
from roundtable.relay.sum_orders import SumTerms
from roundtable.server.auth.access import Refusal
from roundtable.server.door.from_agents import offer_of
from roundtable.server.services.upload_receipts import Receipts

OFF = {"validation": {"norm_ratio": "off", "weight_ratio": "off"}}
JOB = JobConfig.model_validate(
    {"task": "toy", "rounds": 7, "regions": {"sum": True, "rounds": 4}, "aggregation": OFF}
)
START = Model(Layout.of({"w": torch.zeros(3)}), torch.tensor([1.0, -2.0, 0.5]))
ACCEPTED, STALE = agent_pb2.UploadReceipt.ACCEPTED, agent_pb2.UploadReceipt.STALE
NAMES = "abcd"
EXAMPLES = {name: 10 * (place + 1) for place, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credentials")
    create_ca(folder / "ca")
    issue(folder / "ca", "east", "relay", folder / "east", hosts=("localhost",))
    issue(folder / "ca", "west", "relay", folder / "west", hosts=("localhost",))
    for name in NAMES:
        issue(folder / "ca", name, "agent", folder / name)
    save_model(folder / "start.safetensors", START)
    return folder


def trained(name: str, round: int, model: torch.Tensor) -> np.ndarray:
    """An update that depends on model, silo and round."""
    return (0.25 * (float(NAMES.index(name) + round) - model)).numpy().astype(np.float32)


class Above:
    """The coordinator: takes the sum of the round that goes up."""

    def __init__(self) -> None:
        self.headers: list[Any] = []
        self.vector = np.zeros(3)
        self.weight = 0
        self.counted: list[str] = []
        self.said: list[relay_pb2.FromRelay] = []

    async def Sum(self, parts: AsyncIterator[Any], metadata: Any = ()) -> Any:
        header = (await anext(parts)).header
        names = [each.silo for each in header.members]
        done = [name for name in names if name in self.counted]
        if not done and header.ask:
            return relay_pb2.SumReceipt()
        if not done:
            data = b"".join([part.chunk.data async for part in parts])
            weight = sum(each.header.examples for each in header.members)
            self.vector += weight * np.frombuffer(data, np.float32)
            self.weight += weight
            self.counted += names
            self.headers.append(header)
            done = names
        receipt = agent_pb2.UploadReceipt(status=ACCEPTED)
        members = [relay_pb2.MemberReceipt(silo=name, receipt=receipt) for name in done]
        return relay_pb2.SumReceipt(taken=done == names, members=members)


class Region:
    """A relay's rounds on a folder; silos train when they are told to and deliver when the test says so."""

    def __init__(self, folder: Path, credentials: Path, policy: RegionalTable | None = None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.credentials = credentials
        self.policy = policy
        self.above = Above()
        self.threads = ThreadPoolExecutor(1)
        self.identity = load_silo_identity(credentials / "east")
        self.ca = (credentials / "ca" / "ca.crt").read_bytes()
        self.receipts: dict[tuple[str, int], list[int]] = {}
        self.work: dict[str, agent_pb2.Instruction] = {}
        self.waiting: set[asyncio.Task[Any]] = set()
        self.began: dict[int, torch.Tensor] = {}
        self.begin()

    def begin(self) -> None:
        link = Link()
        stub: Any = self.above
        link.attach(stub, asyncio.Queue())
        self.silos = Silos()
        self.spool = RelaySpool(self.folder / "updates")
        self.sums = RelaySums(
            link,
            SumSpool(self.folder / "sums", "east", self.identity),
            self.silos,
            lambda _: None,
            self.threads,
        )
        spans = SpanFolder(self.folder / "regional", "east")
        cache = RegionCache(self.folder / "models", 4, link, spans.models)
        start = self.folder / "models" / f"{model_digest(START)}.safetensors"
        start.parent.mkdir(exist_ok=True)
        start.write_bytes((self.credentials / "start.safetensors").read_bytes())
        self.regional = RegionalRounds(
            self.policy,
            spans,
            "east",
            self.identity,
            self.ca,
            cache,
            self.silos,
            self.sums,
            Receipts(self.identity, lambda: (0, ""), lambda: 1.0),
            self.threads,
            0.05,
            self.above.said.append,
            lambda silo, instruction: self.coordinator.instruct(silo, instruction),
        )
        self.sums.region = self.regional
        self.spans = spans
        self.coordinator = FromCoordinator(
            self.silos, cache, b"", 1.0, self.above.said.append, list, "east", self.sums, self.regional
        )

    def order(
        self,
        *names: str,
        round: int = 4,
        attempt: int = 1,
        job: str = "job",
        model: str = "",
        deadline: float = 3600.0,
    ) -> None:
        """What the coordinator says to silos that are connected, or connect now."""
        for name in names:
            if self.silos.get(name) is None:
                hello = agent_pb2.FromAgent()
                hello.hello.passage.relay = "east"
                self.silos.open(Silo(name, hello))
            size = (self.credentials / "start.safetensors").stat().st_size
            instruction = agent_pb2.Instruction(
                step=common_pb2.Step(job=job, round=round, attempt=attempt, phase="train"),
                deadline_seconds=deadline,
                job_config=JOB.to_json(),
                train=agent_pb2.Train(
                    model=common_pb2.Artifact(digest=model or model_digest(START), size=size),
                    layout="1" * 64,
                ),
            )
            said = relay_pb2.SaidToSilo(silo=name, message=agent_pb2.ToAgent(instruction=instruction))
            self.coordinator.hear(relay_pb2.ToRelay(said=said))
        self.listen()

    def listen(self) -> None:
        """What silos were told."""
        for silo in self.silos:
            while not silo.outbox.empty():
                message = silo.outbox.get_nowait()
                if message is not None and message.WhichOneof("message") == "instruction":
                    self.work[silo.name] = message.instruction

    def model(self, instruction: agent_pb2.Instruction) -> torch.Tensor | None:
        """The model of an order; None for one of a round that is over."""
        digest = instruction.train.model.digest
        here = self.spans.path(digest)
        if digest == model_digest(START):
            return START.vector
        return open_model(here).vector.clone() if here.exists() else None

    def deliver(self, name: str, vector: np.ndarray | None = None) -> bool:
        """Sends the update that the silo was told to make last; whether there was one that is wanted."""
        self.listen()
        instruction = self.work.get(name)
        if instruction is None:
            return False
        step = instruction.step
        model = self.model(instruction)
        if model is None:
            return False
        assert torch.equal(self.began.setdefault(step.round, model), model)
        made = trained(name, step.round, model) if vector is None else vector
        data = made.tobytes()
        header = agent_pb2.UploadHeader(
            step=step,
            content=common_pb2.Artifact(digest=blake3(data).hexdigest(), size=len(data)),
            examples=EXAMPLES[name],
            layout="1" * 64,
            model=instruction.train.model.digest,
            encoding="float32",
            time=2e9,
        )
        offer = offer_of(header)
        try:
            if (given := self.regional.receipt(name, offer)) is not None:
                self.receipts.setdefault((name, step.round), []).append(given.status)
                return False
        except Refusal:
            return False
        silo = self.silos.get(name)
        order = silo.sum_order((step.job, step.round, step.attempt, step.phase)) if silo else None
        if (
            silo is None
            or order is None
            or self.sums.waits_for(name, ("job", step.round, step.attempt, "train"))
        ):
            return False
        writer = self.spool.writer(name, offer)
        writer.open()
        writer.write(data)
        writer.finish()
        writer.close()
        self.wait_for(self.spool.keep(name, header, relay_pb2.Bearer(silo=name), order.terms))
        return True

    def wait_for(self, held: Any) -> None:
        async def wait() -> None:
            receipt = await self.sums.outcome(held)
            if receipt is not None:
                self.spool.remove(held)
                key = held.silo, held.offer.at.step.round
                self.receipts.setdefault(key, []).append(receipt.status)

        self.waiting.add(asyncio.create_task(wait()))

    async def restart(self) -> None:
        """What a kill leaves; nobody is connected."""
        await self.end()
        self.begin()
        self.sums.recover()
        self.regional.recover()
        for held in self.spool.recover():
            self.wait_for(held)
        await asyncio.sleep(0)
        self.sums.start()

    async def end(self) -> None:
        for task in self.waiting:
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)
        self.waiting.clear()
        await self.sums.close()
        await self.regional.close()

    async def close(self) -> None:
        await self.end()
        self.threads.shutdown()

    def failures(self) -> dict[str, str]:
        return {
            each.said.silo: each.said.message.failure.detail
            for each in self.above.said
            if each.said.message.WhichOneof("message") == "failure"
        }

    def rounds(self) -> list[dict[str, list[Any]]]:
        """Of each sum that the relay's log says was taken: whose updates are in it, by round."""
        lines = (self.folder / "sums.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines]
        return [each["sum"]["statement"] for each in told if each["outcome"] == "taken"]


def mean(vectors: dict[str, np.ndarray]) -> np.ndarray:
    """Of updates by the examples of their silos."""
    total = sum(EXAMPLES[name] for name in vectors)
    return (
        sum((EXAMPLES[name] * each.astype(np.float64) for name, each in vectors.items()), np.zeros(3)) / total
    )


async def until(condition: Any) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")


@pytest.mark.parametrize("within", [True, False], ids=["region", "coordinator"])
async def test_what_a_silo_has_not_signed_for_the_model_of_its_order_is_in_no_sum(
    tmp_path: Path, credentials: Path, within: bool
) -> None:
    """One such update would have the coordinator refuse the sum of all."""
    region = Region(tmp_path, credentials, RegionalTable(least_silos=1))
    model, name = model_digest(START), NAMES[0]
    own = load_silo_identity(credentials / name)
    header = agent_pb2.UploadHeader(
        step=common_pb2.Step(job="job", round=1, attempt=1, phase="train"),
        content=common_pb2.Artifact(digest="3" * 64, size=12),
        layout="1" * 64,
        encoding="float32",
        examples=5,
        model=model,
        time=time.time(),
    )
    terms = None if within else SumTerms("examples", "float32", "1" * 64, model)
    if within:
        region.order(*NAMES)

    def forged(model: str = model, signer: SiloIdentity = own, **changes: Any) -> str:
        made = agent_pb2.UploadHeader()
        made.CopyFrom(header)
        made.model = model
        made.signature = sign(signer, "update", update_values(name, made))
        for key, value in changes.items():
            setattr(made, key, value)
        return region.regional.forged(name, offer_of(made), own.certificate, terms)

    assert forged() == ""
    assert "is not signed" in forged(signature=b"")
    assert "is not signed" in forged(examples=5_000)
    assert "is not signed" in forged(signer=load_silo_identity(credentials / NAMES[1]))
    assert "was asked about" in forged(model="4" * 64)
    await region.close()


async def test_a_silo_that_comes_anew_and_names_no_relay_ends_nobodys_connection(
    tmp_path: Path, credentials: Path
) -> None:
    """An order for it is under way, and the coordinator has not refused its new hello yet."""
    region = Region(tmp_path, credentials, RegionalTable(least_silos=1))
    region.silos.open(Silo(NAMES[0], agent_pb2.FromAgent()))
    region.order(NAMES[0])
    assert region.work[NAMES[0]].step.round == 4
    await region.close()


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


HOSTILE: list[dict[str, Any]] = [
    {"job": "../victim"},
    {"job": "a/../../victim"},
    {"model": "../../victim"},
    {"deadline": float("nan")},
    {"deadline": -1.0},
    {"round": 2**32 - 1},
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
async def test_no_word_of_a_coordinator_that_cannot_be_is_used_by_the_relay(
    tmp_path: Path, credentials: Path, hostile: dict[str, Any]
) -> None:
    """Neither for names of files nor for clocks; the silo hears it as it came, and refuses it itself."""
    region = Region(tmp_path / "state", credentials, RegionalTable(least_silos=1))
    victims = [region.folder / f"victim.{kind}" for kind in ("json", "safetensors", "partial")]
    for victim in victims:
        victim.write_text("precious")
    before = files_in(tmp_path)
    region.order(NAMES[0], **hostile)
    assert region.work[NAMES[0]].step.job == hostile.get("job", "job")
    over = agent_pb2.Withdraw(step=common_pb2.Step(job=hostile.get("job", "job")))
    said = relay_pb2.SaidToSilo(silo=NAMES[0], message=agent_pb2.ToAgent(withdraw=over))
    region.coordinator.hear(relay_pb2.ToRelay(said=said))
    await asyncio.sleep(0)
    await region.close()
    assert files_in(tmp_path) == before
    assert not region.above.said


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_each_update_counts_once_in_each_round_whoever_is_killed(
    tmp_path_factory: pytest.TempPathFactory, credentials: Path, data: st.DataObject
) -> None:
    """Silos come and go, orders are said again, the relay is killed: the model is that of the members that
    the relay's own statements name, and nobody's update is in a round twice."""

    async def play() -> None:
        region = Region(tmp_path_factory.mktemp("region"), credentials, RegionalTable(least_silos=1))
        region.order(*NAMES)
        steps = 0
        while region.above.weight == 0 or len(region.above.counted) < len(NAMES):
            steps += 1
            name = data.draw(st.sampled_from(NAMES)) if steps < 30 else NAMES[steps % len(NAMES)]
            kinds = ["deliver", "deliver", "deliver", "again", "leave", "restart"]
            match data.draw(st.sampled_from(kinds)) if steps < 30 else "deliver":
                case "again":
                    region.order(name)
                case "leave":
                    silo = region.silos.get(name)
                    if silo is not None and len(region.silos) > 2:
                        region.silos.close(silo)
                        region.sums.left()
                        region.work.pop(name, None)
                case "restart":
                    await region.restart()
                    region.work.clear()
                    region.order(*(each for each in NAMES if each not in region.above.counted))
            if region.silos.get(name) is None and name not in region.above.counted:
                region.order(name)
            region.deliver(name)
            for _ in range(data.draw(st.integers(0, 3)) if steps < 30 else 5):
                await asyncio.sleep(0.002)
            assert steps < 2000
        within = {each["round"]: each for each in region.rounds() if each["round"] < 4}
        assert sorted(within) == [1, 2, 3]
        assert len({(each["round"], each["sum"]) for each in region.rounds() if each["round"] < 4}) == 3
        for number, statement in within.items():
            before = region.began[number]
            vectors = {name: trained(name, number, before) for name in statement["members"]}
            for name, told in statement["members"].items():
                assert told == [blake3(vectors[name].tobytes()).hexdigest(), EXAMPLES[name]]
                assert ACCEPTED in region.receipts[name, number]
            after = before.numpy() + mean(vectors)
            np.testing.assert_allclose(region.began[number + 1].numpy(), after, rtol=1e-5, atol=1e-6)
        moved = region.began[4].numpy() - START.vector.numpy()
        expected = moved + mean({name: trained(name, 4, region.began[4]) for name in NAMES})
        np.testing.assert_allclose(region.above.vector / region.above.weight, expected, rtol=1e-5, atol=1e-6)
        assert sorted(region.above.counted) == sorted(NAMES)
        for header in region.above.headers:
            chain = [model_digest(START), *(each.made for each in header.within)]
            assert [each.model for each in header.within] == chain[:-1]
            assert {each.header.model for each in header.members} == {chain[-1]}
        await region.close()

    asyncio.run(play())


async def test_a_region_of_too_few_or_of_updates_that_are_none_gives_up_and_says_why(
    tmp_path: Path, credentials: Path
) -> None:
    region = Region(tmp_path, credentials, RegionalTable(least_silos=3))
    region.order(*"abc")
    region.deliver("a", np.array([np.nan, 0, 0], np.float32))
    for name in "bc":
        region.deliver(name)
    await until(lambda: len(region.failures()) == 3)
    assert "has the updates of 2 silos, and needs 3" in region.failures()["b"]
    troubles = [each.said.message.trouble for each in region.above.said]
    assert "not finite" in next(each.detail for each in troubles if each.detail)
    rejected = agent_pb2.UploadReceipt.REJECTED
    await until(lambda: region.receipts == {("a", 1): [rejected], ("b", 1): [STALE], ("c", 1): [STALE]})
    # The attempt is over for this region, also after a restart; the next one begins anew.
    await region.restart()
    region.above.said.clear()
    region.order("a")
    assert "needs 3" in region.failures()["a"]
    region.work.clear()
    region.order(*"abc", attempt=2)
    assert {each.step.round for each in region.work.values()} == {1}
    assert not any(each.HasField("region") for each in region.work.values())
    await region.close()


async def test_a_relay_whose_disk_is_full_has_no_round_and_keeps_its_stream(
    tmp_path: Path, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = Region(tmp_path, credentials, RegionalTable(least_silos=2))

    def full(span: RegionSpan) -> None:
        raise ResourceError("the disk is full")

    monkeypatch.setattr(region.spans, "keep", full)
    region.order(*"ab")
    assert "cannot be kept on the relay's disk" in region.failures()["b"]
    assert not region.work
    monkeypatch.undo()
    region.above.said.clear()
    region.order(*"ab", attempt=2)
    monkeypatch.setattr(region.spans, "keep", full)
    region.sums.excused("b", ("job", 1, 2, "train"))
    region.deliver("a")
    await until(lambda: "needs 2" in region.failures().get("a", ""))
    await region.close()


def test_a_model_stays_as_long_as_one_of_two_jobs_needs_it(tmp_path: Path, credentials: Path) -> None:
    folder = SpanFolder(tmp_path / "regional", "east")
    start = credentials / "start.safetensors"
    name = ArtifactName(model_digest(START), start.stat().st_size)
    spans = [RegionSpan(job, 1, 4, 1, name, 9e9) for job in ("first", "second")]
    for span in spans:
        folder.keep(span)
        folder.adopt(span, start)
    folder.forget(spans[0])
    assert not folder.moved(spans[1]).any()
    folder.forget(spans[1])
    assert not list(folder.models.iterdir())


async def test_a_silo_that_fails_is_out_until_it_is_asked_again(tmp_path: Path, credentials: Path) -> None:
    """What it says of the region's round is said of the one that the coordinator asks for; a late update is
    stale, and nothing of a round within the region is handed on."""
    region = Region(tmp_path, credentials, RegionalTable(least_silos=1))
    region.order(*"ab")
    step = region.work["b"].step
    said = agent_pb2.FromAgent(failure=agent_pb2.Failure(step=step, kind="task_error", detail="broken"))
    region.sums.excused("b", (step.job, 1, 1, "train"))
    told = region.regional.upwards("b", said)
    assert told is not None
    assert (told.failure.step.round, step.round) == (4, 1)
    region.deliver("a")
    await until(lambda: ("a", 1) in region.receipts)
    region.listen()
    assert region.work["a"].step.round == 2
    assert region.work["a"].counted.round == 1
    assert region.work["b"].step.round == 1
    assert not region.deliver("b")
    assert region.receipts["b", 1] == [STALE]
    late = agent_pb2.FromAgent(progress=agent_pb2.Progress(step=step, done=1))
    assert region.regional.upwards("b", late) is None
    region.order("b")
    assert region.work["b"].step.round == 2
    withdraw = agent_pb2.Withdraw(step=common_pb2.Step(job="job", round=4, attempt=1, phase="train"))
    assert region.regional.withdrawn("b", withdraw).step.round == 2
    await region.close()


@pytest.mark.parametrize(
    ("policy", "relay", "says"),
    [
        (None, "east", "its relay.toml has no table .regional."),
        (RegionalTable(most_rounds=2), "east", "3 rounds on end .* this relay allows 2"),
        (RegionalTable(submitters=["alice"]), "east", "none of those whose jobs this relay serves so"),
        (RegionalTable(submitters=[""]), "east", "whose job it is is not proven"),
        (RegionalTable(), "east/west", "is behind another one"),
    ],
)
async def test_what_a_relay_does_not_run_is_refused_before_round_1(
    tmp_path: Path, credentials: Path, policy: RegionalTable | None, relay: str, says: str
) -> None:
    region = Region(tmp_path, credentials, policy)
    hello = agent_pb2.FromAgent()
    hello.hello.passage.relay = relay
    region.silos.open(Silo("a", hello))
    region.order("a")
    assert not region.work
    assert re.search(says, region.failures()["a"])
    await region.close()


def instructed(region: Region, name: str) -> Any:
    """The newest order as a silo decodes it: the relay's word, and the round."""
    said: Any = message_of(agent_pb2.ToAgent(instruction=region.work[name]))
    origin = said.region
    word = RegionWord(origin.statement, origin.time, origin.signature) if origin else RegionWord()
    return word, said.step.round


async def test_a_silo_takes_models_of_the_relay_that_it_names_and_of_no_other(
    tmp_path: Path, credentials: Path
) -> None:
    region = Region(tmp_path, credentials, RegionalTable(least_silos=1))
    region.order("a")
    east, west = region.identity.certificate, load_silo_identity(credentials / "west").certificate
    word, round = instructed(region, "a")
    assert check_region(word, JOB, round, east, region.ca, ["east"]) == {}
    region.deliver("a")
    await until(lambda: ("a", 1) in region.receipts)
    region.listen()
    word, round = instructed(region, "a")
    signed = check_region(word, JOB, round, east, region.ca, ["west", "east"])
    assert signed["model"] == region.work["a"].train.model.digest
    flat = JOB.model_copy(update={"regions": type(JOB.regions)()})
    false = replace(word, statement={**word.statement, "model": "9" * 64})
    for said, job, number, shown, trusted, says in (
        (word, JOB, round, east, ["west"], "works with models of the relays west, not of 'east'"),
        (word, JOB, round, west, ["west"], "signature of 'west' under this region is not right"),
        (word, JOB, round, b"", ["east"], "connected to the coordinator itself"),
        (word, JOB, 5, east, ["east"], "begins with the coordinator's model"),
        (RegionWord(), JOB, round, east, ["east"], "has no relay's signature"),
        (word, flat, round, east, ["east"], "has no such rounds"),
        (false, JOB, round, east, ["east"], "not right"),
    ):
        with pytest.raises(IdentityError, match=says):
            check_region(said, job, number, shown, region.ca, trusted)
    await region.close()

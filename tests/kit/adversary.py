"""A coordinator that orders anything in any order, against a running agent, and looks at what that lets out.

It holds three silos of its own and plays their part of secure aggregation, correctly or not: cohorts, models,
numbers, dropouts and repetitions are its caller's. What leaves the agent is looked at as it arrives, beside
the ledger of releases as it is on the disk at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from roundtable.client.agent.secure_attempts import certificate_of
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.core.config import JobConfig
from roundtable.core.errors import RoundtableError
from roundtable.core.identity.credentials import SiloIdentity, load_silo_identity
from roundtable.privacy import SecureRound, subject_of
from roundtable.privacy.secagg import ClientPhase, Ed25519Signer, SecAggClient, SecAggServer
from roundtable.privacy.secagg.custody import Cohort
from roundtable.privacy.secagg.framing import Kind, unseal
from roundtable.proto import agent_pb2, common_pb2

MOLES = ("oak", "pine", "yew")
MOST = 2
SECURE = {"level": "none", "secure_aggregation": True, "clip_norm": 1.0, "public_evaluation": True}
NOISY = {"level": "distributed", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}
PRIVACY: dict[str, dict[str, Any]] = {
    "clear": {},
    "sums": SECURE,
    "sums-2": SECURE,
    "noisy": NOISY,
    "kept": SECURE,
    "kept-noisy": NOISY,
}
BUFFERED = {"round": {"mode": "buffered", "buffer": 4}}
Key = tuple[str, int, int]
Order = tuple[Any, ...]


class Anything:
    """What a silo of the coordinator's remembers of its releases."""

    def mask(self, cohort: Cohort) -> None: ...

    def unmask(self, cohort: Cohort, survivors: Iterable[int]) -> None: ...


@dataclass
class Attempt:
    """One attempt of secure aggregation as the coordinator plays it."""

    step: common_pb2.Step
    round: SecureRound
    server: SecAggServer
    moles: dict[str, SecAggClient]
    taken: set[bytes] = field(default_factory=set)

    def take(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            if message not in self.taken:
                self.taken.add(message)
                with contextlib.suppress(RoundtableError):
                    self.server.receive(message)

    def fold(self, announcement: bytes, body: bytes) -> None:
        if announcement not in self.taken:
            self.taken.add(announcement)
            with contextlib.suppress(RoundtableError):
                self.server.fold(announcement, body)

    def advance(self, lose: str) -> bytes | None:
        """Closes the phase; the message for the silo that is attacked."""
        try:
            if lose:
                self.server.lose(lose, "it is said to have dropped out")
            messages = self.server.advance()
            for name, client in self.moles.items():
                if name in messages and (answer := client.handle(messages[name])) is not None:
                    self.server.receive(answer)
                if client.phase is ClientPhase.READY:
                    own = self.round.encode(np.zeros(self.round.columns, np.float32), 1, 0.5)
                    body = b"".join(bytes(chunk) for chunk in client.masked_chunks(own))
                    self.server.fold(client.masked(), body)
        except RoundtableError:
            return None
        return messages.get("hospital")


class Adversary:
    """Carries orders out, and looks at what leaves the silo."""

    def __init__(self, silo: Any, folder: Path, trust: Path) -> None:
        self.silo = silo
        self.coordinator = silo.coordinator
        self.ledger = silo.config.state / "releases.jsonl"
        self.certificates = {name: certificate_of(folder / name) for name in MOLES}
        self.certificates["hospital"] = certificate_of(trust / "hospital")
        self.identities: dict[str, SiloIdentity] = {name: load_silo_identity(folder / name) for name in MOLES}
        self.keys = {
            name: load_silo_identity(path).key.public_key().public_bytes_raw()
            for name, path in [("hospital", trust / "hospital"), *((n, folder / n) for n in MOLES)]
        }
        self.models = [replace(silo.model, vector=silo.model.vector + by) for by in (0.0, 0.25, 0.5)]
        self.attempts: list[Attempt] = []
        self.of: dict[Key, tuple[int, int]] = {}
        self.sent: list[bytes] = []
        self.adverts: dict[Key, set[bytes]] = defaultdict(set)
        self.bytes_of: dict[Key, set[str]] = defaultdict(set)
        self.left = 0
        self.lines: list[dict[str, Any]] = []
        self.broken: list[str] = []
        self.coordinator.on_message = self._kept(self.heard)
        self.coordinator.on_offer = self._kept(self.offered)

    def _kept(self, look: Callable[[Any], None]) -> Callable[[Any], None]:
        """The look, with what it finds broken kept: within a call it would only end the call."""

        def looked(what: Any) -> None:
            try:
                look(what)
            except (AssertionError, RoundtableError, OSError, ValueError, KeyError) as error:
                self.broken.append(f"{type(error).__name__}: {error} at {what}"[:2000])

        return looked

    # What leaves.

    def entries(self, kind: str, key: Key) -> list[dict[str, Any]]:
        found = self.all_lines()
        return [e for e in found if (e["kind"], e["job"], e["round"], e["attempt"]) == (kind, *key)]

    def all_lines(self) -> list[dict[str, Any]]:
        text = self.ledger.read_text() if self.ledger.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def heard(self, message: agent_pb2.FromAgent) -> None:
        """Called with each message of the agent before anything else happens."""
        kind = message.WhichOneof("message")
        if kind == "reply":
            self.left += 1
            self._replied(_key(message.reply.step), message.reply.payload)
        elif kind == "evaluated":
            self.left += 1
            assert self.entries("evaluation", _key(message.evaluated.step))
        elif kind == "progress" and message.progress.step.job != "clear":
            said = message.progress
            assert np.isnan(said.loss), "the loss of training is told of a job that hides it"
            assert said.activity != "training" or (said.done, said.total) == (0, 0)

    def _replied(self, key: Key, payload: bytes) -> None:
        kind = unseal(payload).kind
        if kind is Kind.ADVERTISE:
            self.adverts[key].add(payload)
            assert len(self.adverts[key]) == 1, "fresh keys for the same attempt"
            assert self.entries("begun", key)
        elif kind is Kind.UNMASK:
            assert self.entries("unmasked", key), "shares are out that the ledger does not tell of"

    def offered(self, header: agent_pb2.UploadHeader) -> None:
        """Called with each header of an upload, or a question about one."""
        self.left += 1
        key, digest = _key(header.step), header.content.digest
        self.bytes_of[key].add(digest)
        assert len(self.bytes_of[key]) == 1, "two updates for one attempt"
        if header.encoding == "masked":
            assert self.entries("masked", key)
        else:
            assert PRIVACY[key[0]] == {}, "an update in the clear of a job that hides it"
            mine = [e for e in self.all_lines() if (e["kind"], e["job"]) == ("update", key[0])]
            assert digest in [e["digest"] for e in mine]

    # What is ordered.

    def job(self, name: str) -> JobConfig:
        table = {"task": "toy", "seed": 3, "rounds": MOST, "evaluation": {"every": 1}}
        cohort = BUFFERED if name.startswith("kept") else {"cohort": {"size": 4}}
        privacy = {"privacy": PRIVACY[name], **cohort} if PRIVACY[name] else {}
        return JobConfig.model_validate({**table, **privacy, "algorithm": {"batch_size": 8}})

    def instruction(
        self, phase: str, job: str, round: int, attempt: int, model: int
    ) -> agent_pb2.Instruction:
        self.silo.job, self.silo.model = self.job(job), self.models[model]
        asked: agent_pb2.Instruction = self.silo.instruction(round, attempt, phase=phase)
        asked.step.job = job
        if asked.HasField("counted"):
            asked.counted.job = job
        return asked

    async def answered(self, send: Callable[[], None]) -> None:
        """Sends, and waits until the agent has said something of it; not every order has an answer."""
        coordinator = self.coordinator

        def count() -> int:
            quiet = ("heartbeat", "accepted", "progress")
            said = [m for m in coordinator.heard if m.WhichOneof("message") not in quiet]
            words = [*said, *(m for m in coordinator.heard if m.accepted.prepared)]
            return len(words) + len(coordinator.statuses) + len(coordinator.receipts)

        before = count()
        send()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await coordinator.until(lambda: count() > before)

    async def train(
        self,
        job: str,
        round: int,
        attempt: int,
        model: int,
        moles: tuple[str, ...],
        prepared: tuple[int, int] | None = None,
        theirs: int | None = None,
    ) -> Attempt | None:
        """Orders the silo to train, or to mask among these moles what it has `prepared`; they train from the
        same model, or from `theirs`."""
        asked = self.instruction("train", job, round, attempt, model)
        if prepared is not None:
            step = common_pb2.Step(job=job, round=prepared[0], attempt=prepared[1], phase="prepare")
            asked.train.prepared.CopyFrom(step)
            self.of[job, round, attempt] = prepared
        if not PRIVACY[job]:
            await self.answered(lambda: self.coordinator.say(instruction=asked))
            return None
        names = ("hospital", *moles)
        asked.train.identities.extend(self.certificates[name] for name in names)
        size = self.models[model].layout.size
        plan = SecureRound.of(self.job(job), size, len(names), round)
        told = asked.train.model.digest
        if theirs is not None:
            told = self.instruction("train", job, round, attempt, theirs).train.model.digest
        session = plan.session(job, round, attempt, subject_of(asked.job_config, told))
        directory = {name: self.keys[name] for name in names}
        played = {
            name: SecAggClient(
                session,
                plan.parameters,
                name,
                Ed25519Signer(self.identities[name].key),
                directory,
                Anything(),
            )
            for name in moles
        }
        made = Attempt(asked.step, plan, SecAggServer(session, plan.parameters, directory), played)
        made.take(client.advertise() for client in played.values())
        self.attempts.append(made)
        await self.answered(lambda: self.coordinator.say(instruction=asked))
        return made

    async def advance(self, attempt: Attempt, lose: str) -> None:
        key = _key(attempt.step)
        heard = [m.reply for m in self.coordinator.heard if m.WhichOneof("message") == "reply"]
        attempt.take(reply.payload for reply in heard if _key(reply.step) == key)
        upload = self.coordinator.uploads.get((*key, "train"))
        if upload is not None:
            attempt.fold(upload.header.announcement, bytes(upload.data))
        if (message := attempt.advance(lose)) is not None:
            self.sent.append(message)
            await self.answered(lambda: self._exchange(attempt.step, message))

    def _exchange(self, step: common_pb2.Step, payload: bytes) -> None:
        secure = common_pb2.Step(job=step.job, round=step.round, attempt=step.attempt, phase="secure")
        asked = agent_pb2.Instruction(
            step=secure, exchange=agent_pb2.Exchange(payload=payload), deadline_seconds=60.0
        )
        self.coordinator.say(instruction=asked)

    async def sum_of(self, made: Attempt | None, lose: str) -> None:
        """All that an attempt can give; `lose` is called dropped out once it has masked."""
        for phase in range(6 if made is not None else 0):
            assert made is not None
            await self.advance(made, lose if phase == 3 else "")

    async def do(self, order: Order) -> None:
        match order:
            case ("train", *rest):
                await self.train(*rest)
            case ("sum", *rest, lose):
                await self.sum_of(await self.train(*rest), lose)
            case ("mask", job, round, attempt, model, moles, prepared, lose, *theirs):
                made = await self.train(job, round, attempt, model, moles, prepared, *theirs)
                await self.sum_of(made, lose)
            case ("evaluate" | "prepare" as phase, job, round, attempt, model):
                asked = self.instruction(phase, job, round, attempt, model)
                await self.answered(lambda: self.coordinator.say(instruction=asked))
            case ("advance", which, lose) if self.attempts:
                await self.advance(self.attempts[which % len(self.attempts)], lose)
            case ("replay", which, where) if self.sent and self.attempts:
                step = self.attempts[where % len(self.attempts)].step
                await self.answered(lambda: self._exchange(step, self.sent[which % len(self.sent)]))
            case ("noise", where, data) if self.attempts:
                await self.answered(
                    lambda: self._exchange(self.attempts[where % len(self.attempts)].step, data)
                )
            case ("withdraw", job, round, attempt, whole, *phase):
                step = common_pb2.Step(job=job)
                if not whole:
                    step = common_pb2.Step(job=job, round=round, attempt=attempt, phase=(*phase, "train")[0])
                self.coordinator.say(withdraw=agent_pb2.Withdraw(step=step, reason="so be it"))

    def check(self) -> None:
        """What all of it came to: no more than the silo's policy allows, and one sum of each round."""
        assert not self.broken
        self.lines = self.all_lines()
        for job in PRIVACY:
            mine = [e for e in self.lines if e["job"] == job]
            updates = {e["digest"] for e in mine if e["kind"] == "update"}
            masked = {(e["round"], e["model"]) for e in mine if e["kind"] == "masked"}
            assert len(updates) + len(masked) <= MOST
            assert len({e["model"] for e in mine if e["kind"] == "evaluation"}) <= MOST
            sums = [(e["round"], e["binding"], e["survivors"]) for e in mine if e["kind"] == "unmasked"]
            assert len({round for round, *_ in sums}) == len(set(sums)), "two sums of one round"
            unmasked = [(job, e["round"], e["attempt"]) for e in mine if e["kind"] == "unmasked"]
            of = [self.of[key] for key in unmasked if key in self.of]
            assert len(of) == len(set(of)), "one kept update in two sums"


def _key(step: common_pb2.Step) -> Key:
    return step.job, step.round, step.attempt


async def carried_out(silo: Any, adversary: Adversary, orders: list[Order]) -> None:
    """All orders; "restart" ends the agent and starts it again from its files."""
    rest = list(orders)
    while rest:
        async with silo.agent(silo.inline()) as running:
            while rest and (order := rest.pop(0)) != ("restart",):
                await adversary.do(order)
            assert not running.done() or running.exception() is None


async def attacked(a_silo: Any, authority: Path, moles: Path, orders: list[Order]) -> Adversary:
    """The adversary after its orders to a fresh silo, with everything looked at."""
    with tempfile.TemporaryDirectory() as folder:
        async with a_silo(Path(folder)) as silo:
            silo.config = replace(silo.config, policy=PolicyTable(rounds=MOST, public_evaluation=True))
            adversary = Adversary(silo, moles, authority)
            await carried_out(silo, adversary, orders)
            adversary.check()
            return adversary

"""Canary rounds at a real coordinator with real agents, and the mistakes that an audit of them must find."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from secure_federation import Federation, GivenTrainer
from service import Operator, model_bytes

from roundtable.core import JobConfig, Layout, Model, open_model
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.privacy_table import OwnNoise
from roundtable.privacy import DistributedDP, compose
from roundtable.privacy.audit.canary_job import CanaryJob, CanaryTraces
from roundtable.privacy.audit.report import AuditReport, report
from roundtable.privacy.example_level import SiloAccount
from roundtable.privacy.mechanisms import central_noise, ftrl
from roundtable.proto import operator_pb2
from roundtable.proto.common_pb2 import Artifact

CONFIDENCE = 1.0 - 1e-6
"""Honest rounds are taken for others once in a million runs."""

# What a silo's training process loads; files beside it (`share`, `late`, `batch`, `once`) say what is wrong.
TASK = """
from pathlib import Path
import numpy as np
from roundtable.client.training import private_training
from roundtable.privacy.audit.canary_task import CanaryTask
from roundtable.privacy.example_level import dp_sgd
from roundtable.privacy.mechanisms import gaussian_mechanism

class T(CanaryTask):
    def __init__(self):
        super().__init__({units}, {free}, {clip_norm}, {examples})

def share():
    return float(Path("share").read_text()) if Path("share").exists() else 1.0

def local(update, clip_norm, noise, source, honest=private_training.local_gaussian):
    return honest(update, clip_norm, noise * share(), source)

def onto(values, deviation, *more, honest=dp_sgd.noise_onto):
    honest(values, deviation * share(), *more)

def late(norm):
    return 1.5 * norm if Path("late").exists() else norm

def clipped(vector, clip_norm, honest=gaussian_mechanism.clip):
    return honest(vector, late(clip_norm))

def choose(model, loss, fetch, examples, size, clip_norm, mode, honest=dp_sgd.choose):
    return honest(model, loss, fetch, examples, size, late(clip_norm), mode)

def mask(source, count, rate, honest=dp_sgd.bernoulli_mask):
    if Path("batch").exists():
        return np.arange(count) < round(count * rate)
    if not Path("once").exists():
        return honest(source, count, rate)
    if not hasattr(source, "kept"):
        source.kept = honest(source, count, rate)
    return source.kept

private_training.local_gaussian, dp_sgd.noise_onto, dp_sgd.bernoulli_mask = local, onto, mask
gaussian_mechanism.clip, dp_sgd.choose = clipped, choose
"""


@dataclass(frozen=True)
class Audited:
    """A coordinator with its silos, which serves canary rounds of one job.

    Accounts hold what faint rounds spend, which takes long to compose with anything: they come last.
    """

    federation: Federation
    canary: CanaryJob

    async def report(self, faint: int) -> AuditReport:
        """The audit of own rounds and of `faint` ones; what is stated is what ledger or silo tell."""
        own, stated = await self.own()
        quiet = await self.faint(faint)
        return report(self.canary, quiet, own, CONFIDENCE, stated, await self.whole())

    async def own(self) -> tuple[CanaryTraces, float]:
        """Rounds under the job's own noise, and the epsilon that is told after the last."""
        traces, record = await self._rounds("t", self.canary.config(self.canary.own_rounds(), 5))
        if "epsilon" in record["charge"]:
            return traces, float(record["charge"]["epsilon"])
        kept = self.federation.folder / "state" / "silo-0" / "privacy" / "example.json"
        entries = SiloAccount.from_json(kept.read_text()).entries
        return traces, compose([entry.charge for entry in entries], self.canary.privacy.delta)

    async def whole(self) -> CanaryTraces | None:
        """Rounds of all their steps under next to no noise, where steps draw batches."""
        rounds = self.canary.step_rounds(CONFIDENCE)
        if not rounds:
            return None
        config = self.canary.config(rounds, 5, faint=True, steps=self.canary.steps)
        return (await self._rounds("faint", config))[0]

    async def faint(self, rounds: int) -> CanaryTraces:
        """Rounds under next to no noise."""
        return (await self._rounds("faint", self.canary.config(rounds, 5, faint=True)))[0]

    async def _rounds(self, task: str, config: JobConfig) -> tuple[CanaryTraces, dict[str, Any]]:
        state = self.canary.task().model().state_dict()
        start = Model(Layout.of(state), torch.zeros(self.canary.dimension))
        job = config.model_copy(update={"task": JobTaskTable(name=task)}).to_json()
        async with self.federation.operator() as operator:
            await self._all_there(operator)
            data = model_bytes(start)
            assert (await operator.put(data)).complete
            model = Artifact(digest=blake3(data).hexdigest(), size=len(data))
            submitted = await operator.stub.SubmitJob(
                operator_pb2.SubmitJobRequest(
                    request_id=secrets.token_hex(8),
                    job_config=job,
                    model=model,
                )
            )
            await operator.watch_until(submitted.id, "finished")
            records = [json.loads(record) for record in (await operator.job(submitted.id)).history]
            models = [await operator.fetch(record["model"]) for record in records]
        assert len(models) == config.rounds
        vectors = [start.vector, *(self._vector(model) for model in models)]
        norms = [self.canary.privacy.clip_norm] * len(models)
        return self.canary.traces(vectors, norms, task == "faint"), records[-1]

    async def _all_there(self, operator: Operator) -> None:
        """Who is there when a job begins is its population."""
        for _ in range(1000):
            status = await operator.stub.Status(operator_pb2.StatusRequest())
            if status.clients_online == self.canary.clients:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{status.clients_online} of {self.canary.clients} silos are there")

    def _vector(self, data: bytes) -> torch.Tensor:
        file = self.federation.folder / "published.safetensors"
        file.write_bytes(data)
        return open_model(file).vector.clone()

    def weaken(self, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on whoever adds the noise adds this share of it."""
        level = self.canary.privacy.level
        (self.federation.folder / "share").write_text(str(share))
        if level == "client":
            honest = central_noise.noise_onto
            monkeypatch.setattr(
                central_noise,
                "noise_onto",
                lambda values, deviation, *more: honest(values, deviation * share, *more),
            )
        elif level == "dp_ftrl":
            normal = ftrl.standard_normal
            monkeypatch.setattr(ftrl, "standard_normal", lambda *given: normal(*given).mul_(share))
        elif level == "distributed":
            sampler = DistributedDP.sampler

            def weak(self: DistributedDP) -> Any:
                less = replace(self)
                less.__dict__["share_variance"] = self.share_variance * round(share**2 * 1024) / 1024
                return sampler(less)

            monkeypatch.setattr(DistributedDP, "sampler", weak)


@asynccontextmanager
async def audited(folder: Path, job: JobConfig, clients: int, free: int) -> AsyncIterator[Audited]:
    """Serves a job over so many silos while the block lasts.

    Silos that hide their own data train in processes of their own. Of the others the update is given: what
    hides it is added elsewhere.
    """
    canary = CanaryJob.of(job, clients, free)
    names = tuple(f"silo-{number}" for number in range(canary.clients))
    tasks = {"t": "t.py:T", "faint": "t.py:T"}
    federation = Federation.make(folder, *names)
    federation.settings = {"keep_every": 1}
    task = canary.task()
    about = {"units": task.units, "free": task.free, "examples": task.examples}
    (folder / "t.py").write_text(TASK.format(**about, clip_norm=canary.privacy.clip_norm))
    async with federation.coordinator():
        if isinstance(canary.privacy, OwnNoise):
            async with federation.agent("silo-0", None, data={"canary": 0}, tasks=tasks):
                yield Audited(federation, canary)
            return
        trainers = {}
        for number, name in enumerate(names):
            update = torch.zeros(canary.dimension)
            update[1 + number] = task.slope
            trainers[name] = GivenTrainer(lambda round, update=update: update)
            trainers[name].gate.set()
        async with federation.agents(trainers, tasks=tasks):
            yield Audited(federation, canary)

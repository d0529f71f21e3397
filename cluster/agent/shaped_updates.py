"""Updates of a `[cluster]` that ranks cannot write as they are sent: they write them plainly, and a process
beside them makes of that what is sent (`client/worker/ranks_update.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from roundtable.client.failures import Role, WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.trainer import StepWork, TrainedUpdate
from roundtable.client.worker.executor import Settings
from roundtable.client.worker.training_process import TrainingProcess
from roundtable.client.worker.worker_trainer import order_of_work
from roundtable.core.algorithms.known_algorithms import BUILTINS
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.config import JobConfig
from roundtable.core.encodings import get_encoding
from roundtable.core.job_tables.transfer_table import TransferTable
from roundtable.core.observability.transfer_figures import Writing

Train = Callable[[StepWork], Awaitable[dict[str, Any]]]

_NEEDS = "no batch_size changes that: give it more memory, or train this job without [cluster]"
_SHAPING = Role("the process that makes of the ranks' update what is sent", _NEEDS, _NEEDS)
_MAY_PASS = ("node_failure", "out_of_memory")
"""What another process may not meet with: it was killed, or there was no room."""


def goes_on(job: JobConfig) -> bool:
    """Whether silos train from weights of their own."""
    kind = BUILTINS.get(job.algorithm.name)
    return kind is not None and kind.goes_on()


def is_shaped(job: JobConfig) -> bool:
    """Whether what ranks write is not yet what is sent."""
    transfer = job.writes
    written = not transfer.automatic and not transfer.foreign and get_encoding(transfer.up).dense_dtype
    return goes_on(job) or written is None or not written or transfer.remembers


def known_to_ranks(work: StepWork) -> StepWork:
    """The work as ranks are asked for it: of a job whose rounds are plain, where updates are shaped."""
    job = work.job
    if not is_shaped(job):
        return work
    changes: dict[str, Any] = {"transfer": TransferTable()}
    if goes_on(job):
        fields = job.algorithm.model_dump(include=set(AlgorithmTable.model_fields), exclude_none=True)
        changes["algorithm"] = AlgorithmTable.model_validate({**fields, "name": "fedavg"})
    plain = job.model_copy(update=changes)
    return replace(work, job=plain, config=plain.to_json(), encoding="")


async def shaped_update(config: AgentConfig, ranks: Settings, work: StepWork, train: Train) -> TrainedUpdate:
    """What `train` gives of the work, shaped where that is needed; `ranks` are settings of theirs.

    WorkFailed as for any training process.
    """
    asked = known_to_ranks(work)
    if asked is work:
        return _trained(await train(work))
    shaping = _Shaping(config, ranks, work)
    begun = asyncio.create_task(shaping.do("begin"))
    try:
        if goes_on(work.job):
            await begun
            asked = replace(asked, model=shaping.begins)
        training = asyncio.ensure_future(train(replace(asked, output=shaping.plain)))
        update = _trained(await _both(begun, training))
        digest, size, writing = (await shaping.do("shape"))["shaped"]
        return replace(update, digest=digest, size=size, writing=Writing.from_plain(writing))
    finally:
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await shaping.close()


async def _both(begun: asyncio.Task[Any], training: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
    """What training gives; it is withdrawn where the other fails."""
    try:
        await asyncio.wait((begun, training), return_when=asyncio.FIRST_EXCEPTION)
        if begun.done():
            begun.result()
        return await training
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)


class _Shaping:
    """The process that shapes one step's update, and its files; another one goes on where it is lost."""

    def __init__(self, config: AgentConfig, ranks: Settings, work: StepWork) -> None:
        assert config.cluster is not None
        self._restarts = config.cluster.restarts
        self._config = config
        memory = config.policy.memory_bytes
        self._settings = {**asdict(ranks), "device": "cpu", "gpu_memory": None, "memory": memory}
        self._trouble = work.trouble
        # A restart of the agent removes what lies beside the updates that it knows.
        self.plain, self.begins = (_beside(work.output, end) for end in ("ranks", "begins"))
        self._order = replace(order_of_work(work), plain=str(self.plain), begins=str(self.begins))
        self._child: TrainingProcess | None = None

    async def do(self, verb: str) -> dict[str, Any]:
        """The process's answer; WorkFailed where it fails, or is lost more often than `restarts`."""
        left = self._restarts
        while True:
            if self._child is None:
                self._child = await TrainingProcess.spawn(self._config, self._settings, _SHAPING)
            try:
                return await self._child.do(verb, self._order, lambda *seen: None, self._trouble)
            except WorkFailed as failed:
                await self._end()
                if failed.kind not in _MAY_PASS or not left:
                    raise
                left -= 1
                self._trouble(
                    failed.kind, failed.detail, "another process does it; the ranks' work is not lost"
                )

    async def close(self) -> None:
        """Ends the process, and removes its files."""
        await self._end()
        await asyncio.to_thread(self._remove)

    async def _end(self) -> None:
        if self._child is not None:
            await self._child.end()
            self._child = None

    def _remove(self) -> None:
        for path in (self.plain, self.begins):
            for each in (path, *path.parent.glob(f".{path.name}.*"), *path.parent.glob(f"{path.name}.*")):
                each.unlink(missing_ok=True)


def _beside(output: Path, end: str) -> Path:
    return output.with_name(f"{output.name}.{end}")


def _trained(answer: dict[str, Any]) -> TrainedUpdate:
    update = answer["trained"]
    metrics = {name: (value, count) for name, (value, count) in update["metrics"].items()}
    return TrainedUpdate(update["digest"], update["size"], update["examples"], metrics)

"""Updates of a `[cluster]` that ranks cannot write as they are sent: they write them plainly, and a process
beside them makes of that what is sent (`client/worker/ranks_update.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

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

    The process starts while ranks train. WorkFailed as for any training process.
    """
    asked = known_to_ranks(work)
    if asked is work:
        return _trained(await train(work))
    memory = config.policy.memory_bytes
    settings = {**asdict(ranks), "device": "cpu", "gpu_memory": None, "memory": memory}
    plain, begins = (work.output.with_name(f"{work.output.name}.{end}") for end in ("ranks", "begins"))
    order = replace(order_of_work(work), plain=str(plain), begins=str(begins))
    child = await TrainingProcess.spawn(config, settings)
    try:
        await child.do("begin", order, lambda *seen: None, work.trouble)
        model = begins if goes_on(work.job) else work.model
        update = _trained(await train(replace(asked, model=model, output=plain)))
        answer = await child.do("shape", order, lambda *seen: None, work.trouble)
        digest, size, writing = answer["shaped"]
        return replace(update, digest=digest, size=size, writing=Writing.from_plain(writing))
    finally:
        await child.end()
        for path in (plain, begins):
            await asyncio.to_thread(path.unlink, missing_ok=True)


def _trained(answer: dict[str, Any]) -> TrainedUpdate:
    update = answer["trained"]
    metrics = {name: (value, count) for name, (value, count) in update["metrics"].items()}
    return TrainedUpdate(update["digest"], update["size"], update["examples"], metrics)

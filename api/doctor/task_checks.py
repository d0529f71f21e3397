"""Whether each task of a silo would train here: tried in the process that rounds use, and what it needs."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from shlex import quote

from roundtable.client.agent.state_lock import locked
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.worker.rehearsal import ACTS, BATCHES, Rehearsed
from roundtable.client.worker.rehearsals import Rehearsal, jobs_to_rehearse, rehearse_task
from roundtable.client.worker.torch_devices import choose_device
from roundtable.client.worker.worker_trainer import WorkerTrainer
from roundtable.core.config import JobConfig
from roundtable.core.errors import ResourceError
from roundtable.core.identity.credentials import load_credentials
from roundtable.core.machine.process_facts import free_memory
from roundtable.doctor.inquiries import Check, Inquiry, known
from roundtable.doctor.machine_checks import standing

_MIB = 1 << 20
_CACHED_BESIDES = 3
"""Vectors on disk beside cached models: one on its way in, an update, and what masking writes."""


def trials(config: AgentConfig, skip: bool) -> Iterator[Inquiry]:
    """One inquiry for each task. Nothing of what it computes is printed, kept or sent."""
    try:
        reason, jobs = _why_not(config, skip), jobs_to_rehearse(config)
    except ResourceError as error:
        yield known(Check("rehearsal", "warn", f"not tried: {error}", "`roundtable client jobs`"))
        return
    if reason:
        yield known(Check("rehearsal", "ok", f"not tried: {reason}"))
        return
    for name, job in jobs.items():
        yield Inquiry(
            "rehearsal",
            partial(_try, config, name, job),
            f"training task {name} on one batch",
            # The bound of the trial itself comes first.
            seconds=config.rehearsal + 60,
        )


def _why_not(config: AgentConfig, skip: bool) -> str:
    if skip:
        return "--no-rehearsal"
    if config.rehearsal == 0:
        return "[limits] rehearsal = 0"
    if config.cluster is not None:
        return "ranks train here, which `roundtable client verify-cluster` tries"
    if choose_device(config.device).type == "cpu" or not config.state.exists():
        return ""
    try:
        with locked(config.state):
            return ""
    except ResourceError:
        return "the agent runs here now and has the GPU; its log says how each task did at its start"


def _try(config: AgentConfig, name: str, job: JobConfig) -> Iterator[Check]:
    silo = load_credentials(config.credentials).name
    trainer = WorkerTrainer(config, silo, config.state / "jobs")
    rehearsal = asyncio.run(rehearse_task(config, trainer, name, job))
    if rehearsal.failure is not None:
        yield _failed(config, name, job, rehearsal, rehearsal.failure)
    elif rehearsal.lacking:
        yield _waiting(config, name, rehearsal)
    elif rehearsal.found is not None:
        found = rehearsal.found
        evaluated = "one evaluated" if found.evaluated else "none evaluated, as its job allows no evaluation"
        yield Check("rehearsal", "ok", f"{name}: a batch of {found.batch_size} trained on, {evaluated}")
        yield _memory(config, name, found)
        yield _disk(config, name, found)


def _waiting(config: AgentConfig, name: str, rehearsal: Rehearsal) -> Check:
    table = config.task_tables.get(name)
    allowed = table.parameters if table else []
    message = f"{name}: not tried: {rehearsal.wants}"
    if not set(rehearsal.lacking) - set(allowed):
        return Check("rehearsal", "ok", message)
    needed = json.dumps([*allowed, *(each for each in rehearsal.lacking if each not in allowed)])
    message += ", and this silo lets jobs say none or not all of them, so none can run"
    return Check("rehearsal", "warn", message, f"`parameters = {needed}` below [tasks.{name}]")


def _failed(config: AgentConfig, name: str, job: JobConfig, tried: Rehearsal, failure: WorkFailed) -> Check:
    said = (failure.trace.strip().splitlines() or [""])[-1].strip()
    detail = f"{failure.detail}; {said}" if said and said not in failure.detail else failure.detail
    message = f"{name}: the silo cannot {tried.act}: {detail}"
    if failure.kind == "out_of_memory" and tried.act in BATCHES:
        parts = f"rounds would take batches of {job.algorithm.batch_size} in parts, where the job allows it"
        return Check(
            "rehearsal", "warn", f"{message}; {parts}", "raise [policy] max_memory or max_gpu_memory"
        )
    return Check("rehearsal", "fail", message, _remedy(config, name, tried.act))


def _remedy(config: AgentConfig, name: str, act: str) -> str:
    reference = config.tasks[name]
    place = reference.partition(":")[0]
    if act == ACTS[0]:
        script = quote(place) if place.endswith(".py") else f"-c 'import {place}'"
        return f"`cd {quote(str(config.folder))} && {sys.executable} {script}` shows the whole error"
    if act == ACTS[2]:
        return (
            f"mend [data] of agent.toml or data() of {reference}; `ls -l` what it names, as the agent's user"
        )
    return f"mend {reference}; `roundtable client doctor` tries it again"


def _memory(config: AgentConfig, name: str, found: Rehearsed) -> Check:
    """The process's most, and what the agent itself holds beside it to mask and send an update."""
    wanted = found.memory + 3 * 4 * found.values
    limit, free = config.policy.memory_bytes, free_memory()
    message = f"{name}: training held {found.memory / _MIB:,.0f} MiB"
    if found.gpu_memory:
        message += f" and {found.gpu_memory / _MIB:,.0f} MiB of the GPU"
    message += f", a round wants {wanted / _MIB:,.0f} MiB"
    if limit is not None and found.memory > 0.8 * limit:
        message += f", and [policy] max_memory allows training {limit / _MIB:,.0f} MiB"
        return Check("memory", "warn", message, "raise [policy] max_memory, or ask for a smaller batch_size")
    if free is None:
        return Check("memory", "ok", message)
    message += f"; {free / _MIB:,.0f} MiB are free"
    if wanted > free:
        return Check("memory", "fail", message, "`ps aux --sort -rss | head` shows what holds it")
    return Check("memory", "ok", message)


def _disk(config: AgentConfig, name: str, found: Rehearsed) -> Check:
    size, place = 4 * found.values, standing(config.state)
    count = config.cached_models + _CACHED_BESIDES
    free = shutil.disk_usage(place).free
    message = (
        f"{name}: the model has {size / _MIB:,.1f} MiB, the state folder wants room for {count} such; "
        f"{free / _MIB:,.0f} MiB are free at {place}"
    )
    if count * size > free:
        du = f"`du -xh {quote(str(place))} | sort -h | tail` shows what takes it"
        return Check("disk", "fail", message, f"{du}; or lower [limits] cached_models")
    return Check("disk", "ok", message)

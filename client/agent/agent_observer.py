"""What an agent counts, times and traces while it answers steps, shown by its page of metrics."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from roundtable.client.agent.installation import CloneMemory
from roundtable.client.door.incoming import Receipt
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import Figures
from roundtable.client.worker.own_budgets import OwnBudgets
from roundtable.core.errors import RoundtableError
from roundtable.core.identity.lifetimes import Lifetimes
from roundtable.core.observability.histograms import ProcessMetrics
from roundtable.core.observability.logs import belongs_to
from roundtable.core.observability.monitoring import STEP_GAUGES, Families, Interval
from roundtable.core.observability.tracing import Span, Tracer
from roundtable.proto.pieces import traffic

_log = logging.getLogger("roundtable.agent")
_STEPS_KEPT = 256
_GPU_SECONDS = 10.0
_GPU_QUERY = ("utilization.gpu", "memory.used", "memory.total", "temperature.gpu")


@dataclass
class _Doing:
    activity: str
    since: float
    began: float


class AgentObserver:
    """Collects counts, times and traces for the life of an agent. `silo` is the agent's name."""

    def __init__(self, silo: str, tracer: Tracer | None = None) -> None:
        self.silo = silo
        self.tally = ProcessMetrics()
        self._tracer = tracer or Tracer(silo)
        self.figures: dict[str, float] = {}
        self.rehearsed: dict[str, bool] = {}
        self._doing: dict[StepKey, _Doing] = {}

    def task(self, work: Coroutine[Any, Any, None], step: StepKey) -> asyncio.Task[None]:
        """Starts a task for work on a step, whose log lines carry the step."""
        context = copy_context()
        context.run(belongs_to, lambda: {**step._asdict(), "silo": self.silo})
        return asyncio.create_task(work, name=step.slug, context=context)

    def doing(self, step: StepKey, activity: str) -> None:
        """Notes the step's activity: download, train, evaluate or upload."""
        now, known = time.time(), self._doing.get(step)
        if known is None:
            self._doing[step] = _Doing(activity, now, now)
            if len(self._doing) > _STEPS_KEPT:
                del self._doing[next(iter(self._doing))]
        elif known.activity != activity:
            self._tell(step, known, now)
            known.activity, known.since = activity, now

    def stepped(self, loss: float, figures: Figures) -> None:
        """Notes the figures of a training step."""
        self.figures = {"loss": loss, **figures}

    def ended(self, step: StepKey, outcome: str, error: str = "") -> None:
        """Notes the end of a step: `outcome` is done, a failure's kind, or the receipt of an upload."""
        self.tally.count("steps", step.phase, outcome)
        known, now = self._doing.pop(step, None), time.time()
        if known is not None:
            self._tell(step, known, now)
            span = Span(*step[:3], (step.phase, self.silo), known.began, now, error, {"silo": self.silo})
            self._tracer.tell(span)

    def receipt(self, step: StepKey, receipt: Receipt) -> None:
        """Notes the receipt of an update."""
        self.tally.count("updates", receipt.status)
        self.ended(step, receipt.status, receipt.reason if receipt.status == "rejected" else "")

    def close(self) -> None:
        """Exports the spans that wait."""
        self._tracer.close()

    def _tell(self, step: StepKey, known: _Doing, now: float) -> None:
        self.tally.took("activity", known.activity, now - known.since)
        path = (step.phase, self.silo, known.activity)
        self._tracer.tell(Span(*step[:3], path, known.since, now, "", {"silo": self.silo}))


class AgentPage:
    """The agent's page of metrics; `connected` and `spooled` are asked for at each request."""

    def __init__(
        self,
        state: Path,
        certificates: Lifetimes,
        observer: AgentObserver,
        connected: Callable[[], bool],
        spooled: Callable[[], int],
        clones: CloneMemory,
        budgets: OwnBudgets,
    ) -> None:
        self._state = state
        self._certificates = certificates
        self._observer = observer
        self._connected = connected
        self._spooled = spooled
        self._clones = clones
        self._budgets = budgets
        self._interval = Interval(_GPU_SECONDS)
        self._gpus: list[tuple[str, list[float]]] = []

    async def ready(self) -> tuple[bool, str]:
        """Whether the agent is connected: without its coordinator it can do nothing."""
        if not self._connected():
            return False, "not connected; the log says why"
        failed = [task for task, passed in self._observer.rehearsed.items() if not passed]
        return True, f"connected; failed when tried: {', '.join(failed)}" if failed else "connected"

    async def figures(self) -> list[Metric]:
        page, tally = Families(), self._observer.tally
        page.process(tally, *traffic.both())
        page.surroundings({"state": self._state}, self._certificates.now())
        page.gauge("roundtable_agent_connected", "1 with a connection", {(): float(self._connected())})
        failing = {(): float(list(self._observer.rehearsed.values()).count(False))}
        text = "tasks that failed when they were tried at the agent's start; the log says which and why"
        page.gauge("roundtable_agent_tasks_failing", text, failing)
        clone = self._clones.newest()
        text = "when somebody else came last with this silo's certificate; 0 for never with its present keys"
        seen = {(): clone.time if clone else 0.0}
        page.gauge("roundtable_agent_clone_seen_timestamp_seconds", text, seen)
        await self._privacy(page)
        queue = {("updates",): float(self._spooled())}
        page.gauge("roundtable_queue_length", "finished updates that wait for delivery", queue, ("queue",))
        for name, text, labels in (
            ("steps", "steps that were answered, by outcome", ("phase", "outcome")),
            ("updates", "uploads by how they were answered", ("result",)),
            ("connections", "connections that were made", ()),
        ):
            counts = {key: float(count) for key, count in tally.of(name).items()}
            page.counter(f"roundtable_agent_{name}", text, counts, labels)
        text = "how long downloads, training, evaluations and uploads took"
        spreads = tally.spreads_of("activity")
        page.histogram("roundtable_agent_activity_seconds", text, spreads, "activity")
        newest = self._observer.figures
        for name, text in STEP_GAUGES.items():
            page.gauge(f"roundtable_agent_step_{name}", text, {(): newest[name]} if name in newest else {})
        await self._gpu(page)
        return page.made

    async def _privacy(self, page: Families) -> None:
        """Absent where the silo's files cannot be read, as the log says: then nothing can be charged."""
        try:
            budgets = await asyncio.to_thread(self._budgets.now)
        except RoundtableError as error:
            _log.error("what is left of the silo's own epsilon cannot be shown: %s", error)
            return
        for name, text in (
            ("budget", "the most that the silo's policy allows over all jobs; infinite where it sets none"),
            ("left", "what of it is not spent, by the silo's own account, or by what jobs state"),
        ):
            values = {(b.account,): b.epsilon if name == "budget" else b.left for b in budgets}
            page.gauge(f"roundtable_agent_privacy_epsilon_{name}", text, values, ("account",))

    async def _gpu(self, page: Families) -> None:
        if self._interval.due():
            self._gpus = await gpus()
        for place, name, text, factor in (
            (0, "utilization_ratio", "share of time in which the GPU was busy", 0.01),
            (1, "memory_used_bytes", "GPU memory in use, by all processes", 1 << 20),
            (2, "memory_size_bytes", "GPU memory in all", 1 << 20),
            (3, "temperature_celsius", "the GPU's temperature", 1.0),
        ):
            by_gpu = {(gpu,): values[place] * factor for gpu, values in self._gpus}
            page.gauge(f"roundtable_gpu_{name}", text, by_gpu, ("gpu",))


async def gpus() -> list[tuple[str, list[float]]]:
    """(index, values of `_GPU_QUERY`) of each NVIDIA GPU as its driver says; none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ("--query-gpu=index," + ",".join(_GPU_QUERY), "--format=csv,noheader,nounits")
    process = await asyncio.create_subprocess_exec(
        program, *query, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _GPU_SECONDS)
    except TimeoutError:
        process.kill()
        return []
    return list(_readable(output.decode()))


def _readable(text: str) -> list[tuple[str, list[float]]]:
    readable = []
    for line in text.splitlines():
        index, *values = [part.strip() for part in line.split(",")]
        try:
            readable.append((index, [float(value) for value in values]))
        except ValueError:
            # "[N/A]": a driver that does not tell.
            continue
    return [(index, values) for index, values in readable if len(values) == len(_GPU_QUERY)]

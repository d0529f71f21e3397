"""The agent's trainer for a silo with `[cluster]`: a group of ranks, kept warm from round to round."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from roundtable.client.durable_files import write_file
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.config import AgentConfig
from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, its_turn
from roundtable.client.training.metrics import Metrics
from roundtable.client.worker.executor import Settings
from roundtable.client.worker.own_model import forget_unused
from roundtable.client.worker.worker_trainer import order_of_work
from roundtable.cluster.agent.device_probe import computes
from roundtable.cluster.agent.failed_ranks import (
    Course,
    RanksLost,
    RanksUnanswered,
    advise,
    cause_of,
    done_after,
    figures_of,
    given_up,
    refused,
)
from roundtable.cluster.agent.launcher import Launcher
from roundtable.cluster.agent.node_starts import NodeStarts
from roundtable.cluster.agent.preflight import check_interface
from roundtable.cluster.agent.rank_group import RankGroup
from roundtable.cluster.agent.replica_groups import AllLost, ReplicaGroups
from roundtable.cluster.agent.replica_starts import ReplicaStarts
from roundtable.cluster.agent.shaped_updates import known_to_ranks, shaped_update
from roundtable.cluster.agent.step_tracking import StepTracking
from roundtable.cluster.plan.resources import Resources, allowed_resources
from roundtable.cluster.train.checkpoint_places import mirrors, remove_checkpoints
from roundtable.cluster.train.fellow_replicas import PLACES
from roundtable.cluster.train.group_plan import left_plan
from roundtable.cluster.train.orders import SOCKET, Advice, Report, take_reports
from roundtable.cluster.train.rank import SETTINGS

_log = logging.getLogger("roundtable.agent")
_STOP_SECONDS = 5.0
_START_SECONDS = 300.0
_LINE_LIMIT = 16 << 20


class ClusterTrainer:
    """Gives orders to rank 0; where a rank dies the whole group is started again, and goes on."""

    def __init__(
        self, config: AgentConfig, client: str, jobs: Path, find: Callable[[], Resources] | None = None
    ) -> None:
        """`find` returns the silo's present resources; by default those of this machine."""
        assert config.cluster is not None
        table = config.cluster
        self._find = find or (lambda: allowed_resources(table, config.policy))
        self._config = config
        self._table = config.cluster
        self._folder = config.state / "cluster"
        self._settings = Settings(
            client=client,
            folder=str(config.folder),
            jobs=str(jobs),
            device=config.device,
            threads=config.threads or 1,
            data=dict(config.data),
            epsilon=config.policy.epsilon,
            delta=config.policy.delta,
            gpu_memory=config.policy.gpu_memory_bytes,
            data_of={each.use: each.data for each in config.task_tables.values() if each.data is not None},
        )
        self._turn = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self.launcher = Launcher(config.folder, self._folder, table)
        self._group: RankGroup | None = None
        self._callers: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._line: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._number = 0
        self._job = ""
        self._course = Course("train")
        self.steps: list[dict[str, Any]] = []
        self.launches = 0
        self._devices: list[int] = []
        self._releasing: set[asyncio.Task[None]] = set()
        self._nodes: NodeStarts | None = None
        if table.pool is not None:
            self._nodes = NodeStarts(table.pool, table.nodes, lambda: self._called_by_ranks)
        self._tracking = StepTracking(table.tracking, config.state)
        self.groups: ReplicaGroups | None = None
        if table.elastic == "replica":
            starts = ReplicaStarts(config, self._folder, self.launcher, self._find, self._leave_settings)
            self.groups = starts.groups

    async def start(self) -> None:
        """Listens for rank 0; the ranks start with the first order, when there is a job to plan for."""
        check_interface(self._table.interface)
        self._tracking.check()
        # What cannot be used is said now, and not in the middle of a round.
        mirrors(self._table, "")
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._table.launch == "external":
            self._leave_settings(await asyncio.to_thread(self._find))
        path = self._folder / SOCKET
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._called, str(path), limit=_LINE_LIMIT)
        path.chmod(0o600)
        if self._nodes is not None:
            self._nodes.start()

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        """See Trainer."""
        seen = self._tracking.heard(work, progress, partial(left_plan, self._folder))
        asked = partial(self._do, "train", progress=seen)
        async with self._at_work(work):
            return await shaped_update(self._config, self._settings, work, asked)

    async def check(self, work: StepWork) -> None:
        """See Trainer. Nodes of a pool do not come for it: round 1 may not need this silo."""
        if self._nodes is None:
            async with self._at_work(work):
                await self._do("check", known_to_ranks(work), lambda *seen: None)

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        """See Trainer."""
        async with self._at_work(work):
            sums = (await self._do("evaluate", known_to_ranks(work), progress))["evaluated"]
        return {name: (value, count) for name, (value, count) in sums.items()}

    def release(self, job: str, *, met: bool) -> None:
        """See Trainer: ends the ranks of the job, which frees their devices, and removes what it kept."""
        releasing = asyncio.create_task(self._release(job))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, job: str) -> None:
        async with self._turn:
            self._tracking.close(job)
            if job == self._job:
                if self._table.launch == "torchrun":
                    await self._end()
                self._job = ""
            await asyncio.to_thread(remove_checkpoints, self._folder, self._table, job)
            await asyncio.to_thread(forget_unused, Path(self._settings.jobs), job)

    async def close(self) -> None:
        """See Trainer."""
        await asyncio.gather(*self._releasing)
        self._tracking.close()
        if self._nodes is not None:
            await self._nodes.close()
        await self._end()
        await self.launcher.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    @asynccontextmanager
    async def _at_work(self, work: StepWork) -> AsyncIterator[None]:
        """One step after the other, until nothing of it writes any more; the nodes are wanted before."""
        wanted = nullcontext() if self._nodes is None else self._nodes.wanted()
        async with wanted, its_turn(self._turn, work):
            yield

    async def _do(self, verb: str, work: StepWork, progress: ProgressListener) -> dict[str, Any]:
        if work.step.job != self._job:
            await self._new_job(work.step.job)
        if verb == "train":
            await self._follow_devices()
        failures: list[Report] = []
        external = self._table.launch == "external"
        if external and self._line is None:
            take_reports(self._folder)
        for attempt in range(self._table.restarts + 1):
            try:
                return await self._ask(verb, work, progress)
            except AllLost as lost:
                report = Report(-1, "node_failure", str(lost), "", at=0.0)
                failures.append(self._course.placed(report))
                await self._end()
            except WorkFailed:
                await self._end()
                raise
            except RanksLost as lost:
                failures.append(await self._learn(lost, attempt))
                if attempt < self._table.restarts:
                    done = done_after(failures[-1], external=external)
                    work.trouble(failures[-1].kind, failures[-1].detail, done)
        raise given_up(failures)

    async def _new_job(self, job: str) -> None:
        if self._table.launch == "torchrun":
            await self._end()
        self._job = job
        Advice().write(self._folder)
        take_reports(self._folder)

    async def _ask(self, verb: str, work: StepWork, progress: ProgressListener) -> dict[str, Any]:
        """Gives one order to the group, starting it where it does not run, and waits for the result."""
        self._course = Course(verb)
        if self.groups is not None:
            return await self._ask_replicas(self.groups, verb, work, progress)
        reader, writer = await self._ranks(work)
        self._course.connected = True
        self._number += 1
        self._write(writer, {"do": verb, "number": self._number, "order": asdict(order_of_work(work))})
        try:
            return await self._answer(reader, self._number, progress)
        except asyncio.CancelledError:
            await asyncio.shield(self._withdraw(reader, writer))
            raise

    async def _ask_replicas(
        self, groups: ReplicaGroups, verb: str, work: StepWork, progress: ProgressListener
    ) -> dict[str, Any]:
        self._number += 1
        command = {"do": verb, "number": self._number, "order": asdict(order_of_work(work))}
        if verb != "train":
            return await groups.evaluate(command)
        # Names of meetings begin anew with the agent.
        await asyncio.to_thread(shutil.rmtree, self._folder / PLACES, ignore_errors=True)
        return await groups.train(
            command,
            self._table.restarts,
            lambda step: self._note(step, progress),
            lambda why, done: work.trouble("node_failure", why, done),
        )

    async def _answer(
        self, reader: asyncio.StreamReader, number: int, progress: ProgressListener
    ) -> dict[str, Any]:
        # A collective that hangs ends within the timeout; silence for twice that is a hang of another kind.
        steady = 2 * self._table.timeout + _STOP_SECONDS
        # Before the first word the ranks trace the model, plan and load, which has no steps to tell of.
        patience = max(steady, _START_SECONDS)
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), patience)
            except TimeoutError:
                raise RanksUnanswered(f"no rank sent anything for {patience:.0f} s") from None
            except ConnectionError as error:
                raise RanksLost("rank 0 is gone") from error
            if not line:
                raise RanksLost("rank 0 is gone")
            patience = steady
            message: dict[str, Any] = json.loads(line)
            if "step" in message:
                self._note(message["step"], progress)
            elif message["number"] == number:
                return message

    def _note(self, step: dict[str, Any], progress: ProgressListener) -> None:
        self._course.hears(step["step"], step["steps"])
        self.steps.append(step)
        del self.steps[:-1000]
        loss = step["loss"]
        seen = step["examples"] * step["step"]
        progress(seen, step["examples"] * step["steps"], math.nan if loss is None else loss, figures_of(step))
        _log.debug("cluster: %s", step)

    @property
    def _called_by_ranks(self) -> bool:
        """Whether rank 0 is on the line, or has called."""
        return not self._callers.empty() or (self._line is not None and not self._line[0].at_eof())

    async def _ranks(self, work: StepWork) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Rank 0's line; with a pool of nodes it is waited for as long as these may take."""
        if self._nodes is None:
            return await self._connected()
        if not self._called_by_ranks:
            await self._hang_up()
        async with self._nodes.coming(work):
            return await self._connected(self._nodes.patience)

    async def _connected(
        self, patience: float = _START_SECONDS
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._line is not None:
            return self._line
        if self._group is None and self._table.launch == "torchrun":
            self._group = await self._launch()
        self._line = await self._accept(patience)
        return self._line

    async def _accept(self, patience: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Waits for rank 0 to connect; raises RanksLost where they end first."""
        connecting = asyncio.create_task(self._callers.get())
        waiting = {connecting}
        if self._group is not None:
            waiting.add(asyncio.create_task(self._group.ended()))  # type: ignore[arg-type]
        else:
            waiting.add(asyncio.create_task(refused(self._folder)))  # type: ignore[arg-type]
        done, pending = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if connecting in done:
            return connecting.result()
        if done:
            raise RanksLost(f"the ranks could not start: {self._group.last_failure() if self._group else ''}")
        raise RanksUnanswered(f"no rank connected within {patience:.0f} s")

    async def _follow_devices(self) -> None:
        """Ends the ranks where the usable devices have changed; the next order starts them on the new."""
        if self._group is None and self.groups is None:
            return
        resources = await asyncio.to_thread(self._find)
        advice = Advice.read(self._folder)
        back = [one for one in advice.to_probe() if await computes(resources.device, one)]
        if back:
            advice.take_back(back)
            advice.write(self._folder)
        devices = advice.usable(resources.devices)
        if self.groups is None and devices and devices != self._devices:
            _log.info("cluster: %d devices in the place of %d", len(devices), len(self._devices))
            await self._end()

    async def _launch(self) -> RankGroup:
        resources = await asyncio.to_thread(self._find)
        devices = Advice.read(self._folder).usable(resources.devices)
        if not devices:
            raise WorkFailed("gpu_error", "every device of this silo has failed")
        here = replace(resources, devices=len(devices))
        self._leave_settings(here)
        self.launches += 1
        self._devices = devices
        return await self.launcher.start(here, devices)

    def _leave_settings(self, resources: Resources) -> None:
        """Writes the settings that every rank reads when it starts."""
        values = {
            "settings": asdict(self._settings),
            "cluster": self._table.model_dump(mode="json"),
            "resources": asdict(resources),
            "device": resources.device,
        }
        write_file(self._folder / SETTINGS, [json.dumps(values).encode()])

    async def _learn(self, lost: RanksLost, attempt: int) -> Report:
        """Reads the reports of a failure and advises the next start; WorkFailed where none would help."""
        await self._hang_up()
        if (group := self._group) is not None:
            if not isinstance(lost, RanksUnanswered):
                await group.settled()  # The other ranks may be about to say what they know of it.
            await self._end()
        reports = take_reports(self._folder)
        first = self._course.placed(cause_of(reports, group, lost, self._table.timeout))
        _log.warning("cluster: attempt %d failed: %s", attempt + 1, first.detail)
        external = self._table.launch == "external"
        try:
            advise(self._folder, first, [] if external else self._devices)
        except WorkFailed:
            await self._end()
            raise
        if first.kind == "gpu_error" and external:
            _log.warning("cluster: take the device of rank %d out at the scheduler", first.rank)
        return first

    async def _withdraw(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._write(writer, {"do": "stop", "number": self._number})
        try:
            await asyncio.wait_for(self._answer(reader, self._number, lambda *seen: None), _STOP_SECONDS)
        except (RanksLost, TimeoutError):
            await self._end()

    async def _hang_up(self) -> None:
        if self._line is not None:
            self._line[1].close()
            self._line = None

    async def _end(self) -> None:
        await self._hang_up()
        if self.groups is not None:
            await self.groups.end()
        if self._group is not None:
            await self._group.end()
            self._group = None
        while not self._callers.empty():
            self._callers.get_nowait()[1].close()

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.groups is not None:
            await self.groups.called(reader, writer)
        else:
            await self._callers.put((reader, writer))

    def _write(self, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")

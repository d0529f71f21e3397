"""The coordinator as a process: what it opens, in which order, and how it stops."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

from roundtable.aggregation.shards.named_workers import shard_workers
from roundtable.core.allocator import settle_imports, tune_for_transfers
from roundtable.core.errors import IdentityError, StorageError
from roundtable.core.identity.credentials import Credentials, load_credentials
from roundtable.core.machine.possible import must_be_possible
from roundtable.core.machine.stop_signals import on_signals
from roundtable.core.observability.log_levels import Verbosity
from roundtable.core.observability.logs import announce
from roundtable.core.observability.monitoring import monitored
from roundtable.core.observability.tracing import Tracer, open_tracer
from roundtable.core.observability.watchdog import keep_watchdog, tell_systemd
from roundtable.server.clock import steady_time, watch_clock
from roundtable.server.config import ServerConfig
from roundtable.server.dashboard import BehindThePage, Dashboard, NoDashboard
from roundtable.server.jobs.admission.elastic import Elastic
from roundtable.server.jobs.job_registry import JobRegistry
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.sessions import Sessions
from roundtable.server.jobs.trusted_training import NoTrustedTraining, TrustedTraining
from roundtable.server.leadership.election import Leadership
from roundtable.server.metrics_page import CoordinatorPage, DatabaseAway
from roundtable.server.open_doors import OpenDoors
from roundtable.server.operations.alerts import Alerts
from roundtable.server.operations.coordinator_observer import CoordinatorObserver
from roundtable.server.operations.lasting_work import LastingWork, lasting
from roundtable.server.operations.measured_lines import MeasuredLines
from roundtable.server.operations.populations import Populations
from roundtable.server.operations.silo_setups import SiloSetups
from roundtable.server.services.job_logs import JobLogs
from roundtable.server.services.secure_port import check_port
from roundtable.server.services.security import Security
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.storage.audit_archiving import AuditArchiving, check_can_archive
from roundtable.server.storage.bucket import Bucket
from roundtable.server.storage.replicas import Replicas
from roundtable.server.storage.retention import Retention, Stay
from roundtable.server.store import AgentRow, Database
from roundtable.server.store.agent_rows import all_clients, seen
from roundtable.server.store.artifacts import Keep, all_digests
from roundtable.server.store.database import DatabaseUnreachable
from roundtable.server.store.group_commit import Gathered, GroupedWrites

log = logging.getLogger("roundtable.server")

TRANSFER_THREADS = 4
STOP_SECONDS = 2.0
SWEEP_SECONDS = 3600.0
DAY_SECONDS = 86400.0
RETURN_SECONDS = 2.0


class Coordinator:
    """The service: opened by `start`, ended by `stop`; everything durable is ready to be started again."""

    def __init__(
        self,
        config: ServerConfig,
        clock: Callable[[], float] = steady_time,
        trusted: TrustedTraining | None = None,
        tracer: Tracer | None = None,
        dashboard: Dashboard | None = None,
    ) -> None:
        self.config = config
        self._dashboard = dashboard or NoDashboard()
        self.clock = clock
        self.trusted = trusted
        self.observer = CoordinatorObserver(tracer or open_tracer(config.traces, "coordinator"), clock)
        self.port = self.operators_port = self.metrics_port = 0
        self.jobs: JobRegistry
        self.security: Security
        self._database: Database
        self.deposed = asyncio.Event()
        self._leadership: Leadership | None = None
        self._bucket: Bucket | None = None
        self._shards = shard_workers(config.combine, config.combine_workers)
        self._doors: OpenDoors | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._open_to_watch = AsyncExitStack()
        self._transfer = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="transfer")
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="aggregate")

    async def start(self) -> None:
        """Opens everything and takes up the jobs that were running; waits while another is active.

        Raises IdentityError, ResourceError, StorageError or ConfigError, before anything is changed,
        for what is missing or wrong.
        """
        credentials = _coordinator_credentials(Path(self.config.credentials))
        check_can_archive(self.config)
        check_port(self.config.listen)
        if self.config.operators:
            check_port(self.config.operators, "operators")
        leadership = self._leadership = Leadership(self.config, credentials)
        self._page = CoordinatorPage(self.config, self.observer, self.clock, lambda: leadership.sight)
        try:
            self.metrics_port = await self._open_to_watch.enter_async_context(
                monitored(self.config.metrics, self._page)
            )
            self._database = await self._leadership.taken()
            await self._open(credentials)
        except BaseException:
            await self.stop()
            raise
        log.info("listening on %s, database %s", self.config.listen, self._database.url)

    @property
    def addresses(self) -> str:
        """Where it listens, for people."""
        told = f"{self.config.listen.rpartition(':')[0]}:{self.port}"
        if not self.operators_port:
            return told
        return f"{told}, for operators on {self.config.operators.rpartition(':')[0]}:{self.operators_port}"

    async def stop(self) -> None:
        """Ends streams, drivers and threads, in this order."""
        await self._open_to_watch.aclose()
        await self._dashboard.close()
        for task in self._tasks:
            task.cancel()
        if self._doors is not None:
            self._sessions.end_all()
            self._doors.end_streams()
            self.jobs.announce_stop()
            await self._doors.stop(STOP_SECONDS)
            await self.jobs.stop()
            await asyncio.gather(*self._background, return_exceptions=True)
            self._doors = None
        if hasattr(self, "security"):
            await self.security.stop()
        self._transfer.shutdown(wait=True)
        self._compute.shutdown(wait=True, cancel_futures=True)
        await asyncio.to_thread(self._shards.close)
        if self._bucket is not None:
            await asyncio.to_thread(self._bucket.close)
        if self._leadership is not None:
            await self._leadership.left()
        await asyncio.to_thread(self.observer.close)

    async def _open(self, credentials: Credentials) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._stay())]
        artifacts = await self._find_artifacts()
        self._sessions = Sessions(time.monotonic, config.heartbeat, self._joined, self._left)
        known = await self._database.read(all_clients)
        self._sessions.disabled = {each.name: each.disabled for each in known if each.disabled}
        self._together = GroupedWrites(self._database)
        self._seen: Gathered[tuple[str, float], None] = Gathered(self._database.write, seen)
        alerts = Alerts(config.alerts)
        keep = Keep(config.keep_models, config.keep_every, config.keep_updates, wanted=config.keep_wanted)
        replicas = Replicas(config.copies, artifacts)
        services = JobServices(
            database=self._database,
            artifacts=artifacts,
            sessions=self._sessions,
            clock=self.clock,
            compute=self._compute,
            writer=secrets.token_hex(8),
            retention=Retention(self._database, artifacts, keep, replicas, Stay.of_days(config.retention)),
            alerts=alerts,
            together=self._together,
            tracking=Path(config.state) / "tracking",
            trusted=self.trusted or NoTrustedTraining(),
            observer=self.observer,
            populations=Populations(config.populations),
            queue=config.queue,
            links=MeasuredLines(self._database),
            setups=SiloSetups(self._together),
            encodings=config.encodings,
            shards=self._shards,
        )
        self.jobs = JobRegistry(services)
        self.security = Security(config, self._database, credentials, alerts, artifacts.load, self.clock)
        archiving = AuditArchiving(
            self._database,
            artifacts,
            replicas,
            self.security.identity,
            credentials.ca,
            DAY_SECONDS * config.retention.audit,
        )
        await self.security.start()
        logs = JobLogs(self.jobs, services)
        assert self._leadership is not None
        doors = OpenDoors(config, self.jobs, services, self.security, credentials, logs, self._transfer)
        doors.listen(self._leadership.listen, self._leadership.operators)
        self._doors, self.port, self.operators_port = doors, doors.port, doors.operators_port
        await self.jobs.start()
        await doors.start()
        self._page.opened(self.jobs, self._sessions, self._database, self.security)
        behind = BehindThePage(doors.calls, self.security.pages, self.security.access)
        await self._dashboard.open(behind)
        runners, silos = self.jobs.runners, self._sessions.clients
        work: dict[str, LastingWork] = {
            "the watch for silent silos": self._sessions.watch,
            "housekeeping": partial(self._keep_house, services.retention, archiving),
            "copying": services.retention.replicas.run,
            "the watch of the clock": watch_clock,
            "passing on alerts": services.alerts.run,
            "measuring the lag": self.observer.tally.measure_lag,
            "keeping jobs' lines": logs.run,
            "keeping pools": Elastic(config.pools, runners, silos, self.jobs.turns, alerts, self.clock).run,
        }
        if self._bucket is not None:
            work["emptying the bucket"] = self._bucket.run
        self._tasks.extend(loop.create_task(lasting(name, part)) for name, part in work.items())

    async def _find_artifacts(self) -> ArtifactStore:
        """Opens the store.

        With a bucket, everything that the database mentions is put there before anything is served.
        """
        folder, identity = Path(self.config.artifacts), self._database.identity
        if not self.config.bucket:
            return ArtifactStore(folder, identity)
        self._bucket = Bucket(self.config.bucket)
        artifacts = await asyncio.to_thread(ArtifactStore, folder, identity, self._bucket)
        mentioned = await self._database.read(all_digests)
        if missing := await asyncio.to_thread(artifacts.settle, mentioned):
            log.error("%d artifacts that the database mentions are nowhere: restore a backup", missing)
        return artifacts

    async def _stay(self) -> None:
        """Sets `deposed` once another coordinator may have taken over: then this one must stop."""
        assert self._leadership is not None
        reason = await self._leadership.kept()
        log.error("this coordinator stands down: %s", reason)
        self.deposed.set()

    async def _keep_house(self, retention: Retention, archiving: AuditArchiving) -> None:
        await retention.copy_newest()
        while True:
            await retention.sweep(self.clock())
            await archiving.run(self.clock())
            await asyncio.sleep(SWEEP_SECONDS)

    def _joined(self, client: AgentRow) -> None:
        log.info("%s is here", client.name, extra={"site": client.name})
        self.jobs.joined(client)

    def _left(self, client: AgentRow) -> None:
        self.jobs.left(client)
        task = asyncio.get_running_loop().create_task(self._note_seen(client.name))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _note_seen(self, name: str) -> None:
        now = self.clock()
        try:
            await self._seen.ask((name, now))
        except StorageError as error:
            log.warning("%s was last seen now, which could not be stored: %s", name, error)


def run_server(
    config: ServerConfig,
    trusted: TrustedTraining | None = None,
    verbosity: Verbosity | None = None,
    dashboard: Dashboard | None = None,
) -> int:
    """Runs a coordinator until SIGINT or SIGTERM; returns the exit status.

    Raises RoundtableError for what a person must mend.

    `trusted` trains on data of the coordinator's own, for rules that measure updates by them; `verbosity` is
    read anew at SIGHUP; `dashboard` serves the page while the coordinator is active.
    """
    must_be_possible("a coordinator")
    tune_for_transfers()
    settle_imports()
    make = partial(Coordinator, config, trusted=trusted, dashboard=dashboard)
    return asyncio.run(_until_signal(make, config, verbosity or Verbosity(config.log_levels)))


async def _until_signal(make: Callable[[], Coordinator], config: ServerConfig, verbosity: Verbosity) -> int:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        stopped.set()

    on_signals(stop)
    verbosity.heed()
    stopping = loop.create_task(stopped.wait())
    watchdog = loop.create_task(keep_watchdog())
    stopping.add_done_callback(lambda _: watchdog.cancel())
    # At the start what only a person can mend ends it; once it has run, it waits however long.
    patience: type[StorageError] = DatabaseUnreachable
    while not stopped.is_set():
        try:
            if await _one_term(make(), stopping):
                patience = StorageError
        except patience as error:
            log.error("not active: %s; trying again", error)
            tell_systemd(f"waiting for the database: {error}")
            await until_it_answers(config, stopping, str(error), patience)
    return 130 if signal.SIGINT in received else 0


async def until_it_answers(
    config: ServerConfig, stopping: asyncio.Task[bool], reason: str, patience: type[StorageError]
) -> None:
    """Shows on the page of metrics that the database is away, until it answers or `stopping` is done.

    Raises StorageError where it answers with one that is not of the class `patience`.
    """
    async with monitored(config.metrics, DatabaseAway(reason)):
        while not stopping.done():
            await asyncio.wait([stopping], timeout=RETURN_SECONDS)
            if stopping.done() or await asyncio.to_thread(_answers, config.database, patience):
                return


def _answers(address: str, patience: type[StorageError]) -> bool:
    with closing(Database.connect(address)) as database:
        try:
            database.look()
        except patience:
            return False
    return True


async def _one_term(coordinator: Coordinator, stopping: asyncio.Task[bool]) -> bool:
    """Stands by, is active, and returns at the signal to stop or when another coordinator takes over."""
    starting = asyncio.get_running_loop().create_task(coordinator.start())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        return False
    starting.result()
    announce(f"coordinator is listening on {coordinator.addresses}; Ctrl-C stops it")
    tell_systemd("active", ready=True)
    deposed = asyncio.get_running_loop().create_task(coordinator.deposed.wait())
    await asyncio.wait([deposed, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        log.info("stopping; every job goes on when the coordinator is started again")
    deposed.cancel()
    await coordinator.stop()
    return True


def _coordinator_credentials(folder: Path) -> Credentials:
    credentials = load_credentials(folder)
    if credentials.role != "coordinator":
        raise IdentityError(
            f"{folder} holds the certificate of an {credentials.role}, {credentials.name!r}; "
            "a coordinator needs its own: `roundtable ca issue NAME --role coordinator`"
        )
    return credentials

"""The silo's agent: connects, does what the silo allows, comes back after every loss."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from functools import partial
from typing import Any

import grpc

from roundtable.client.agent.agent_observer import AgentObserver, AgentPage
from roundtable.client.agent.connection import (
    Backoff,
    ControlStream,
    Link,
    Refused,
    either,
    explain,
    open_channel,
)
from roundtable.client.agent.coordinator_memory import MEMORY_FILE, CoordinatorMemory
from roundtable.client.agent.first_contact import check_first_contact, check_role
from roundtable.client.agent.installation import CloneMemory, Installation, passage
from roundtable.client.agent.model_cache import ModelCache
from roundtable.client.agent.renewal import keep_renewed
from roundtable.client.agent.secure_attempts import certificate_of
from roundtable.client.agent.silo_log import Notes
from roundtable.client.agent.spool import Spool
from roundtable.client.agent.state_lock import locked
from roundtable.client.agent.step_handler import StepHandler
from roundtable.client.door import incoming, outgoing
from roundtable.client.policy.capacity import capacity_of
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.maintenance import Drained
from roundtable.client.policy.readiness import Readiness
from roundtable.client.sharing.report_desk import ReportDesk
from roundtable.client.sharing.silo_report import Examine, ReportSources, make_report
from roundtable.client.trainer import Trainer
from roundtable.client.worker.own_budgets import OwnBudgets
from roundtable.client.worker.rehearsals import rehearsing
from roundtable.client.worker.torch_devices import choose_device, list_devices
from roundtable.client.worker.worker_trainer import WorkerTrainer
from roundtable.core.allocator import settle_imports, tune_for_transfers
from roundtable.core.errors import ConfigError, IdentityError, ProtocolError, RoundtableError
from roundtable.core.identity.credentials import load_credentials
from roundtable.core.identity.lifetimes import Lifetimes
from roundtable.core.machine.possible import must_be_possible
from roundtable.core.machine.stop_signals import on_signals
from roundtable.core.observability.log_levels import Verbosity
from roundtable.core.observability.logs import belongs_to, requesting
from roundtable.core.observability.monitoring import monitored
from roundtable.core.observability.tracing import Tracer, open_tracer
from roundtable.core.observability.watchdog import keep_watchdog, tell_systemd
from roundtable.proto.pieces import agents_stub

_log = logging.getLogger("roundtable.agent")
# A wrong certificate or version heals only when somebody mends it. At first it may as well be a coordinator
# that was killed in the middle of a handshake, or a line that spoils bytes; said for so long it is true.
_SLOW_SECONDS = 60.0
_SURE_AFTER_SECONDS = 30.0
_STANDBY_SECONDS = 2.0
_GOODBYE_SECONDS = 1.0
_CLOCK_TOLERANCE = 60.0
_FINISH_SECONDS = 30.0


class Agent:
    """One silo's agent. `run` returns after `stop`, and raises what a person has to mend."""

    def __init__(
        self,
        config: AgentConfig,
        trainer: Trainer | None = None,
        tracer: Tracer | None = None,
        examine: Examine = tuple,
    ) -> None:
        """`trainer` does the work; without one a training process is started (`WorkerTrainer`).

        `examine` gives the doctor's findings, for reports that operators ask for.

        Raises ConfigError for a silo without tasks, and for `[cluster]` without a trainer.
        """
        if not config.tasks:
            raise ConfigError(
                "this silo offers no task: name at least one in the [tasks] table of agent.toml, "
                'for example digits = "tasks/digits.py:Digits"'
            )
        if trainer is None and config.cluster is not None:
            raise ConfigError(
                "agent.toml has a [cluster] table and the agent was given no trainer for it: start it with "
                "`roundtable client`, or give it roundtable.cluster.agent.cluster_trainer.ClusterTrainer"
            )
        self._config = config
        self._trainer = trainer
        self._tracer = tracer
        self._examine = examine
        self.metrics_port = 0
        self._stopping = asyncio.Event()
        self._deliver = False
        self._coordinator = ""
        self._complaint = ""
        self._wrong_since: float | None = None
        self._addresses = itertools.cycle((config.coordinator, *config.standbys))
        self._address = next(self._addresses)
        self._drained: Drained | None = None
        self._idle: asyncio.Task[None] | None = None
        self._notes = Notes()
        self._memory: CoordinatorMemory
        self._installation: Installation
        self._clones = CloneMemory(config.state, config.credentials)
        self._observer: AgentObserver

    def stop(self, *, deliver: bool = False) -> None:
        """Ends `run` cleanly; finished updates stay in the spool for the next start.

        With `deliver` what is under way is answered first, as far as that takes less than half a minute.
        """
        self._deliver = deliver
        self._stopping.set()

    async def run(self) -> None:
        """Takes part until `stop`.

        Raises IdentityError for credentials that cannot be used, ResourceError for a state folder
        that is in use or a device that is missing, Refused if the coordinator does not want the agent.
        """
        tune_for_transfers()
        identity = load_credentials(self._config.credentials)
        check_role(identity)
        belongs_to(lambda: {"silo": identity.name})
        choose_device(self._config.device)
        with locked(self._config.state):
            trainer = self._trainer or WorkerTrainer(self._config, identity.name, self._config.state / "jobs")
            models = ModelCache(self._config.state / "models", self._config.cached_models)
            link = Link()
            observer = AgentObserver(
                identity.name, self._tracer or open_tracer(self._config.traces, identity.name)
            )
            spool = Spool(self._config.state / "spool")
            self._memory = CoordinatorMemory(self._config.state / MEMORY_FILE)
            self._installation = Installation(self._config.state, identity.name)
            handler = StepHandler(self._config, observer, link, trainer, models, spool)
            readiness = Readiness(self._config.state, handler.health)
            self._observer = observer
            self._desk = self._open_desk(handler, link, identity.name)
            page = AgentPage(
                self._config.state,
                Lifetimes(self._config.credentials),
                observer,
                lambda: link.stands,
                lambda: len(handler.spooled),
                self._clones,
                OwnBudgets(self._config),
            )
            try:
                async with monitored(self._config.metrics, page) as self.metrics_port:
                    await trainer.start()
                    handler.recover()
                    async with rehearsing(self._config, trainer, observer.rehearsed):
                        await either(
                            readiness.watch(lambda drained: self._maintain(drained, handler, link)),
                            self._stay_connected(handler, link, identity.name),
                            observer.tally.measure_lag(),
                            handler.gate.sharing.run(link.send),
                            self._desk.run(link.send),
                        )
            finally:
                if self._idle is not None:
                    self._idle.cancel()
                self._notes.close()
                await handler.close()
                await trainer.close()
                await asyncio.to_thread(observer.close)

    async def _stay_connected(self, handler: StepHandler, link: Link, name: str) -> None:
        backoff = Backoff()
        stopping = asyncio.create_task(self._stopping.wait())
        session: asyncio.Task[None] | None = None
        try:
            while not stopping.done():
                with requesting():
                    # The task's context is a copy: every line of this connection has its identifier.
                    session = asyncio.create_task(self._serve(handler, link, name, backoff))
                await asyncio.wait([session, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not session.done():
                    if self._deliver:
                        await self._finish(handler, session)
                    handler.gate.sharing.share()
                    await self._leave(session, link)
                    return
                wait = self._after(session, backoff)
                await asyncio.wait([stopping], timeout=wait)
        finally:
            stopping.cancel()
            if session is not None:
                session.cancel()

    async def _serve(self, handler: StepHandler, link: Link, name: str, backoff: Backoff) -> None:
        config = self._config
        try:
            revoked = handler.gate.revocations.current()
            async with open_channel(self._address, config.credentials, revoked) as channel:
                stub = agents_stub(channel)
                session = ControlStream(stub)
                greeting = outgoing.hello(
                    config.tasks,
                    config.metadata,
                    list_devices(),
                    handler.spooled,
                    certificate_of(config.credentials),
                    self._memory.coordinator,
                    self._memory.seen,
                    self._installation.public_key,
                    drained.reason if (drained := self._drained) else None,
                    capacity_of(config),
                    passage(config.credentials, config.relay, self._installation),
                )
                welcome = await session.greet(greeting, self._installation.prove)
                self._connected(welcome, name)
                handler.meet(welcome.clock)
                for message in self._memory.meet(welcome.coordinator):
                    handler.handle(message)
                handler.gate.meet(welcome.identity, welcome.relay)
                handler.gate.revocations.learn(welcome.revocations)
                self._clones.hear(welcome.clone)
                backoff.reset()

                def handle(message: incoming.Message) -> None:
                    if isinstance(message, incoming.StepInstruction) and self._declined(message, link):
                        return
                    self._memory.note(message)
                    if isinstance(message, incoming.Challenge):  # The relay's own connection was made anew.
                        link.send(outgoing.proof(self._installation.prove(message.nonce)))
                    if isinstance(message, incoming.RevocationNews):
                        handler.gate.revocations.learn(message.revocations)
                    if isinstance(message, incoming.CloneNews):
                        self._clones.hear(message)
                    if isinstance(message, incoming.LinesTaken):
                        handler.gate.sharing.taken(message.number)
                    if isinstance(message, incoming.ReportWish | incoming.ReportTaken):
                        self._desk.hear(message)
                    handler.handle(message)

                link.attach(stub, session.outbox)
                handler.gate.sharing.connected()
                if self._drained != drained:
                    link.send(outgoing.maintenance(self._drained.reason if self._drained else None))
                try:
                    await either(
                        session.run(welcome.heartbeat, handle, lambda: handler.state),
                        keep_renewed(stub, config.credentials),
                        handler.gate.revocations.watch(revoked),
                    )
                finally:
                    link.detach()
        except grpc.aio.AioRpcError as error:
            raise await explain(error, self._address, config.credentials) from error

    def _open_desk(self, handler: StepHandler, link: Link, name: str) -> ReportDesk:
        config, gate = self._config, handler.gate

        def connection() -> dict[str, Any]:
            return {
                "address": self._address,
                "connected": link.stands,
                "state": handler.state,
                "updates_waiting": len(handler.spooled),
                "drained": self._drained.reason if self._drained else None,
            }

        def note(*words: str, **detail: Any) -> None:
            gate.silo_log.note(*words, **detail)
            # Somebody may be held to it: it is signed at once.
            gate.silo_log.seal()

        sources = ReportSources(config, name, gate.recent, connection, self._examine)
        make = partial(make_report, sources=sources)
        return ReportDesk(config.state, config.diagnostics, gate.recent, note, make)

    def _maintain(self, drained: Drained | None, handler: StepHandler, link: Link) -> None:
        """Somebody has drained the silo, or it takes part again: that is noted, and told."""
        was, self._drained = self._drained, drained
        handler.drain(drained=drained is not None)
        if drained is None:
            _log.info("takes part again; it was drained: %s", (was and was.reason) or "no reason given")
            self._notes.add(partial(handler.gate.note, "resumed"))
        else:
            _log.info("drained, takes no new round: %s", drained.reason or "no reason given")
            self._notes.add(partial(handler.gate.note, "drained", reason=drained.reason, by=drained.by))
            self._idle = asyncio.create_task(self._tell_idle(handler))
        link.send(outgoing.maintenance(drained.reason if drained else None))

    async def _tell_idle(self, handler: StepHandler) -> None:
        await handler.settled()
        if self._drained is not None:
            _log.info("drained, and nothing is under way: the agent can be stopped")

    def _declined(self, instruction: incoming.StepInstruction, link: Link) -> bool:
        """Whether the silo is drained, and was not asked for this attempt, or a later one, before it was."""
        step = instruction.step
        if self._drained is None or (step.round, step.attempt) <= self._memory.seen.get(step.job, (0, 0)):
            return False
        _log.info("%s: not begun, the silo is drained", step)
        link.send(outgoing.failure(step, "refused", f"the silo is drained: {self._drained.reason}"))
        return True

    def _after(self, session: asyncio.Task[None], backoff: Backoff) -> float:
        """How long to wait before the next attempt; raises what no attempt can heal."""
        error = session.exception()
        if error is None or isinstance(error, Refused) or not isinstance(error, RoundtableError):
            raise error or ProtocolError("the control stream ended without a reason")
        if str(error) != self._complaint:
            self._complaint = str(error)
            _log.warning("not connected: %s; trying again", error)
        now = time.monotonic()
        wrong = isinstance(error, (IdentityError, ProtocolError))
        self._wrong_since = (self._wrong_since or now) if wrong else None
        if self._wrong_since is not None and now - self._wrong_since >= _SURE_AFTER_SECONDS:
            return _SLOW_SECONDS
        self._address = next(self._addresses)
        # One of several is active, or will be within seconds.
        return min(backoff.next(), _STANDBY_SECONDS) if self._config.standbys else backoff.next()

    def _connected(self, welcome: incoming.Welcome, name: str) -> None:
        again = " again" if self._coordinator else ""
        self._observer.tally.count("connections")
        _log.info("connected%s to %s as %s", again, self._address, name)
        if self._coordinator not in ("", welcome.coordinator):
            _log.warning("this is another coordinator than before: its database was replaced")
        offset = welcome.clock - time.time()
        if abs(offset) > _CLOCK_TOLERANCE:
            _log.warning(
                "this machine's clock differs from the coordinator's by %.0f s: set it, or certificates will "
                "seem expired or not yet valid",
                offset,
            )
        self._coordinator, self._complaint, self._wrong_since = welcome.coordinator, "", None

    async def _finish(self, handler: StepHandler, session: asyncio.Task[None]) -> None:
        """Gives what is under way some time, as long as the connection stands."""
        settled = asyncio.create_task(handler.settled())
        await asyncio.wait([session, settled], timeout=_FINISH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()

    async def _leave(self, session: asyncio.Task[None], link: Link) -> None:
        """Says Goodbye; the coordinator then closes the stream."""
        link.send(outgoing.goodbye("the agent was stopped"))
        await asyncio.wait([session], timeout=_GOODBYE_SECONDS)
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)


def run_agent(
    config: AgentConfig,
    trainer: Trainer | None = None,
    verbosity: Verbosity | None = None,
    examine: Examine = tuple,
) -> int:
    """Runs an agent until SIGINT or SIGTERM; a second one ends it at once. Returns the exit status.

    `trainer` and `examine` as for `Agent`; `verbosity` is read anew at SIGHUP. Raises RoundtableError for
    what a person has to mend.
    """
    if config.policy.max_memory is not None:
        must_be_possible("[policy] max_memory")
    if config.cluster is not None:
        must_be_possible("[cluster]")
    settle_imports()
    agent = Agent(config, trainer, examine=examine)
    return asyncio.run(_run(config, agent, verbosity or Verbosity(config.log_levels)))


async def _run(config: AgentConfig, agent: Agent, verbosity: Verbosity) -> int:
    received: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        _log.info("stopping; finished updates are kept and delivered at the next start")
        agent.stop()

    heeded_no_more = on_signals(interrupt)
    verbosity.heed()
    tell_systemd("started", ready=True)
    watchdog = asyncio.create_task(keep_watchdog())
    try:
        load_credentials(config.credentials)
        addresses, met = (config.coordinator, *config.standbys), config.state / MEMORY_FILE
        await asyncio.to_thread(check_first_contact, addresses, config.credentials, met)
        await agent.run()
    finally:
        watchdog.cancel()
        heeded_no_more()
    return 130 if signal.SIGINT in received else 0

"""The relay as a process: what it opens, in which order, and how it stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import grpc

from roundtable.client.agent.connection import either
from roundtable.client.agent.revocations import Revocations
from roundtable.client.agent.state_lock import locked
from roundtable.core.allocator import settle_imports, tune_for_transfers
from roundtable.core.errors import IdentityError
from roundtable.core.evidence.release import release
from roundtable.core.identity.credentials import load_credentials, load_silo_identity
from roundtable.core.machine.possible import must_be_possible
from roundtable.core.machine.stop_signals import on_signals
from roundtable.core.observability.log_levels import Verbosity
from roundtable.core.observability.logs import announce
from roundtable.core.observability.monitoring import monitored
from roundtable.core.observability.watchdog import keep_watchdog, tell_systemd
from roundtable.proto import agent_pb2_grpc, relay_pb2, relay_pb2_grpc
from roundtable.proto.channel import SERVER_OPTIONS
from roundtable.proto.pieces import PieceHandlers
from roundtable.relay.cache import RegionCache
from roundtable.relay.config import RelayConfig
from roundtable.relay.forwarding import Forwarding
from roundtable.relay.from_coordinator import FromCoordinator
from roundtable.relay.held_updates import Held, Part, RelaySpool
from roundtable.relay.made_sums import SumSpool
from roundtable.relay.region_spans import SpanFolder
from roundtable.relay.regional import RegionalRounds
from roundtable.relay.relay_page import RelayPage
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.service import RelayAgentService
from roundtable.relay.silos import Silos
from roundtable.relay.sums_below import SumsBelow
from roundtable.relay.trunk import Trunk, name_of
from roundtable.server.auth.access import Access
from roundtable.server.auth.principals import CertifiedCallers
from roundtable.server.auth.quotas import Quota, Quotas
from roundtable.server.auth.rate_limit import Lockouts
from roundtable.server.auth.relayed import RelayedSilos
from roundtable.server.services.relays import RelayService
from roundtable.server.services.secure_port import open_port
from roundtable.server.services.upload_receipts import Receipts

log = logging.getLogger("roundtable.relay")

TRANSFER_THREADS = 4
STOP_SECONDS = 2.0
REFRESH_SECONDS = 5.0


class Relay:
    """One region's relay. `run` returns after `stop`, and raises what a person has to mend."""

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self.port = self.metrics_port = 0
        self.started = asyncio.Event()

    def stop(self) -> None:
        """Ends `run` cleanly; what is held is handed on after the next start."""
        self._stopping.set()

    async def run(self) -> None:
        """Serves until `stop`.

        Raises IdentityError for credentials that cannot be used, ResourceError for a state folder or an
        address that is in use, ProtocolError if the coordinator does not want the relay.
        """
        config = self._config
        tune_for_transfers()
        name = name_of(config.credentials)
        identity = load_silo_identity(config.credentials)
        threads = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="transfer")
        with locked(config.state):
            spool, silos = RelaySpool(config.state / "updates"), Silos()
            revocations = Revocations(config.credentials, config.state)
            trunk = Trunk(
                config, revocations, lambda: coordinator.joined(), lambda said: coordinator.hear(said)
            )
            spans = SpanFolder(config.state / "regional", name)
            cache = RegionCache(config.state / "models", config.models, trunk.link, spans.models)
            authority = load_credentials(config.credentials).ca
            receipts = Receipts(identity, lambda: (0, ""), time.time)

            def vouch(part: Part) -> None:
                for bearer in [part.bearer] if isinstance(part, Held) else service.bearers(part.members):
                    trunk.send(relay_pb2.FromRelay(bearer=bearer))

            summed = SumSpool(config.state / "sums", name, identity)
            sums = RelaySums(trunk.relays, summed, silos, vouch, threads)
            forwarding = Forwarding(trunk.link, spool, vouch, sums)
            sums.region = regional = RegionalRounds(
                config.regional,
                spans,
                name,
                identity,
                authority,
                cache,
                silos,
                sums,
                receipts,
                threads,
                config.patience,
                trunk.send,
                lambda silo, instruction: coordinator.instruct(silo, instruction),
            )
            coordinator = FromCoordinator(
                silos,
                cache,
                identity.certificate,
                config.heartbeat,
                trunk.send,
                lambda: [held.bearer for held in forwarding.all()],
                name,
                sums,
                regional,
            )
            callers = CertifiedCallers(config.credentials, authority, time.time)
            relayed = RelayedSilos(callers, authority, name)
            service = RelayAgentService(
                silos,
                relayed,
                trunk,
                cache,
                spool,
                forwarding,
                receipts,
                threads,
                config.heartbeat,
                config.patience,
                sums,
                regional,
            )
            below = SumsBelow(config.state / "below", silos, relayed, authority, sums, service.ask, threads)
            server, behind = self._serve(service, callers, relayed, below)
            page = RelayPage(config.state, config.credentials, silos, trunk, forwarding, sums, summed)
            try:
                async with AsyncExitStack() as stack:
                    self.metrics_port = await stack.enter_async_context(monitored(config.metrics, page))
                    sums.recover()
                    regional.recover()
                    for held in spool.recover():
                        forwarding.start(held, fresh=False)
                    sums.start()
                    if len(forwarding):
                        log.info("%d updates are held, and handed on", len(forwarding))
                    await server.start()
                    log.info("listening on %s", config.listen)
                    self.started.set()
                    await either(
                        self._until_stopped(),
                        trunk.run(),
                        _keep_list(callers, revocations),
                        page.tally.measure_lag(),
                    )
            finally:
                for silo in silos:
                    silo.end()
                behind.end_all()
                await server.stop(STOP_SECONDS)
                await forwarding.close()
                await sums.close()
                await regional.close()
                threads.shutdown(wait=True)

    def _serve(
        self,
        service: RelayAgentService,
        callers: CertifiedCallers,
        relayed: RelayedSilos,
        below: SumsBelow,
    ) -> tuple[grpc.aio.Server, RelayService]:
        config = self._config
        credentials = load_credentials(config.credentials)
        quotas = Quotas(config.quotas, time.monotonic, _exceeded)
        access = Access(callers, _Notes(), Lockouts(time.monotonic), quotas, time.monotonic, relayed)
        most = (("grpc.max_allowed_incoming_connections", config.quotas.connections),)
        server = grpc.aio.server(interceptors=[access], options=SERVER_OPTIONS + most)
        server.add_generic_rpc_handlers((PieceHandlers(service),))
        agent_pb2_grpc.add_AgentsServicer_to_server(service, server)
        behind = RelayService(service, access, relayed, callers, release().version, below)
        relay_pb2_grpc.add_RelaysServicer_to_server(behind, server)
        self.port = open_port(server, config.listen, config.credentials, credentials, certificates=True)
        return server, behind

    async def _until_stopped(self) -> None:
        await self._stopping.wait()


class _Notes:
    """A relay keeps no audit log: nothing that it does changes anything at the coordinator."""

    async def note(self, actor: str, action: str, target: str = "", **detail: Any) -> None:
        log.info("%s: %s %s", actor, action, target)

    def refused(self, actor: str, action: str, reason: str, source: str) -> None:
        log.warning("%s refused to %s, from %s: %s", action, actor, source, reason)


def _exceeded(who: str, quota: Quota, problem: str) -> None:
    log.warning("%s is refused: %s", who, problem)


async def _keep_list(callers: CertifiedCallers, revocations: Revocations) -> None:
    """Judges silos by the newest list that is known, from the credentials folder or the coordinator."""
    known = b""
    while True:
        try:
            newest = revocations.current().pem
            if newest and newest != known:
                callers.learn(newest, "the list of revoked certificates")
                known = newest
        except IdentityError as error:
            log.error("what is revoked could not be read anew: %s", error)
        await asyncio.sleep(REFRESH_SECONDS)


def run_relay(config: RelayConfig, verbosity: Verbosity | None = None) -> int:
    """Runs a relay until SIGINT or SIGTERM; returns the exit status.

    Raises RoundtableError for what a person has to mend; `verbosity` is read anew at SIGHUP.
    """
    must_be_possible("a relay")
    settle_imports()
    return asyncio.run(_run(Relay(config), verbosity or Verbosity(config.log_levels)))


async def _run(relay: Relay, verbosity: Verbosity) -> int:
    received: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        received.append(number)
        relay.stop()

    on_signals(interrupt)
    verbosity.heed()
    watchdog = asyncio.create_task(keep_watchdog())
    telling = asyncio.create_task(_tell(relay))
    try:
        await relay.run()
    finally:
        watchdog.cancel()
        telling.cancel()
    return 130 if signal.SIGINT in received else 0


async def _tell(relay: Relay) -> None:
    await relay.started.wait()
    announce(f"relay is listening on port {relay.port}; Ctrl-C stops it")
    tell_systemd("started", ready=True)

"""The relay's page of metrics."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.core import Metric

from roundtable.core.identity.lifetimes import Lifetimes
from roundtable.core.observability.histograms import ProcessMetrics
from roundtable.core.observability.monitoring import Families
from roundtable.proto.pieces import traffic
from roundtable.relay.forwarding import Forwarding
from roundtable.relay.made_sums import SumSpool
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.silos import Silos
from roundtable.relay.trunk import Trunk


class RelayPage:
    """Figures of this process; none tells silos apart."""

    def __init__(
        self,
        state: Path,
        credentials: Path,
        silos: Silos,
        trunk: Trunk,
        forwarding: Forwarding,
        sums: RelaySums,
        spool: SumSpool,
    ) -> None:
        self._sums = sums
        self._spool = spool
        self._state = state
        self._certificates = Lifetimes(credentials)
        self._silos = silos
        self._trunk = trunk
        self._forwarding = forwarding
        self.tally = ProcessMetrics()

    async def ready(self) -> tuple[bool, str]:
        """Whether the relay is connected: silos that come now need its coordinator."""
        if not self._trunk.stands:
            return False, "not connected to the coordinator; the log says why, and what is here is kept"
        return True, f"connected; {len(self._silos)} silos"

    async def figures(self) -> list[Metric]:
        page = Families()
        page.process(self.tally, *traffic.both())
        page.surroundings({"state": self._state}, self._certificates.now())
        page.gauge("roundtable_relay_connected", "1 with a connection", {(): float(self._trunk.stands)})
        page.gauge("roundtable_relay_silos", "silos that are connected", {(): float(len(self._silos))})
        held = {(): float(len(self._forwarding))}
        page.gauge("roundtable_relay_updates_held", "updates without the coordinator's receipt", held)
        sums = {(kind,): float(self._spool.told[kind]) for kind in ("taken", "anew", "refused")}
        text = "sums by what became of them: taken, made anew, or refused and their updates handed on"
        page.counter("roundtable_relay_sums", text, sums, ("outcome",))
        updates = {(): float(self._spool.summed)}
        page.counter("roundtable_relay_updates_summed", "updates in sums that were taken", updates)
        undecided = {(): float(self._sums.undecided)}
        page.gauge("roundtable_relay_sums_undecided", "sums that nothing was decided about yet", undecided)
        return page.made

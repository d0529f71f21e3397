"""What the coordinator says to the region's silos, handed on; what the relay says once it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from roundtable.client.door.incoming import BadMessage, message_of
from roundtable.client.door.model_names import ArtifactName
from roundtable.core.errors import ProtocolError, RoundtableError
from roundtable.proto import agent_pb2, common_pb2, relay_pb2
from roundtable.relay.cache import RegionCache
from roundtable.relay.regional import RegionalRounds
from roundtable.relay.relay_sums import RelaySums
from roundtable.relay.silos import Silo, Silos, asked_of
from roundtable.relay.sum_orders import earlier

log = logging.getLogger("roundtable.relay")


class FromCoordinator:
    """What the coordinator says on the trunk, to whom it is said; and what is said to it once it is back."""

    def __init__(
        self,
        silos: Silos,
        cache: RegionCache,
        identity: bytes,
        heartbeat: float,
        say: Callable[[relay_pb2.FromRelay], None],
        held: Callable[[], list[relay_pb2.Bearer]],
        name: str,
        sums: RelaySums,
        regional: RegionalRounds,
    ) -> None:
        """`identity` is the relay's certificate (PEM) and `name` its name; `held` gives who signed the
        updates that are here."""
        self._name = name
        self._sums = sums
        self._regional = regional
        self._silos = silos
        self._cache = cache
        self._identity = identity
        self._heartbeat = heartbeat
        self._say = say
        self._held = held
        self._fetching: set[asyncio.Task[None]] = set()

    def joined(self) -> None:
        """Greets for every silo that is here, and shows who has signed what is held of the others."""
        for silo in self._silos:
            said = relay_pb2.SaidBySilo(silo=silo.name, message=silo.hello())
            self._say(relay_pb2.FromRelay(said=said))
        for bearer in self._held():
            if self._silos.get(bearer.silo) is None:
                self._say(relay_pb2.FromRelay(bearer=bearer))

    def hear(self, message: relay_pb2.ToRelay) -> None:
        """Hands a message on to its silo."""
        kind = message.WhichOneof("message")
        if kind == "ended":
            if (silo := self._silos.get(message.ended)) is not None:
                silo.end()
        elif kind == "said" and (silo := self._silos.get(message.said.silo)) is not None:
            self._tell(silo, message.said.message)

    def _tell(self, silo: Silo, message: agent_pb2.ToAgent) -> None:
        decoded = message_of(message)
        if isinstance(decoded, BadMessage):
            # Its words would be names of files here, and times: the silo hears it, and says what is wrong.
            log.warning("%s", decoded.reason, extra={"site": silo.name})
            silo.send(message)
            return
        match message.WhichOneof("message"):
            case "welcome":
                self._welcome(silo, message)
                return
            case "refused":
                silo.send(message)
                silo.end()
                return
            case "heartbeat":
                return
            case "instruction":
                if (instruction := self._regional.ordered(silo, message.instruction)) is not None:
                    self.instruct(silo, instruction)
                return
            case "withdraw":
                withdraw = self._regional.withdrawn(silo.name, message.withdraw)
                self._sums.excused(silo.name, asked_of(withdraw.step))
                silo.send(agent_pb2.ToAgent(withdraw=withdraw))
                return
        silo.send(message)

    def instruct(self, silo: Silo, instruction: agent_pb2.Instruction) -> None:
        """Tells a silo what to do, and has what it needs for that come."""
        try:
            model = silo.note(instruction)
        except ProtocolError as error:
            log.warning("%s", error, extra={"site": silo.name})
            model = None
        self._order(silo, instruction.step)
        if model is not None:
            task = asyncio.create_task(self._fetch(silo, model))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        silo.send(agent_pb2.ToAgent(instruction=instruction))

    def _order(self, silo: Silo, step: common_pb2.Step) -> None:
        """Has a sum wait for the silo."""
        asked = asked_of(step)
        order = silo.sum_order(asked)
        if order is not None:
            self._sums.ordered(silo.name, asked, earlier(order, self._name, silo.way))

    def _welcome(self, silo: Silo, message: agent_pb2.ToAgent) -> None:
        """A silo is welcomed once; after the relay's own reconnection the coordinator says it again."""
        welcome = message.welcome
        if silo.coordinator:
            if silo.coordinator != welcome.coordinator:
                # Another database: the silo greets it itself.
                silo.end()
            return
        silo.coordinator = welcome.coordinator
        welcome.relay = self._identity
        welcome.heartbeat_seconds = self._heartbeat
        silo.send(message)

    async def _fetch(self, silo: Silo, model: ArtifactName) -> None:
        """Has the model come before the first silo asks for it; who asks is told what goes wrong."""
        try:
            await self._cache.obtain(model)
        except RoundtableError as error:
            log.warning("a model for %s: %s", silo.name, error)

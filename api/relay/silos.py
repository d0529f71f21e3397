"""The silos that are connected to the relay: what each has said of itself, and what it was asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from roundtable.client.door import incoming
from roundtable.client.door.model_names import ArtifactName
from roundtable.core.errors import ProtocolError
from roundtable.proto import MAX_MESSAGE_BYTES, agent_pb2, common_pb2, relay_pb2
from roundtable.relay.sum_orders import SumOrder, sum_order_of
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import UploadOffer
from roundtable.server.door.from_relays import SumOffer

log = logging.getLogger("roundtable.relay")

MOST_ASKED = 64
UPDATE_FACTOR, UPDATE_EXTRA = 4, 1 << 20
"""An update is no larger than its model in the widest encoding, that of secure aggregation."""
Asked = tuple[str, int, int, str]
"""Job, round, attempt, phase."""


class Silo:
    """One agent's stream at the relay. `None` in the outbox ends it."""

    def __init__(self, name: str, hello: agent_pb2.FromAgent) -> None:
        self.name = name
        self.coordinator = ""
        self.state = ""
        self.outbox: asyncio.Queue[agent_pb2.ToAgent | None] = asyncio.Queue()
        self._hello = hello
        self._came = time.monotonic()
        self._asked: OrderedDict[Asked, int] = OrderedDict()
        self._sums: OrderedDict[Asked, SumOrder] = OrderedDict()
        self._models: OrderedDict[str, ArtifactName] = OrderedDict()

    def hello(self) -> agent_pb2.FromAgent:
        """What the silo said of itself, by a clock that went on."""
        now = time.monotonic()
        self._hello.hello.clock += now - self._came
        self._came = now
        return self._hello

    def maintained(self, message: agent_pb2.Maintenance) -> None:
        """The silo has gone into maintenance, or come back from it, since its hello."""
        self._hello.hello.maintenance.CopyFrom(message)

    def bearer(self) -> relay_pb2.Bearer:
        """Who signs this silo's updates, and that the relay may speak for it."""
        hello = self._hello.hello
        return relay_pb2.Bearer(
            silo=self.name, identity=hello.identity, installation=hello.installation, passage=hello.passage
        )

    def note(self, instruction: agent_pb2.Instruction) -> ArtifactName | None:
        """Remembers what the silo is asked for; returns the model that it needs, None where it needs none, or
        may need no more than what changed since one that it holds.

        ProtocolError for what an agent would refuse.
        """
        decoded = incoming.message_of(agent_pb2.ToAgent(instruction=instruction))
        if not isinstance(decoded, incoming.StepInstruction):
            raise ProtocolError(getattr(decoded, "reason", "an instruction that cannot be read"))
        step, model = decoded.step, getattr(decoded.work, "model", None)
        size = model.size if model is not None else 0
        _remember(self._asked, (step.job, step.round, step.attempt, step.phase), size)
        if model is not None:
            _remember(self._models, model.digest, model)
        for hop in decoded.hops:
            _remember(self._models, hop.delta.digest, hop.delta)
        if (order := sum_order_of(decoded)) is not None:
            _remember(self._sums, (step.job, step.round, step.attempt, step.phase), order)
        return None if decoded.hops else model

    def sum_order(self, asked: Asked) -> SumOrder | None:
        """What was said of adding this step's updates up, if they are to be."""
        return self._sums.get(asked)

    @property
    def way(self) -> str:
        """The relays from the silo to the coordinator, as it has signed them."""
        return str(self._hello.hello.passage.relay)

    def most_bytes(self, asked: Asked) -> int | None:
        """How large an update of this step can be; None where no such order is known."""
        size = self._asked.get(asked)
        return None if size is None else most_bytes_of(size)

    def model(self, digest: str) -> ArtifactName | None:
        """The model of this digest, if the silo was asked to work with it."""
        return self._models.get(digest)

    def send(self, message: agent_pb2.ToAgent) -> None:
        """Queues a message for the agent."""
        self.outbox.put_nowait(message)

    def end(self, reason: str = "") -> None:
        """Ends the stream; with a reason the agent is told not to come back by itself."""
        if reason:
            self.send(to_agents.refused(reason))
        self.outbox.put_nowait(None)


class Silos:
    """By name, the newest stream of each."""

    def __init__(self) -> None:
        self._silos: dict[str, Silo] = {}

    def __len__(self) -> int:
        return len(self._silos)

    def __iter__(self) -> Iterator[Silo]:
        return iter(list(self._silos.values()))

    def get(self, name: str) -> Silo | None:
        """The silo's stream, if it is connected."""
        return self._silos.get(name)

    def open(self, silo: Silo) -> None:
        """A new stream; an older one under the same name ends."""
        older = self._silos.get(silo.name)
        self._silos[silo.name] = silo
        if older is not None:
            older.end(
                f"another connection as {silo.name!r} has taken the place of this one; "
                "if two agents share a certificate, issue one for each"
            )

    def close(self, silo: Silo) -> bool:
        """Removes a stream that is over; False for one that was replaced."""
        if self._silos.get(silo.name) is not silo:
            return False
        del self._silos[silo.name]
        return True


def most_bytes_of(model_bytes: int) -> int:
    """How large an update of such a model can be."""
    return UPDATE_FACTOR * model_bytes + UPDATE_EXTRA


def fits(message: agent_pb2.FromAgent) -> bool:
    """Whether a silo's message can travel with others: a larger one would end the stream of all."""
    return message.ByteSize() <= MAX_MESSAGE_BYTES - 1024


def asked_of(step: common_pb2.Step) -> Asked:
    """The key of a step in a message."""
    return step.job, step.round, step.attempt, step.phase


def asked_in(offer: UploadOffer | SumOffer) -> Asked:
    """The key of the step of what is offered."""
    step = offer.at.step
    return offer.at.job, step.round, step.attempt, step.phase


def _remember(kept: OrderedDict[Any, Any], key: object, value: object) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_ASKED:
        kept.popitem(last=False)

"""What silos are told in rounds within the region, made of what the coordinator has told them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from roundtable.core.config import JobConfig
from roundtable.core.identity.credentials import SiloIdentity
from roundtable.core.identity.signing import sign
from roundtable.proto import agent_pb2
from roundtable.proto.receipts import region_values
from roundtable.relay.region_spans import RegionSpan
from roundtable.relay.regional_table import RegionalTable
from roundtable.relay.silos import Asked

TRAIN = "train"


class LiveSpan:
    """A span with what is not kept of it: who was asked, by which of the coordinator's orders."""

    def __init__(self, span: RegionSpan) -> None:
        self.span = span
        self.orders: dict[str, agent_pb2.Instruction] = {}
        self.start: asyncio.Task[None] | None = None
        self.close: asyncio.TimerHandle | None = None
        self.timed = 0

    @property
    def asked(self) -> Asked:
        """The step of the round that runs."""
        return self.span.job, self.span.round, self.span.attempt, TRAIN

    def untime(self) -> None:
        """Nobody's time runs."""
        if self.close is not None:
            self.close.cancel()


def next_order(
    span: RegionSpan, order: agent_pb2.Instruction, silo: str, relay: str, identity: SiloIdentity
) -> agent_pb2.Instruction:
    """The order of the round that runs, made of the coordinator's `order` for this silo and signed."""
    made = agent_pb2.Instruction()
    made.CopyFrom(order)
    made.step.round = span.round
    made.deadline_seconds = span.seconds(time.time())
    if not span.rounds:
        return made
    made.train.model.digest, made.train.model.size = span.model.digest, span.model.size
    for each in reversed(span.rounds):
        if silo in each.members:
            made.counted.CopyFrom(made.step)
            made.counted.round = each.round
            break
    region = agent_pb2.RegionModel(start=span.start.digest, rounds=span.records, time=time.time())
    made.region.CopyFrom(region)
    made.region.signature = sign(identity, "region", region_values(relay, made))
    return made


def objection(
    policy: RegionalTable | None, job: JobConfig, order: agent_pb2.Instruction, way: Sequence[str], ca: bytes
) -> str:
    """Why the first relay of a silo's `way` runs no rounds within its region for a job; "" if it does."""
    if len(way) > 1:
        return f"the relay {way[0]} is behind another one, and runs no rounds within its region there"
    if policy is None:
        return (
            f"the relay {way[0]} runs no rounds within its region (regions.rounds): its relay.toml has no "
            "table [regional]"
        )
    reason = policy.objection(job, order.job_config, order.submission, ca)
    return reason and f"the relay {way[0]}: {reason}"

"""What an update and its receipt say, in the form in which the silo and the coordinator sign them."""

from __future__ import annotations

import math
from typing import Any

from roundtable.proto import agent_pb2, relay_pb2


def update_values(client: str, header: agent_pb2.UploadHeader) -> dict[str, Any]:
    """What a silo commits itself to with an update: of which step, from which model, which bytes, with which
    weight and training metrics (each a sum and a count; a sum that is NaN says that there is none)."""
    step = header.step
    return {
        "client": client,
        "job": step.job,
        "round": step.round,
        "attempt": step.attempt,
        "model": header.model,
        "update": header.content.digest,
        "size": header.content.size,
        "layout": header.layout,
        "encoding": header.encoding,
        "examples": header.examples,
        "metrics": {
            metric.name: [metric.sum, metric.count] for metric in header.metrics if not math.isnan(metric.sum)
        },
        "time": header.time,
    }


def sum_values(relay: str, header: relay_pb2.SumHeader) -> dict[str, Any]:
    """What a relay commits itself to with a sum: of which step, which bytes, of whose updates it is, each
    with its digest and its examples, which sums of relays behind it are in it, each signed itself, and which
    rounds within its region have led to it."""
    step = header.step
    return {
        "relay": relay,
        "job": step.job,
        "round": step.round,
        "attempt": step.attempt,
        "sum": header.content.digest,
        "size": header.content.size,
        "members": {
            member.silo: [member.header.content.digest, member.header.examples] for member in header.members
        },
        "sums": [[below.relay, below.header.content.digest] for below in header.sums],
        "within": [region_round(each) for each in header.within],
        "time": header.time,
    }


def region_round(message: relay_pb2.RegionRound) -> list[str | int]:
    """A round within a region, as its relay's statements name it."""
    return [
        message.round,
        message.model,
        message.made,
        message.silos,
        message.examples,
        message.members,
    ]


def region_values(relay: str, instruction: agent_pb2.Instruction) -> dict[str, Any]:
    """What a relay commits itself to with a model of its region: for which step, which bytes, from which of
    the coordinator's models, and by which rounds it came."""
    step, model, region = instruction.step, instruction.train.model, instruction.region
    return {
        "relay": relay,
        "job": step.job,
        "round": step.round,
        "attempt": step.attempt,
        "model": model.digest,
        "size": model.size,
        "start": region.start,
        "rounds": region.rounds,
        "time": region.time,
    }


def receipt_values(
    client: str, header: agent_pb2.UploadHeader, receipt: agent_pb2.UploadReceipt
) -> dict[str, str | int | float]:
    """Whose update, of which step, with which digest; what became of it, when, and up to which entry the
    coordinator had signed its audit log by then."""
    step = header.step
    return {
        "client": client,
        "job": step.job,
        "round": step.round,
        "attempt": step.attempt,
        "update": header.content.digest,
        "size": header.content.size,
        "status": agent_pb2.UploadReceipt.Status.Name(receipt.status),
        "time": receipt.time,
        "sealed": receipt.sealed,
        "sealed_hash": receipt.sealed_hash,
    }


__all__ = ["receipt_values", "region_round", "region_values", "sum_values", "update_values"]

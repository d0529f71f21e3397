"""What a receipt says, in the form in which the coordinator signs it and an agent keeps it."""

from __future__ import annotations

from roundtable.proto import agent_pb2


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


__all__ = ["receipt_values"]

"""How an update leaves training: encoded, with what the silo remembers of it made durable first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from roundtable.client.trainer import EncodedUpdate, write_remembering
from roundtable.client.worker.lost_state import left_behind
from roundtable.client.worker.silo_state import SiloState
from roundtable.client.worker.worker_order import Order
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.config import JobConfig
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.failpoints import failpoint
from roundtable.core.models import Model


def write_leaving(
    order: Order,
    job: JobConfig,
    algorithm: ClientAlgorithm,
    start: Model,
    client: str,
    state: SiloState,
    delta: Tensor,
    local: Mapping[str, Tensor],
) -> EncodedUpdate:
    """Encodes a delta [layout.sent.size] of the model `start` into `order.output`, and saves what stays here.

    `local` are the tensors that the silo keeps for its next round, beside what the encoding remembers. The
    delta may be changed in place.
    """
    key = StreamKey(job.seed, client, order.round, order.attempt)
    transfer, layout = job.writes, start.layout
    encoding, chain = get_encoding(order.encoding or transfer.up), order.encoding
    kept = state.load(order.job, order.counted) if transfer.remembers or encoding.keeps else None
    # What is remembered is durable before the update can leave: it counts with the update, or not at all.
    basis = start.vector[layout.basis]
    written = write_remembering(Path(order.output), delta, transfer, layout.sent, key, kept, chain, basis)
    failpoint("update_encoded", order.round, "train")
    left = {**local, **written.memory}
    if left or algorithm.counted_on() or left_behind(job, algorithm, layout):
        state.save(order.job, (order.round, order.attempt), left, order.counted)
    failpoint("memory_kept", order.round, "train")
    return written

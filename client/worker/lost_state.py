"""Says what a silo should go on from and has no more: training goes on without it, and is other training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from roundtable.client.worker.worker_order import Order
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.config import JobConfig
from roundtable.core.encodings import get_encoding
from roundtable.core.encodings.feedback import LOST_ESTIMATE, forgotten
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout

Trouble = Callable[[str, str, str], None]
"""Hears of an incident that does not end the work, as `StepWork.trouble` does."""

log = logging.getLogger("roundtable.worker")


def left_behind(job: JobConfig, algorithm: ClientAlgorithm, layout: Layout) -> list[str]:
    """What a round of the job leaves at a silo for its next one, for people; beside what encodings keep."""
    left = [algorithm.keeps] if algorithm.keeps else []
    left += ["its optimizer's state"] if job.algorithm.optimizer_state == "keep" else []
    own = any(spec.rule == "local" for spec in layout.tensors)
    return left + (["its own tensors of the model"] if own else [])


def say_what_is_lost(
    order: Order,
    job: JobConfig,
    algorithm: ClientAlgorithm,
    layout: Layout,
    kept: Mapping[str, Tensor] | None,
    trouble: Trouble,
) -> None:
    """Reports, before the round's training, what the counted round left at this silo and is not there.

    `kept` is what was found of it. What only the training data can say, the place in a stream, is
    `say_if_lost`'s. Raises EncodingError for EF21, where the server goes on from what is lost.
    """
    if order.counted is None:
        return
    transfer = job.writes
    encoding = get_encoding(order.encoding or transfer.up)
    lost = left_behind(job, algorithm, layout) if kept is None else []
    begun = "begins with the global model" if lost else "goes on without"
    # Where encodings are chosen, not each leaves something.
    if not transfer.automatic and forgotten(encoding, transfer.memory, kept):
        if transfer.memory.way == "ef21":
            raise EncodingError(LOST_ESTIMATE)
        lost.append("what encoding dropped of its updates")
    if lost:
        trouble(
            "state_lost",
            f"what round {order.counted[0]} left at this silo is lost: {', '.join(lost)}",
            begun,
        )


def say_if_lost(order: Order) -> None:
    """Says in the silo's log that a stream began anew, though an update of an earlier round counts."""
    if order.counted is not None:
        log.warning(
            "%s: round %d began anew in the training data, as the place that round %d left in them is not in "
            "the silo's state",
            order.job,
            order.round,
            order.counted[0],
        )

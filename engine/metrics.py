"""A committed round's metrics: those of a model, and all of its numbers."""

from __future__ import annotations

from roundtable.core.measures.columns import CENTRAL
from roundtable.core.observability.metric_sums import mean, means
from roundtable.core.observability.throughput import Throughput
from roundtable.core.observability.transfer_figures import TransferSums
from roundtable.engine.messages import RoundRecord


def of_model(record: RoundRecord, metric: str) -> float | None:
    """The mean of a metric of the model that a round has made: as its name says, the clients' or the
    server's."""
    if metric.startswith(CENTRAL):
        return mean(record.central, metric.removeprefix(CENTRAL))
    return mean(record.evaluation, metric)


def throughput(record: RoundRecord) -> Throughput:
    """A committed round's tokens, bytes and time, as far as they are known."""
    seconds = record.ended - record.started
    return Throughput.of(record.training, record.transfers, record.contributors, seconds)


def figures(record: RoundRecord) -> dict[str, int | float]:
    """A committed round in numbers, named as in a history: train_NAME for training means, NAME for means of
    the model that it made, central_NAME for what the server measured of it, before_NAME for means of the
    model that it began with, in buffered rounds the updates' mean staleness; where known the bytes of its
    updates and of the models sent, the updates' mean encoding_error, and what `Throughput` says."""
    ages, sums = record.staleness.values(), TransferSums.of(record.transfers.values())
    return {
        "clients": len(record.contributors),
        "failed": len(record.failures),
        "excluded": len(record.excluded),
        "time": record.ended,
        **({"epsilon": record.charge["epsilon"]} if "epsilon" in record.charge else {}),
        **({"staleness": sum(ages) / len(ages)} if ages else {}),
        **({"up_bytes": sums.up} if sums.up else {}),
        **({"down_bytes": sums.down} if sums.down else {}),
        **({} if sums.error is None else {"encoding_error": sums.error}),
        **throughput(record).figures(),
        **{f"train_{name}": value for name, value in means(record.training).items()},
        **{f"before_{name}": value for name, value in means(record.before).items()},
        **means(record.evaluation),
        **{f"{CENTRAL}{name}": value for name, value in means(record.central).items()},
    }

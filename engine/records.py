"""What is written down of a round at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundtable.core.observability.metric_sums import add_up, means, worked_out
from roundtable.core.observability.throughput import TOKENS
from roundtable.engine.messages import Aggregated, RoundRecord, Update
from roundtable.engine.state import BUSY, Attempt


def record_of(attempt: Attempt, now: float, private: bool, metrics: Mapping[str, str]) -> RoundRecord:
    """Of a round that has made a model; `private` rounds tell no exact figures of training. `metrics` are
    those that the job works out."""
    aggregated = attempt.aggregated
    assert aggregated is not None
    contributors = tuple(n for n in sorted(attempt.updates) if n not in aggregated.excluded)
    evaluated = add_up(attempt.evaluations[name] for name in sorted(attempt.evaluations))
    parts = [_training_sums(attempt.updates[n]) for n in contributors]
    training = add_up(parts)
    if not all(TOKENS in part for part in parts):
        # The tokens of some silos are not those of the round.
        training.pop(TOKENS, None)
    training |= aggregated.training
    return RoundRecord(
        round=attempt.round,
        attempt=attempt.number,
        model=aggregated.model,
        optimizer=aggregated.optimizer,
        cohort=attempt.cohort,
        contributors=contributors,
        failures=_failures(attempt),
        excluded=dict(aggregated.excluded),
        weights=dict(aggregated.weights),
        # Exact figures about private data would pass by the noise.
        training={} if private else training,
        evaluation=worked_out(evaluated, metrics)[0],
        client_metrics={name: attempt.evaluations[name] for name in sorted(attempt.evaluations)},
        diagnosis=dict(aggregated.diagnosis),
        charge=dict(aggregated.charge),
        started=attempt.started,
        ended=now,
        before=worked_out(aggregated.before, metrics)[0],
        staleness={n: u.staleness(attempt.round) for n, u in sorted(attempt.updates.items()) if u.asked},
        population=attempt.population,
        central=dict(aggregated.central),
        transfers={n: u.transfer.known() for n, u in sorted(attempt.updates.items()) if u.transfer},
        excused=_excused(attempt),
        within=dict(sorted(attempt.within.items())),
    )


def record_without_model(attempt: Attempt, model: str, optimizer: str, why: str, now: float) -> RoundRecord:
    """Of a round that is closed without one: it keeps its charge, and the model before it."""
    return RoundRecord(
        round=attempt.round,
        attempt=attempt.number,
        model=model,
        optimizer=optimizer,
        cohort=attempt.cohort,
        contributors=(),
        failures=_failures(attempt),
        excluded={},
        weights={},
        training={},
        evaluation={},
        client_metrics={},
        diagnosis={},
        charge=dict(attempt.spent or {}),
        started=attempt.started,
        ended=now,
        closed=why,
        excused=_excused(attempt),
    )


def shown(record: RoundRecord) -> dict[str, Any]:
    """What somebody who watches wants to see of a committed round."""
    return {
        "training": means(record.training),
        "evaluation": means(record.evaluation),
        "before": means(record.before),
        **({"central": means(record.central)} if record.central else {}),
        "cohort": len(record.cohort),
        "contributors": len(record.contributors),
        "seconds": record.ended - record.started,
        **({"epsilon": record.charge["epsilon"]} if "epsilon" in record.charge else {}),
    }


def _training_sums(update: Update) -> dict[str, tuple[float, int]]:
    sums = dict(update.metrics)
    if update.loss is not None:
        sums["loss"] = (update.loss * update.examples, update.examples)
    return sums


def _excused(attempt: Attempt) -> tuple[str, ...]:
    return tuple(sorted(name for name, failure in attempt.failures.items() if failure.kind == BUSY))


def _failures(attempt: Attempt) -> dict[str, str]:
    return {name: failure.detail for name, failure in sorted(attempt.failures.items())}


def note_faults(event: Aggregated, note: Callable[[str, str, str, dict[str, Any]], None]) -> None:
    """Notes each update that was left out, or changed, when they were combined."""
    faults = {fault["client"]: fault["reason"] for fault in event.diagnosis.get("excluded", ())}
    for client, reason in sorted(event.excluded.items()):
        detail = {"reason": faults[client]} if client in faults else {}
        note("update_excluded", f"the update of {client} was left out: {reason}", client, detail)
    for fault in event.diagnosis.get("clipped", ()):
        what = "weight" if fault["reason"] == "weight" else "update"
        message = f"the {what} of {fault['client']} was clipped: {fault['message']}"
        note("update_clipped", message, fault["client"], {"reason": fault["reason"]})

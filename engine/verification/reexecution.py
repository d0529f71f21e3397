"""Makes a committed round's model again from its updates, and compares every bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from roundtable.aggregation import rows_in_files
from roundtable.core.config import JobConfig
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.models import Model, digest_of_blocks, model_digest, open_model
from roundtable.engine.combining.combine import Combined, combine
from roundtable.engine.combining.new_model import new_model
from roundtable.engine.combining.received import Rows
from roundtable.engine.combining.server_state import ServerState, initial_server_state
from roundtable.engine.messages import BlobReference, Update
from roundtable.engine.validation.round_plan import Plan
from roundtable.engine.verification.bundle import Bundle, BundledRound, MissingObject
from roundtable.engine.verification.committed import CommittedRound
from roundtable.engine.verification.findings import Findings


def check_model(
    bundle: Bundle,
    job: JobConfig,
    plan: Plan,
    found: BundledRound,
    committed: CommittedRound,
    versions: Mapping[str, str],
) -> Findings:
    """Whether the job's rule and its server optimizer make the committed model of these updates.

    `versions` names what computes here. Raises AuditError for files that were changed, MissingObject for
    those that were not kept, AggregationError and InvalidUpdate where there is no sound answer.
    """
    old = open_model(bundle.object(committed.base))
    combined = _combined(bundle, job, plan, found, committed, old)
    published = _published(bundle, committed)
    guarantee = published.metadata.get("privacy", "") if published else ""
    made = new_model(job, old, combined.vector, committed.round, guarantee)
    state = digest_of_blocks(combined.state.blocks()) if combined.state.worth_keeping else ""
    same_state = state == committed.optimizer
    same_model = model_digest(made) == committed.model
    if same_model and same_state:
        return _weights(found, combined.account.weights)
    what = f"the rule {plan.aggregation.rule} makes another model of these {len(found.updates)} updates"
    if same_model:
        what = "the server optimizer's state is another one after the round than the log says"
    elif published is not None:
        what += _distance(published, made.vector)
    changed = [
        f"{name} {then}, here {versions.get(name)}"
        for name, then in committed.versions.items()
        if name in _ARITHMETIC and versions.get(name) != then
    ]
    if plan.aggregation.device == "cuda":
        advice = 'the job has aggregation.device = "cuda", and a GPU\'s sums have other last digits'
        return Findings(unproven=(f"{what}; {advice}",))
    if changed:
        advice = "make it again on what the coordinator used to tell rounding from a change"
        return Findings(unproven=(f"{what}; it was computed with {', '.join(changed)}: {advice}",))
    return Findings(refuted=(what, *_weights(found, combined.account.weights).refuted))


_ARITHMETIC = ("roundtable", "torch", "numpy", "processor")


def _combined(
    bundle: Bundle,
    job: JobConfig,
    plan: Plan,
    found: BundledRound,
    committed: CommittedRound,
    old: Model,
) -> Combined:
    rows = sorted(found.updates, key=lambda update: update.client)
    updates = [
        Update(
            row.client,
            BlobReference(row.digest),
            row.examples,
            row.loss,
            asked=(row.round, row.attempt) if row.round != committed.round else None,
        )
        for row in rows
    ]
    paths = [bundle.object(row.digest) for row in rows]
    keys = [StreamKey(job.seed, row.client, row.round, row.attempt) for row in rows]
    sent = old.layout.sent
    encodings = [get_encoding(job.transfer.up).over(sent)] * len(paths)
    matrix = rows_in_files(paths, sent.size, encodings, keys)
    state = initial_server_state(plan, old.layout.size)
    if committed.state:
        state = ServerState.from_model(open_model(bundle.object(committed.state)))
    return combine(
        replace(plan, aggregation=replace(plan.aggregation, device="cpu")),
        Rows(matrix, updates),
        old.vector,
        state,
        round=committed.round,
        seed=job.seed,
        diagnose=job.aggregation.diagnosis,
        population=found.population,
    )


def _published(bundle: Bundle, committed: CommittedRound) -> Model | None:
    """The committed model itself, where it is kept."""
    try:
        return open_model(bundle.object(committed.model))
    except MissingObject:
        return None


def _distance(published: Model, vector: Tensor) -> str:
    if published.vector.shape != vector.shape:
        return f": one of {vector.numel()} values, the published one has {published.vector.numel()}"
    largest = float(torch.max(torch.abs(published.vector - vector))) if vector.numel() else 0.0
    return f": they differ by up to {largest:.3g}"


def _weights(found: BundledRound, weights: Mapping[str, float]) -> Findings:
    """Whether the record gives each silo the share that the rule gives it."""
    return Findings(
        refuted=tuple(
            f"the record gives {name} the weight {found.weights.get(name, 0.0):.6g}, its rule {share:.6g}"
            for name, share in weights.items()
            if found.weights.get(name, 0.0) != share
        )
    )

"""Canary rounds of a job in a simulation: engine, sampling, clipping and noise are those of production."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.privacy.audit.canary_job import CanaryJob, CanaryTraces
from roundtable.privacy.audit.report import AuditReport, report
from roundtable.simulation.reporting.progress import Progress
from roundtable.simulation.simulate import simulate

COORDINATES = 1 << 15
CONFIDENCE = 0.999

Watch = Callable[[int, int], None]
"""Told (rounds done, rounds in all)."""


def audit_job(
    job: JobConfig,
    clients: int,
    *,
    coordinates: int = COORDINATES,
    confidence: float = CONFIDENCE,
    rounds: int | None = None,
    folder: Path | None = None,
    watch: Watch = lambda done, total: None,
) -> AuditReport:
    """Audits a job over so many clients, with noise measured at `coordinates` weights.

    `rounds` are those under the job's own noise (default: `CanaryJob.own_rounds`), `folder` where an encoding
    or a rule in a file beside the job lies. Every call draws other seeds. Raises PrivacyError for jobs that
    have no guarantee or that cannot be audited, ConfigError for a job that cannot be simulated.
    """
    canary = CanaryJob.of(job, clients, coordinates, folder)
    faint, own = canary.faint_rounds(confidence), canary.own_rounds(rounds)
    steps = canary.step_rounds(confidence)
    total = faint + own + steps
    quiet = canary_rounds(canary, faint, True, lambda done: watch(done, total))
    noisy = canary_rounds(canary, own, False, lambda done: watch(faint + done, total))
    whole = None
    if steps:
        whole = canary_rounds(
            canary, steps, True, lambda done: watch(faint + own + done, total), canary.steps
        )
    return report(canary, quiet, noisy, confidence, whole=whole)


def canary_rounds(
    canary: CanaryJob,
    rounds: int,
    faint: bool,
    watch: Callable[[int], None] = lambda done: None,
    steps: int | None = None,
) -> CanaryTraces:
    """What so many rounds publish, under the job's own noise or with `faint` under next to none.

    `steps` are those of a round, if not as many as `CanaryJob.config` takes.
    """
    config = canary.config(rounds, int.from_bytes(os.urandom(7), "little"), faint, steps)
    models: list[Tensor] = []
    clip_norms: list[float] = []

    def listen(progress: Progress) -> None:
        if progress.record is None or progress.model is None:
            return
        models.append(progress.model.vector)
        clip_norms.append(float(progress.record.charge.get("clip_norm", canary.privacy.clip_norm)))
        watch(progress.round)

    result = simulate(config, canary.task(), folder=canary.folder, progress=listen)
    if len(models) != rounds:
        raise PrivacyError(
            f"of {rounds} rounds with canaries {len(models)} were committed ({result.reason}): an audit "
            "needs all of them. Let [cohort] be one that the job's clients can fill"
        )
    return canary.traces([result.model.vector.new_zeros(canary.dimension), *models], clip_norms, faint)

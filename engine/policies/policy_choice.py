"""Which training policy a job's rounds follow."""

from __future__ import annotations

from roundtable.core.privacy_table import masking_of
from roundtable.engine.context import JobContext
from roundtable.engine.policies.buffered import BufferedTraining
from roundtable.engine.policies.masked_buffered import MaskedBufferedTraining
from roundtable.engine.policies.synchronous import SynchronousTraining
from roundtable.engine.policies.training_policy import TrainingPolicy


def policy_of(context: JobContext) -> TrainingPolicy:
    """The policy of the job's `[round] mode`, and of whether its updates are masked."""
    job = context.job
    if job.round.mode != "buffered":
        return SynchronousTraining(context)
    return BufferedTraining(context) if masking_of(job.privacy) is None else MaskedBufferedTraining(context)

"""Whether a run may go on to another number of rounds than it was begun with."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import FtrlLevel, NoPrivacy


def why_not_to_other_rounds(job: JobConfig) -> str:
    """Why a run of this job that was to have one number of rounds, and then another, is not the run that it
    were without a stop; empty where it is."""
    table, privacy = job.algorithm, job.privacy
    if table.schedule_over == "job":
        return 'algorithm.schedule_over = "job" spreads the learning rates over all rounds'
    if isinstance(privacy, FtrlLevel):
        return f"at the level {privacy.level} the noise is correlated over all rounds"
    if not isinstance(privacy, NoPrivacy) and privacy.noise_multiplier is None:
        return "the noise of each round follows from privacy.epsilon and the number of rounds"
    return ""

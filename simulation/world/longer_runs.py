"""Whether a run may go on to another number of rounds than it was begun with."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import FtrlLevel, NoPrivacy


def why_not_to_other_rounds(job: JobConfig, *rounds: int) -> str:
    """Why a run of this job that was to have one of these numbers of rounds, and then another of them, is not
    the run that it were without a stop; empty where it is."""
    table, privacy, within = job.algorithm, job.privacy, job.regions.rounds
    if table.schedule_over == "job":
        return 'algorithm.schedule_over = "job" spreads the learning rates over all rounds'
    if isinstance(privacy, FtrlLevel):
        return f"at the level {privacy.level} the noise is correlated over all rounds"
    if not isinstance(privacy, NoPrivacy) and privacy.noise_multiplier is None:
        return "the noise of each round follows from privacy.epsilon and the number of rounds"
    if within > 1 and any(number % within for number in rounds):
        return f"regions meet after every {within} rounds (regions.rounds), and after the last"
    return ""

"""Whether somebody who is given a round's updates can make its model again, bit for bit."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import BareUpdates, masking_of
from roundtable.engine.validation.round_plan import aggregation_config


def why_not_repeatable(job: JobConfig) -> str:
    """The reason why no one but the coordinator can make the job's models again; empty if others can.

    Raises ConfigError for a rule that is not installed here.
    """
    if isinstance(job.privacy, BareUpdates):
        return (
            f"at the level {job.privacy.level} the coordinator adds noise that must stay secret, to updates "
            "that have none: nobody else may read them"
        )
    if masking_of(job.privacy) is not None:
        return (
            "under secure aggregation no single update is known, and their sum is not kept: what silos check "
            "is that it is over those whom they unmasked"
        )
    if job.regions.sum:
        return "relays add their silos' updates up (regions.sum), and the updates themselves are not kept"
    if job.algorithm.work == "by_speed":
        return "how many steps each silo was given follows from its speed, which is not in a round's bundle"
    if job.transfer.automatic:
        return (
            'transfer.up = "auto": which encoding an update has was chosen by measured times, and is not '
            "kept beside the updates"
        )
    if aggregation_config(job.aggregation).takes("root_update"):
        return (
            f"the rule {job.aggregation.rule} measures updates by training on data that only the "
            "coordinator has"
        )
    return ""

"""How many silos are assumed to collude with the coordinator: they add no noise, and say what they sent."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import masking_of
from roundtable.privacy.secagg import tails
from roundtable.privacy.secagg.parameters import FULL_GRAPH_UP_TO

CORRUPTION_OF_FEW, CORRUPTION_OF_MANY = 1 / 3, 0.2
"""The share of silos that may collude with the coordinator: on the full graph, and on the sparse one."""


def colluding_share(job: JobConfig, silos: int) -> float:
    """The share of so many silos that may collude, as the job's secure aggregation assumes.

    The hostile silos that a rule over groups withstands may all be in one group. Raises PrivacyError where
    they would leave nobody in it to hide among.
    """
    masking = masking_of(job.privacy)
    share = CORRUPTION_OF_FEW if silos <= FULL_GRAPH_UP_TO else CORRUPTION_OF_MANY
    if masking is None:
        return share
    share = share if masking.corruption is None else masking.corruption
    hostile = int(job.aggregation.parameters.get("f", 0)) if masking.group_size else 0
    if hostile > silos - 2:
        raise PrivacyError(
            f"privacy.group_size = {silos} with f = {hostile}: all hostile silos could be in one group, and "
            f"would leave nobody to hide among; use groups of at least {hostile + 2}"
        )
    return max(share, hostile / silos)


def colluding_silos(job: JobConfig, cohort: int) -> int:
    """How many of the silos in one securely aggregated sum may collude, in a cohort of so many."""
    masking = masking_of(job.privacy)
    silos = (masking.group_size if masking else None) or cohort
    return tails.counted(colluding_share(job, silos), silos)

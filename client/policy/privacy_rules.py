"""What `[policy]` asks of a job's privacy. Only what the silo itself can enforce or check counts.

At the levels `client` and `dp_ftrl` the coordinator adds the noise, and the silo's bare update leaves it: no
key that promises privacy is satisfied by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from roundtable.client.policy.policy_table import PolicyTable
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import Accounted, NoPrivacy, levels_of, masking_of

LARGEST_DELTA = 1e-3
"""Of a job, where the policy limits an epsilon and names no delta: near 1 any epsilon is true of anything."""
_BUDGETS = {"client_level_epsilon": "client", "example_level_epsilon": "example"}


def privacy_objections(policy: PolicyTable, job: JobConfig) -> Iterator[str]:
    """Why the job's `[privacy]` and cohort are less than the policy asks for, in sentences."""
    masked = masking_of(job.privacy) is not None
    if policy.secure_aggregation and not masked:
        yield (
            "this silo takes part only with secure aggregation ([policy] secure_aggregation = true); "
            "set privacy.secure_aggregation = true in the job"
        )
    yield from _to_cohort(policy, job, masked)
    if policy.epsilon is not None and not isinstance(job.privacy, Accounted):
        yield (
            f"the job's privacy.level is {job.privacy.level!r}, for which no silo can keep an account "
            "([policy] epsilon): use 'client_local', 'distributed' or 'example'"
        )
    for rule, unit in _BUDGETS.items():
        most = getattr(policy, rule)
        if most is not None:
            yield from _to_level(job, rule, most, unit)
    if any(getattr(policy, rule) is not None for rule in ("epsilon", *_BUDGETS)):
        yield from _to_delta(policy, job)


def _to_cohort(policy: PolicyTable, job: JobConfig, masked: bool) -> Iterator[str]:
    size, least = job.cohort.size, policy.minimum_cohort
    demanded = "minimum_cohort" in policy.model_fields_set
    if size is None and demanded and not masked:
        yield (
            f"the job names no cohort.size, and this silo takes part among at least {least} "
            "([policy] minimum_cohort)"
        )
    if size is not None and size < least and (masked or demanded):
        yield (
            f"the job's cohort is {size} silos, and this one {'hides only' if masked else 'takes part'} "
            f"among at least {least} ([policy] minimum_cohort)"
        )


def _to_level(job: JobConfig, rule: str, most: float, unit: str) -> Iterator[str]:
    privacy = job.privacy
    if isinstance(privacy, NoPrivacy) or privacy.unit != unit:
        yield (
            f"the job's privacy.level is {privacy.level!r}, and [policy] {rule} asks for "
            f"{' or '.join(map(repr, _enforced(unit)))}"
        )
    elif not isinstance(privacy, Accounted):
        yield (
            f"under privacy.level {privacy.level!r} this silo's bare update leaves it and the coordinator "
            f"adds the noise, which no silo can check; [policy] {rule} asks for "
            f"{' or '.join(map(repr, _enforced(unit)))}"
        )
    elif privacy.epsilon is None:
        yield f"the job states no privacy.epsilon, and this silo allows {most:g} ([policy] {rule})"
    elif privacy.epsilon > most:
        asked = privacy.epsilon
        yield f"the job's privacy.epsilon is {asked:g}, and this silo allows {most:g} ([policy] {rule})"


def _to_delta(policy: PolicyTable, job: JobConfig) -> Iterator[str]:
    most = policy.delta or LARGEST_DELTA
    if not isinstance(job.privacy, NoPrivacy) and job.privacy.delta > most:
        asked = job.privacy.delta
        yield f"the job's privacy.delta is {asked:g}, and this silo allows {most:g} ([policy] delta)"


def _enforced(unit: str) -> list[str]:
    """The levels that hide a `client`, or an `example`, by what the silo itself does."""
    own = {name for table in get_args(Accounted) for name in get_args(table.model_fields["level"].annotation)}
    return [level for level in levels_of(unit) if level in own]

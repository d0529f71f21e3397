"""What `[policy]` asks of a job's privacy. Only what the silo itself can enforce or check counts.

At the levels `client` and `dp_ftrl` the coordinator adds the noise, and the silo's bare update leaves it: no
key that promises privacy is satisfied by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import get_args

from roundtable.client.policy.policy_table import PolicyTable
from roundtable.core.algorithms.analysis import AnalysisTable
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import (
    Accounted,
    ClientLevel,
    FtrlLevel,
    NoPrivacy,
    groups_of,
    has_secret_cohorts,
    levels_of,
    masking_of,
)
from roundtable.privacy import SamplingModel, central_noise, compose, gaussian_charge, most_summed

LARGEST_DELTA = 1e-3
"""Of a job, where the policy limits an epsilon and names no delta: near 1 any epsilon is true of anything."""
_NOBODY_DRAWN = SamplingModel("none", 1, 1.0, "")
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
            "([policy] epsilon; stated_epsilon counts what is promised): use 'client_local', 'distributed' "
            "or 'example'"
        )
    for rule, unit in _BUDGETS.items():
        most = getattr(policy, rule)
        if most is not None:
            yield from _to_level(job, rule, most, unit)
    if any(getattr(policy, rule) is not None for rule in ("epsilon", *_BUDGETS)):
        yield from _to_delta(policy, job)
    if policy.analyses.epsilon is not None and isinstance(job.algorithm, AnalysisTable):
        yield from _to_analysis(policy.analyses.epsilon, job)
        yield from _to_delta(policy, job)


def objections_to_sum(policy: PolicyTable, job: JobConfig, before: Iterable[JobConfig]) -> Iterator[str]:
    """Why the job passes, with those that the silo took part in before, what they may promise together."""
    most = policy.stated_epsilon
    if most is None:
        return
    if isinstance(job.privacy, NoPrivacy):
        yield (
            "the job has no privacy.level, and this silo counts what jobs promise to spend "
            f"({most:g}, [policy] stated_epsilon): without a level there is no end to it"
        )
        return
    spent, asked = math.fsum(map(stated_epsilon, before)), stated_epsilon(job)
    if asked and spent + asked > most:
        yield (
            f"the job may spend epsilon = {asked:.4g} by the coordinator's word, earlier ones {spent:.4g}, "
            f"and this silo allows {most:g} for all together ([policy] stated_epsilon)"
        )


def stated_epsilon(job: JobConfig) -> float:
    """The most that a job promises to spend by noise that no silo can check; infinite without a guarantee.

    What the job states, or what its noise gives where nobody is drawn by chance. 0 at levels of which the
    silo keeps an account of its own. Over jobs they add up (basic composition), and so do their deltas.
    """
    match job.privacy:
        case NoPrivacy():
            return math.inf
        case ClientLevel(epsilon=float(epsilon)) | FtrlLevel(epsilon=float(epsilon)):
            return epsilon
        case ClientLevel(noise_multiplier=float(noise)) as privacy:
            one = central_noise(privacy, noise, _NOBODY_DRAWN).charge(_NOBODY_DRAWN.fields())
            return compose([one.repeated_by(job.rounds)], privacy.delta, privacy.accountant)
        case FtrlLevel(noise_multiplier=float(noise)) as privacy:
            turns = math.ceil(job.rounds / groups_of(privacy)) if has_secret_cohorts(privacy) else 1
            whole = gaussian_charge("client", {"sampling": "none"}, noise, steps=turns)
            return compose([whole], privacy.delta, privacy.accountant)
        case _:
            return 0.0


def _to_cohort(policy: PolicyTable, job: JobConfig, masked: bool) -> Iterator[str]:
    size, least = most_summed(job) if masked else job.cohort.size, policy.minimum_cohort
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


def _to_analysis(most: float, job: JobConfig) -> Iterator[str]:
    privacy = job.privacy
    if not job.releases_sums or isinstance(privacy, NoPrivacy):
        yield (
            "analyses are answered under differential privacy alone here ([policy.analyses] epsilon): give "
            f"the survey a table [privacy] with epsilon = {most:g} or less"
        )
    elif privacy.epsilon is None or privacy.epsilon > most:
        stated = "no epsilon" if privacy.epsilon is None else f"epsilon = {privacy.epsilon:g}"
        yield f"the analysis states {stated}, and one may cost {most:g} here ([policy.analyses] epsilon)"


def _to_delta(policy: PolicyTable, job: JobConfig) -> Iterator[str]:
    most = policy.delta or LARGEST_DELTA
    if not isinstance(job.privacy, NoPrivacy) and job.privacy.delta > most:
        asked = job.privacy.delta
        yield f"the job's privacy.delta is {asked:g}, and this silo allows {most:g} ([policy] delta)"


def _enforced(unit: str) -> list[str]:
    """The levels that hide a `client`, or an `example`, by what the silo itself does."""
    own = {name for table in get_args(Accounted) for name in get_args(table.model_fields["level"].annotation)}
    return [level for level in levels_of(unit) if level in own]

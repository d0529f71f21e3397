"""From a job's tables to what the round needs: rule, server optimizer, noise; checked before round 1.

Everything that can be wrong with a job and be known beforehand is refused here, with the key it is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roundtable.aggregation import AggregationConfig, ServerOptimizer, make_optimizer
from roundtable.core.config import AggregationTable, CohortTable, JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.privacy import (
    AdaptiveClip,
    CentralDP,
    Charge,
    PrivacyConfig,
    accountant_for,
    check_delta,
    solve_noise,
)


@dataclass(frozen=True)
class PrivacyPlan:
    """Central noise of a job: the mechanism, what one round of it costs, and why, in words."""

    mechanism: CentralDP
    charge: Charge
    sampling: str

    def at(self, clip_norm: float | None) -> CentralDP:
        """The mechanism with the clip norm that adaptive clipping has reached; None for where it starts."""
        adaptive = self.mechanism.adaptive
        if adaptive is None or clip_norm is None:
            return self.mechanism
        return replace(self.mechanism, adaptive=replace(adaptive, clip_norm=clip_norm))


@dataclass(frozen=True)
class Plan:
    """A job that makes sense. `central` is there for client-level privacy with central noise."""

    aggregation: AggregationConfig
    optimizer: ServerOptimizer
    privacy: PrivacyConfig
    central: PrivacyPlan | None


def make_plan(job: JobConfig, population: int, slices: tuple[slice, ...] = ()) -> Plan:
    """The plan of a job over a population of so many clients; `slices` are the layout's (per-layer clipping).

    Raises ConfigError or PrivacyError, naming the table, for anything that cannot work.
    """
    aggregation = aggregation_config(job.aggregation)
    optimizer = server_optimizer(job.aggregation)
    privacy = PrivacyConfig.from_table(job.privacy)
    _check_combination(job, aggregation, privacy)
    central = _central(job, privacy, population, slices) if privacy.level == "client" else None
    return Plan(aggregation, optimizer, privacy, central)


def aggregation_config(table: AggregationTable) -> AggregationConfig:
    """The `[aggregation]` table as the pipeline takes it."""
    steps = tuple(_named(step, "aggregation.pre") for step in table.pre)
    return AggregationConfig(
        rule=table.rule,
        parameters=table.parameters,
        pre=steps,
        weighting=table.weighting,
        validation=table.validation.policy,
        max_norm=table.validation.max_norm,
    )


def server_optimizer(table: AggregationTable) -> ServerOptimizer:
    """The `[aggregation.server_optimizer]` table as an optimizer."""
    given = table.server_optimizer.model_dump(exclude_none=True)
    name, schedule = given.pop("name"), given.pop("schedule", None)
    return make_optimizer(name, given, schedule)


def _named(table: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]]:
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f'{key}: each entry is a table with a name, for example {{ name = "nnm", f = 2 }}')
    return name, values


def _check_combination(job: JobConfig, aggregation: AggregationConfig, privacy: PrivacyConfig) -> None:
    """Settings that are sound apart and unsound together."""
    if privacy.unit != "client":
        return
    if aggregation.rule != "mean" or aggregation.pre:
        raise PrivacyError(
            f"aggregation.rule: noise is calibrated to the bounded mean; {aggregation.rule!r} with "
            f'{len(aggregation.pre)} pre-aggregations has another sensitivity. Use rule = "mean" without pre'
        )
    if aggregation.weighting != "uniform":
        raise PrivacyError(
            f"aggregation.weighting = {aggregation.weighting!r}: a silo could claim any weight and so any "
            'influence; under client-level privacy set weighting = "uniform"'
        )
    if aggregation.validation != "exclude" or aggregation.max_norm is not None:
        raise PrivacyError(
            "aggregation.validation: clip_norm already bounds every update; leave policy and max_norm out"
        )
    if job.cohort.over_selection != 1.0:
        raise PrivacyError(
            "cohort.over_selection: who answers first is not chance; leave it at 1 under privacy"
        )
    if job.stop.metric is not None or job.evaluation.every != 0:
        raise PrivacyError(
            "evaluation and stop: metrics of silos are exact and would pass by the noise; "
            "set evaluation.every = 0 and leave out stop.metric under client-level privacy"
        )


def _central(
    job: JobConfig, privacy: PrivacyConfig, population: int, slices: tuple[slice, ...]
) -> PrivacyPlan:
    assert privacy.clip_norm is not None
    assert privacy.delta is not None
    population = privacy.population or population
    check_delta(privacy.delta, population)
    cohort = _expected_cohort(job.cohort, population)
    sampling = accountant_for(job.cohort.strategy, population, max(1, round(cohort)))
    adaptive = _adaptive(privacy, cohort)
    layers = slices if privacy.clipping == "per_layer" else ()
    mechanism = CentralDP(privacy.clip_norm, privacy.noise_multiplier or 1.0, cohort, layers, adaptive)
    charge = mechanism.charge(sampling.fields())
    if privacy.noise_multiplier is None:
        assert privacy.epsilon is not None
        # A charge may state the noise relative to another sensitivity than C; the ratio carries over.
        relative = charge.parts[0][1] / mechanism.noise_multiplier
        solved = solve_noise(charge.repeated(job.rounds), privacy.epsilon, privacy.delta, privacy.accountant)
        mechanism = replace(mechanism, noise_multiplier=solved.parts[0][1] / relative)
        charge = mechanism.charge(sampling.fields())
    return PrivacyPlan(mechanism, charge, sampling.sentence)


def _adaptive(privacy: PrivacyConfig, cohort: float) -> AdaptiveClip | None:
    if privacy.clipping != "adaptive":
        return None
    assert privacy.clip_norm is not None
    return AdaptiveClip.init(privacy.clip_norm, cohort, privacy.quantile, privacy.clip_learning_rate)


def _expected_cohort(cohort: CohortTable, population: int) -> float:
    if cohort.probability is not None:
        return cohort.probability * population
    return float(min(cohort.size or population, population))

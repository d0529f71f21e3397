"""Works out from a job's tables what its rounds need: rule, server optimizer, noise.

Everything that can be wrong with a job and be known beforehand is refused here, with the key it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from roundtable.aggregation import AggregationConfig, ServerOptimizer, make_optimizer
from roundtable.aggregation.foreign_optimizer import find_optimizer
from roundtable.aggregation.fragment_optimizer import FragmentOptimizer
from roundtable.aggregation.optimizers import OPTIMIZERS
from roundtable.core.algorithms.contract import AlgorithmPlace, ServerAlgorithm
from roundtable.core.algorithms.factors.factor_pairs import FactorPair, factor_pairs
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import AggregationTable, JobConfig, ServerOptimizerTable
from roundtable.core.encodings import Encoding
from roundtable.core.encodings.composed.common_rank import CommonRank
from roundtable.core.encodings.composed.fragments import Fragmented
from roundtable.core.encodings.sparse import RandomK
from roundtable.core.errors import ConfigError, EncodingError
from roundtable.core.job_tables.discounts import Discount, constant
from roundtable.core.layout import Layout
from roundtable.core.plugins.calls import named_at
from roundtable.core.privacy_table import (
    ClientLevel,
    ClientLocalLevel,
    DistributedLevel,
    ExampleLevel,
    FtrlLevel,
    NoPrivacy,
    Private,
    bound_of,
)
from roundtable.engine.foreign_selection import check_strategy, find_strategy
from roundtable.engine.selection import Strategy
from roundtable.engine.validation.algorithm_composition import check_algorithm
from roundtable.engine.validation.buffered_composition import check_buffered
from roundtable.engine.validation.down_composition import down_encoding
from roundtable.engine.validation.kept_composition import check_kept
from roundtable.engine.validation.privacy_soundness import check_soundness
from roundtable.engine.validation.round_noise import (
    CentralNoise,
    CorrelatedRounds,
    FreshNoise,
    NoiseElsewhere,
    NoiseInShares,
    RoundNoise,
    SiloNoise,
)
from roundtable.engine.validation.secure_feasibility import check_bounds, check_secure
from roundtable.engine.validation.standardise_composition import check_standardise
from roundtable.engine.validation.streaming_composition import check_fragments
from roundtable.engine.validation.sum_composition import check_relayed_sums, check_rounds_within
from roundtable.engine.validation.transfer_composition import check_transfer, thinned
from roundtable.privacy import (
    Charge,
    central_noise,
    check_delta,
    correlated_noise,
    distributed_noise,
    noise_for,
    sampling_of,
    sums_charges,
    sums_noise,
    weak_signal,
)


@dataclass(frozen=True)
class ServerPart:
    """The server's part of a job's algorithm, and the places that it declares."""

    algorithm: ServerAlgorithm
    places: tuple[AlgorithmPlace, ...]

    def model_size(self, columns: int) -> int:
        """Values of the model in a flat vector of `columns`."""
        stated = sum(place.size(0) for place in self.places)
        return (columns - stated) // (1 + sum(place.shape is None for place in self.places))

    def sent_size(self, size: int) -> int:
        """Values of an update of a model of so many."""
        return size + sum(place.size(size) for place in self.places if place.sent)

    def slices(self, size: int) -> dict[str, slice]:
        """Where each place lies behind a model of so many values."""
        slices, start = {}, size
        for place in sorted(self.places, key=lambda place: not place.sent):
            slices[place.name] = slice(start, start + place.size(size))
            start += place.size(size)
        return slices


@dataclass(frozen=True)
class Plan:
    """What the rounds of a checked job need.

    `noise` says who hides the updates and what a round costs; `strategy` chooses cohorts; `discount` is
    what staleness leaves of an update; `server` is the server's part of an algorithm that has one. `down` is
    how the change from model to model is encoded; None where silos get the exact model. `estimates`: silos
    send differences from what they have sent (EF21). `thinned` multiplies what is published by d/k, after the
    noise. `common`: updates are factors by a basis that lies behind the model. `factors` are pairs of
    low-rank factors that are merged by the algorithm, or whose averaging is measured. `sketched`: the
    directions of updates are kept, for the next draws.
    """

    aggregation: AggregationConfig
    optimizer: ServerOptimizer
    privacy: NoPrivacy | Private
    noise: RoundNoise
    strategy: Strategy
    discount: Discount = constant
    server: ServerPart | None = None
    down: Encoding | None = None
    estimates: bool = False
    thinned: RandomK | None = None
    common: CommonRank | None = None
    factors: tuple[FactorPair, ...] = ()
    sketched: bool = False

    def over(self, layout: Layout) -> Plan:
        """The plan for vectors of this layout, which encodings may look at. ConfigError for a model without
        the basis that updates go by."""
        common = None if self.common is None else self.common.over(layout.sent)
        lying, wanted = layout.basis.stop - layout.basis.start, common.basis_size if common else 0
        if lying != wanted:
            raise ConfigError(
                f"the model comes with a basis of {lying} values, and transfer.up takes {wanted}: begin with "
                "a model that this job's task makes",
                key=("transfer", "up"),
            )
        down = None if self.down is None else self.down.over(layout)
        optimizer = self.optimizer
        if isinstance(down, Fragmented):
            with named_at("algorithm", "fragments"):
                try:
                    optimizer = FragmentOptimizer(optimizer, down.fragments)
                except EncodingError as error:
                    raise ConfigError(str(error)) from error
        pairs = self._factors_in(layout)
        if self.server is not None and self.server.algorithm.merges():
            self.server.algorithm.check_factors([pair.rank for pair in pairs])
        return replace(self, optimizer=optimizer, down=down, common=common, factors=pairs)

    def _factors_in(self, layout: Layout) -> tuple[FactorPair, ...]:
        """None where the aggregate is not the weighted mean of updates as they came, or noise is to hide
        these."""
        config = self.aggregation
        mean = config.rule == "mean" and not config.pre and config.validation != "clip"
        coded = self.estimates or self.thinned is not None or self.common is not None
        coded |= isinstance(self.down, Fragmented)
        plain = mean and not coded and self.discount is constant and isinstance(self.privacy, NoPrivacy)
        return factor_pairs(layout) if plain else ()

    def charge_of(self, round: int) -> Charge | None:
        """What publishing a round (from 1) costs the population; None where silos alone have accounts."""
        match self.noise:
            case FreshNoise(charge=charge) | NoiseInShares(charge):
                return charge
            case CorrelatedRounds(ftrl=ftrl):
                return ftrl.charge(round)
            case SiloNoise() | NoiseElsewhere():
                return None

    @property
    def bound(self) -> float | None:
        """The norm to which every update is clipped as a whole; None where it is not known before."""
        return bound_of(self.privacy)

    @property
    def silos_pay(self) -> bool:
        """Whether each silo's own noise hides its update."""
        return isinstance(self.noise, SiloNoise)

    def silo_charge(self, round: int) -> Charge | None:
        """What a round costs each silo that answers it, where its own noise hides its update."""
        return self.noise.charge(round) if isinstance(self.noise, SiloNoise) else None

    @property
    def least_charge(self) -> Charge | None:
        """What has to be left of a budget for the job to make any model; None where nobody is charged."""
        return self.noise.least if isinstance(self.noise, SiloNoise) else self.charge_of(1)

    @property
    def separation(self) -> int:
        """The least number of rounds from one contribution of a client to its next."""
        if not isinstance(self.noise, CorrelatedRounds) or self.noise.ftrl.rate is not None:
            return 1  # Groups that take turns are apart by themselves.
        return self.noise.ftrl.separation

    @property
    def sampling(self) -> str:
        """How the draw of cohorts enters into what a round costs, in words; "" where it does not."""
        return self.noise.sampling if isinstance(self.noise, CentralNoise) else ""


def weak_signal_of(job: JobConfig, plan: Plan, population: int, dimension: int) -> str | None:
    """A warning with the ratio where noise leaves little of any signal; `dimension` is the layout's size."""
    privacy = plan.privacy
    if isinstance(privacy, NoPrivacy) or dimension == 0 or job.releases_sums:
        return None
    noise = privacy.noise_multiplier
    if isinstance(plan.noise, FreshNoise | CorrelatedRounds | SiloNoise):
        noise = plan.noise.noise_multiplier
    steps = privacy.local_steps or job.algorithm.steps if isinstance(privacy, ExampleLevel) else 1
    if noise is None or steps is None:
        return None  # How many steps a pass over its data takes, only the silo knows.
    return weak_signal(job, noise, population, dimension)


def make_plan(
    job: JobConfig,
    population: int,
    slices: tuple[slice, ...] = (),
    spent: Sequence[Charge] = (),
    folder: Path | None = None,
) -> Plan:
    """The plan of a job over a population of so many clients; `slices` are the layout's (per-layer clipping).

    `population` is how many there really are: amplification by sampling is theirs. `spent` are the charges
    that they bear already: where the job gives only a budget, the noise is the least that keeps all of it
    within. `folder` is where code is that the job names as file.py:Object; None refuses it. Raises
    ConfigError or PrivacyError, naming the table, for anything that cannot work.
    """
    algorithm = make_algorithm(job.algorithm, folder)
    check_algorithm(job, algorithm)
    aggregation = aggregation_config(job.aggregation, folder)
    optimizer = server_optimizer(job.aggregation, folder)
    strategy = find_strategy(job.cohort, folder)
    check_strategy(job, strategy)
    if job.round.mode == "buffered":
        check_buffered(job)
    check_transfer(job, folder)
    check_bounds(job)
    check_kept(job, algorithm)
    check_relayed_sums(job)
    check_rounds_within(job, algorithm)
    check_soundness(job, aggregation)
    check_standardise(job, aggregation)
    check_fragments(job, algorithm, optimizer, folder)
    check_secure(job, aggregation)
    noise = _noise(job, population, slices, spent)
    discount = job.round.discount if job.round.mode == "buffered" else constant
    server = algorithm.server()
    part = ServerPart(server, algorithm.places) if server is not None else None
    down, thin = down_encoding(job, algorithm, folder), thinned(job, folder)
    estimates = job.transfer.memory.way == "ef21"
    return Plan(
        aggregation,
        optimizer,
        job.privacy,
        noise,
        strategy,
        discount,
        part,
        down,
        estimates,
        thin,
        job.common_rank,
        sketched=job.cohort.balance == "directions",
    )


def aggregation_config(table: AggregationTable, folder: Path | None = None) -> AggregationConfig:
    """The `[aggregation]` table as the pipeline takes it."""
    steps = tuple(_named(step, "aggregation.pre") for step in table.pre)
    return AggregationConfig(
        rule=table.rule,
        parameters=table.parameters,
        pre=steps,
        weighting=table.weighting,
        weights=table.weights,
        validation=table.validation.policy,
        max_norm=table.validation.max_norm,
        weight_ratio=_ratio(table.validation.weight_ratio),
        norm_ratio=_ratio(table.validation.norm_ratio),
        folder=folder,
        device=table.device,
    )


def server_optimizer(table: AggregationTable, folder: Path | None = None) -> ServerOptimizer:
    """The `[aggregation.server_optimizer]` table as an optimizer; `folder` as for `make_plan`."""
    given = table.server_optimizer.model_dump(exclude_none=True)
    name, schedule, parameters = given.pop("name"), given.pop("schedule", None), given.pop("parameters")
    place = ("aggregation", "server_optimizer")
    if name in OPTIMIZERS:
        if parameters:
            raise ConfigError(
                f"server optimizer {name!r} is built in and takes its keys in [aggregation.server_optimizer] "
                "itself; parameters are for one that is not",
                key=(*place, "parameters"),
            )
        return make_optimizer(name, given, schedule)
    plain = ServerOptimizerTable().model_dump()
    for key, value in {**given, "schedule": schedule}.items():
        if value != plain[key]:
            raise ConfigError(
                f"{key} is of the built-in server optimizers; {name!r} takes what it needs from "
                "[aggregation.server_optimizer.parameters]",
                key=(*place, key),
            )
    return find_optimizer(name, parameters, folder)


def _ratio(value: float | Literal["off"]) -> float | None:
    return None if value == "off" else value


def _named(table: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]]:
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f'{key}: each entry is a table with a name, for example {{ name = "nnm", f = 2 }}')
    return name, values


def _noise(job: JobConfig, population: int, slices: tuple[slice, ...], spent: Sequence[Charge]) -> RoundNoise:
    match privacy := job.privacy:
        case ClientLevel():
            return _fresh(job, privacy, population, slices, spent)
        case FtrlLevel():
            return _correlated(job, privacy, population, spent)
        case ClientLocalLevel():
            return _local(job, privacy, population)
        case DistributedLevel() if slices:
            check_delta(privacy.delta, max(population, privacy.population or 0))
            return NoiseInShares(
                distributed_noise(job, sum(part.stop - part.start for part in slices)).charge
            )
        case ExampleLevel() if job.releases_sums:
            return _of_sums(job, sums_noise(job))
        case _:
            return NoiseElsewhere()


def _of_sums(job: JobConfig, noise: float) -> SiloNoise:
    return SiloNoise(noise, tuple(sums_charges(job, noise)))


def _fresh(
    job: JobConfig,
    privacy: ClientLevel,
    population: int,
    slices: tuple[slice, ...],
    spent: Sequence[Charge],
) -> FreshNoise:
    # Rounds draw from the silos that there are: only delta may follow a population that is claimed.
    check_delta(privacy.delta, max(population, privacy.population or 0))
    sampling = sampling_of(job, population)
    mechanism = central_noise(privacy, noise_for(job, population, 1, spent), sampling, slices)
    return FreshNoise(mechanism, mechanism.charge(sampling.fields()), sampling.sentence)


def _correlated(
    job: JobConfig, privacy: FtrlLevel, population: int, spent: Sequence[Charge]
) -> CorrelatedRounds:
    # Rounds draw from the silos that there are: only delta may follow a population that is claimed.
    check_delta(privacy.delta, max(population, privacy.population or 0))
    ftrl = correlated_noise(job, noise_for(job, population, 1, spent), population)
    sampling = sampling_of(job, population)
    reason = sampling.sentence if ftrl.rate is not None else ""
    return CorrelatedRounds(ftrl.central(sampling.cohort), ftrl, reason)


def _local(job: JobConfig, privacy: ClientLocalLevel, population: int) -> SiloNoise:
    check_delta(privacy.delta, max(population, privacy.population or 0))
    # Each silo computes the same again: the population makes no difference to it.
    return SiloNoise(noise_for(job, 1, 1))

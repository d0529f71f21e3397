"""Works out from a job's tables what its rounds need: rule, server optimizer, noise.

Everything that can be wrong with a job and be known beforehand is refused here, with the key it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundtable.aggregation import AggregationConfig, ServerOptimizer, make_optimizer
from roundtable.core.algorithms.contract import AlgorithmPlace, ServerAlgorithm
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import AggregationTable, JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.privacy_table import (
    ClientLevel,
    ClientLocalLevel,
    DistributedLevel,
    ExampleLevel,
    FtrlLevel,
    NoPrivacy,
    Private,
)
from roundtable.engine.validation.algorithm_composition import check_algorithm
from roundtable.engine.validation.buffered_composition import check_buffered
from roundtable.engine.validation.privacy_soundness import check_soundness
from roundtable.engine.validation.secure_feasibility import check_secure
from roundtable.privacy import (
    BandedFTRL,
    CentralDP,
    Charge,
    central_noise,
    check_delta,
    correlated_noise,
    distributed_noise,
    local_gaussian_charge,
    noise_for,
    sampling_of,
    weak_signal,
)


@dataclass(frozen=True)
class CentralNoise:
    """Central noise of a job: the mechanism, what one round of it costs, and why, in words.

    With `ftrl` the noise is correlated over rounds, and what a round costs depends on its number.
    """

    mechanism: CentralDP
    charge: Charge
    sampling: str
    ftrl: BandedFTRL | None = None

    @property
    def noise_multiplier(self) -> float:
        """What the job file calls so; a job that is taken up again must go on with the same."""
        return self.ftrl.noise_multiplier if self.ftrl else self.mechanism.noise_multiplier

    def charge_of(self, round: int) -> Charge:
        """What publishing a round (from 1) costs."""
        return self.ftrl.charge(round) if self.ftrl else self.charge

    def at(self, clip_norm: float | None) -> CentralDP:
        """The mechanism with the clip norm that adaptive clipping has reached; None for where it starts."""
        adaptive = self.mechanism.adaptive
        if adaptive is None or clip_norm is None:
            return self.mechanism
        return replace(self.mechanism, adaptive=replace(adaptive, clip_norm=clip_norm))


@dataclass(frozen=True)
class ServerPart:
    """The server's part of a job's algorithm, the places that it declares, and over how many clients."""

    algorithm: ServerAlgorithm
    places: tuple[AlgorithmPlace, ...]
    population: int

    def model_size(self, columns: int) -> int:
        """Values of the model in a flat vector of `columns`."""
        stated = sum(place.size(0) for place in self.places)
        return (columns - stated) // (1 + sum(place.shape is None for place in self.places))

    def slices(self, size: int) -> dict[str, slice]:
        """Where each place lies behind a model of so many values."""
        slices, start = {}, size
        for place in self.places:
            slices[place.name] = slice(start, start + place.size(size))
            start += place.size(size)
        return slices


@dataclass(frozen=True)
class Plan:
    """What the rounds of a checked job need.

    `central` is there where the coordinator adds the noise: client and dp_ftrl.
    `silo_noise` is the noise multiplier of each silo's own noise at level client_local, `shares` what a
    sum with noise in shares costs at level distributed; `staleness_exponent` discounts late updates; `server`
    is the server's part of an algorithm that has one.
    """

    aggregation: AggregationConfig
    optimizer: ServerOptimizer
    privacy: NoPrivacy | Private
    central: CentralNoise | None
    silo_noise: float | None = None
    shares: Charge | None = None
    staleness_exponent: float = 0.0
    server: ServerPart | None = None

    def charge_of(self, round: int) -> Charge | None:
        """What publishing a round (from 1) costs the population; None where silos alone have accounts."""
        return self.central.charge_of(round) if self.central else self.shares

    @property
    def silo_charge(self) -> Charge | None:
        """What a round costs each silo that answers it, where its own noise hides its update."""
        return None if self.silo_noise is None else local_gaussian_charge(self.silo_noise)

    @property
    def separation(self) -> int:
        """The least number of rounds from one contribution of a client to its next."""
        return self.central.ftrl.separation if self.central and self.central.ftrl else 1


def weak_signal_of(job: JobConfig, plan: Plan, population: int, dimension: int) -> str | None:
    """A warning with the ratio where noise leaves little of any signal; `dimension` is the layout's size."""
    privacy = plan.privacy
    if isinstance(privacy, NoPrivacy) or dimension == 0:
        return None
    noise = privacy.noise_multiplier or plan.silo_noise
    if plan.central is not None:
        noise = plan.central.noise_multiplier
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
    optimizer = server_optimizer(job.aggregation)
    if job.round.mode == "buffered":
        check_buffered(job)
    check_soundness(job, aggregation)
    check_secure(job, aggregation)
    central, silo_noise, shares = None, None, None
    match privacy := job.privacy:
        case ClientLevel():
            central = _central(job, privacy, population, slices, spent)
        case FtrlLevel():
            central = _correlated(job, privacy, population, spent)
        case ClientLocalLevel():
            silo_noise = _local(job, privacy, population)
        case DistributedLevel() if slices:
            shares = distributed_noise(job, sum(part.stop - part.start for part in slices)).charge
        case _:
            pass
    exponent = job.round.staleness_exponent if job.round.mode == "buffered" else 0.0
    server = algorithm.server()
    part = ServerPart(server, algorithm.places, population) if server is not None else None
    return Plan(aggregation, optimizer, privacy, central, silo_noise, shares, exponent, part)


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
        folder=folder,
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


def _central(
    job: JobConfig,
    privacy: ClientLevel,
    population: int,
    slices: tuple[slice, ...],
    spent: Sequence[Charge],
) -> CentralNoise:
    # Rounds draw from the silos that there are: only delta may follow a population that is claimed.
    check_delta(privacy.delta, max(population, privacy.population or 0))
    sampling = sampling_of(job.cohort, population)
    mechanism = central_noise(privacy, noise_for(job, population, 1, spent), sampling, slices)
    return CentralNoise(mechanism, mechanism.charge(sampling.fields()), sampling.sentence)


def _correlated(job: JobConfig, privacy: FtrlLevel, population: int, spent: Sequence[Charge]) -> CentralNoise:
    # Rounds draw from the silos that there are: only delta may follow a population that is claimed.
    check_delta(privacy.delta, max(population, privacy.population or 0))
    ftrl = correlated_noise(job, noise_for(job, population, 1, spent), population)
    sentence = f"A silo contributes at most once in {ftrl.separation} rounds, which selection enforces."
    cohort = sampling_of(job.cohort, population).cohort
    return CentralNoise(ftrl.central(cohort), ftrl.charge(1), sentence, ftrl)


def _local(job: JobConfig, privacy: ClientLocalLevel, population: int) -> float:
    check_delta(privacy.delta, max(population, privacy.population or 0))
    # Each silo computes the same again: the population makes no difference to it.
    return noise_for(job, 1, 1)

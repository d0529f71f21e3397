"""From a job to what its rounds cost, and the noise that its budget asks for.

The plan that is shown before a job runs, the coordinator's ledger and the silos' own accounts all ask here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from roundtable.core.algorithms.schedules import Schedule
from roundtable.core.config import SERVER_MOMENTUM, JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import (
    ClientLevel,
    ClientLocalLevel,
    DistributedLevel,
    ExampleLevel,
    FtrlLevel,
    NoPrivacy,
    Private,
    groups_of,
    has_secret_cohorts,
)
from roundtable.privacy.accounting.accountants import compose, merged
from roundtable.privacy.accounting.calibration import solve_noise
from roundtable.privacy.accounting.charge import Charge, gaussian_charge, local_gaussian_charge
from roundtable.privacy.accounting.dp_sgd_charge import step_charge
from roundtable.privacy.accounting.group_privacy import group_epsilon
from roundtable.privacy.accounting.sampling import SamplingModel, accountant_for, cyclic_poisson
from roundtable.privacy.collusion import colluding_silos
from roundtable.privacy.mechanisms.central_noise import CentralDP
from roundtable.privacy.mechanisms.clipping import AdaptiveClip
from roundtable.privacy.mechanisms.distributed import DistributedDP
from roundtable.privacy.mechanisms.factorise import BANDS, Banded, Buffered, Factorisation, best_factorisation
from roundtable.privacy.mechanisms.ftrl import MatrixMechanism
from roundtable.privacy.mechanisms.toeplitz import Workload
from roundtable.privacy.shared_sample import most_summed, values_sent

_STEP = 1.002


def sampling_of(job: JobConfig, population: int) -> SamplingModel:
    """How a round's cohort is drawn from so many clients, as the accountant takes it."""
    cohort, groups = job.cohort, groups_of(job.privacy)
    if groups > 1 and cohort.probability is not None:
        return cyclic_poisson(population, groups, cohort.probability)
    size = most_summed(job) if isinstance(job.privacy, DistributedLevel) else cohort.size
    expected = float(min(size or population, population))
    if cohort.probability is not None:
        expected = cohort.probability * population
    return accountant_for(cohort.strategy, population, expected, has_secret_cohorts(job.privacy))


def level_of(job: JobConfig) -> Private:
    """The job's level. Raises `PrivacyError` for a job without a guarantee."""
    if isinstance(job.privacy, NoPrivacy):
        raise PrivacyError("the job uses no differential privacy; set privacy.level to plan it")
    return job.privacy


def charges(
    job: JobConfig, noise_multiplier: float, population: int, dimension: int, upto: int
) -> Sequence[Charge]:
    """What the first `upto` rounds cost; for `client_local` and `example`, one silo.

    `population` is the number of clients, `dimension` the length of an update. A silo under `client_local` is
    charged for every round: whether it was chosen is not secret. At level `example` the silo is one with
    `privacy.population` examples. Raises `PrivacyError` where that is missing.
    """
    privacy, sampling = level_of(job), sampling_of(job, population)
    match privacy:
        case ClientLevel():
            one = central_noise(privacy, noise_multiplier, sampling).charge(sampling.fields())
        case ClientLocalLevel():
            one = local_gaussian_charge(noise_multiplier)
        case DistributedLevel():
            one = shared_noise(job, noise_multiplier, dimension).charge
        case ExampleLevel() if job.releases_sums:
            return sums_charges(job, noise_multiplier)[:upto]
        case ExampleLevel():
            if privacy.population is None:
                raise PrivacyError("a plan needs privacy.population: the examples of a silo")
            one = example_charge(job, privacy.population, noise_multiplier)
        case FtrlLevel():
            plan = correlated_noise(job, noise_multiplier, population)
            return [plan.charge(round) for round in range(1, upto + 1)]
    return [one.repeated_by(upto)]


def noise_for(job: JobConfig, population: int, dimension: int, spent: Sequence[Charge] = ()) -> float:
    """The noise multiplier of a job: as given, or the least that keeps all its rounds within the budget.

    `spent` is what the population bears already. Raises `PrivacyError` where no noise keeps the budget.
    """
    privacy = level_of(job)
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.epsilon is not None, "a level needs one of the two"
    budget = (privacy.epsilon, privacy.delta)
    rounds = max(1, job.rounds)
    match privacy:
        case FtrlLevel(cohorts="known"):
            # All rounds together are one Gaussian release, whose sensitivity the plan accounts for.
            whole = gaussian_charge("client", {"sampling": "none"}, 1.0)
            return solve_noise(whole, *budget, privacy.accountant, spent).noise_multiplier
        case FtrlLevel():
            turns = merged(charges(job, 1.0, population, dimension, rounds))
            return solve_noise(turns[0], *budget, privacy.accountant, spent).noise_multiplier
        case DistributedLevel():
            many = gaussian_charge("client", {"sampling": "none"}, 1.0, steps=rounds)
            noise = solve_noise(many, *budget, "rdp", spent).noise_multiplier
            while _all(job, noise, population, dimension, spent) > privacy.epsilon:
                noise *= _STEP
            return noise
        case _:
            [many] = charges(job, 1.0, population, dimension, rounds)
            # A charge may state the noise relative to another sensitivity than C; the ratio carries over.
            return solve_noise(many, *budget, privacy.accountant, spent).parts[0][1] / many.parts[0][1]


def _all(job: JobConfig, noise: float, population: int, dimension: int, spent: Sequence[Charge]) -> float:
    rounds = charges(job, noise, population, dimension, max(1, job.rounds))
    return compose([*spent, *rounds], level_of(job).delta)


def group_spending(
    job: JobConfig, noise_multiplier: float, population: int, dimension: int, group: int
) -> float:
    """The ε of all rounds for `group` silos together, or at level `example` records of one silo."""
    spent = charges(job, noise_multiplier, population, dimension, max(1, job.rounds))
    return group_epsilon(spent, group, level_of(job).delta)


def central_noise(
    privacy: ClientLevel, noise_multiplier: float, sampling: SamplingModel, slices: tuple[slice, ...] = ()
) -> CentralDP:
    """The mechanism of a `client` job; `slices` are the layout's, for clipping by layer."""
    adaptive = None
    if privacy.clipping == "adaptive":
        rate = privacy.clip_learning_rate
        adaptive = AdaptiveClip.init(privacy.clip_norm, sampling.cohort, privacy.quantile, rate)
    layers = slices if privacy.clipping == "per_layer" else ()
    return CentralDP(privacy.clip_norm, noise_multiplier, sampling.cohort, layers, adaptive)


def correlated_noise(job: JobConfig, noise_multiplier: float, population: int) -> MatrixMechanism:
    """The noise of a `dp_ftrl` job; without `separation` a silo waits until all others could have come.

    How noise is correlated is optimised for the job's rounds, its separation and its `workload`. With hidden
    cohorts one participation of a silo is a release of its own, and hence what is optimised for.

    Raises `PrivacyError` for a separation that the population cannot give.
    """
    privacy, cohort, rounds = job.privacy, sampling_of(job, population).cohort, max(1, job.rounds)
    assert isinstance(privacy, FtrlLevel)
    separation = privacy.separation or max(1, int(population // cohort))
    if has_secret_cohorts(privacy):
        bands = min(privacy.bands or BANDS, separation)
        single = _factorisation(privacy.model_copy(update={"bands": bands}), workload(job), rounds)
        return MatrixMechanism(
            privacy.clip_norm, noise_multiplier, rounds, separation, single, job.cohort.probability
        )
    if separation * cohort > population:
        raise PrivacyError(
            f"privacy.separation = {separation}: with {cohort:g} clients a round, {separation * cohort:g} "
            f"are needed before the first may come again, and the population has {population}. "
            "Lower separation or cohort.size"
        )
    factorisation = _factorisation(privacy, workload(job), separation)
    return MatrixMechanism(privacy.clip_norm, noise_multiplier, rounds, separation, factorisation)


def workload(job: JobConfig) -> Workload:
    """What a model of the job is of the rounds' sums: with the server's momentum and its schedule.

    Steps of other server optimizers than fedavg and fedavgm are other sums, or none; for them it is the
    prefix sums, which costs accuracy only.
    """
    rounds, server = max(1, job.rounds), job.aggregation.server_optimizer
    if server.name not in ("fedavg", "fedavgm"):
        return Workload.prefix_sums(rounds)
    schedule = Schedule.of(server.schedule)
    momentum = 0.0
    if server.name == "fedavgm":
        momentum = SERVER_MOMENTUM if server.momentum is None else server.momentum
    return Workload(tuple(schedule.factor(step) for step in range(rounds)), momentum)


@lru_cache(maxsize=64)
def _factorisation(privacy: FtrlLevel, workload: Workload, separation: int) -> Factorisation:
    if privacy.coefficients is None:
        return best_factorisation(workload, separation, privacy.bands, privacy.buffers)
    if privacy.decays is None:
        return Banded(privacy.coefficients)
    return Buffered(privacy.coefficients, privacy.decays)


def shared_noise(job: JobConfig, noise_multiplier: float, dimension: int) -> DistributedDP:
    """The shares of noise of a `distributed` job, for a cohort of exactly `cohort.size`, or a whole buffer.

    `dimension` is the update's; of random-k only the values that are sent have noise.
    """
    privacy, size = job.privacy, most_summed(job)
    assert isinstance(privacy, DistributedLevel)
    if size is None:
        raise PrivacyError(
            "cohort.size is missing: under level 'distributed' each silo's share of the noise depends on it"
        )
    sent = values_sent(job, dimension)
    return DistributedDP.of_job(privacy, noise_multiplier, sent, size, colluding_silos(job, size))


def distributed_noise(job: JobConfig, dimension: int) -> DistributedDP:
    """The same with the job's own noise. Nobody's part in a round is hidden, so no sampling amplifies it."""
    if not isinstance(job.privacy, DistributedLevel):
        raise PrivacyError(f"privacy.level = {job.privacy.level!r} has no noise in shares")
    silos = most_summed(job) or 1
    return shared_noise(job, noise_for(job, silos, dimension), dimension)


def sums_charge(noise_multiplier: float) -> Charge:
    """What one release of sums costs each silo's records, of which one changes all of them by 1 (L2)."""
    return gaussian_charge("example", {"sampling": "none"}, noise_multiplier, part="sums")


def sums_charges(job: JobConfig, noise_multiplier: float) -> list[Charge]:
    """The same of each round of a job whose releases one record changes by 1 together."""
    return [sums_charge(noise_multiplier / math.sqrt(share)) for share in job.algorithm.sums_shares()]


def example_training(job: JobConfig, examples: int) -> tuple[ExampleLevel, int]:
    """The level with its batch size filled in, and the steps of a round, for a silo of so many examples."""
    privacy = job.privacy
    if not isinstance(privacy, ExampleLevel):
        raise PrivacyError(f"privacy.level = {privacy.level!r} clips no gradients of single examples")
    batch = privacy.batch_size or job.algorithm.batch_size
    steps = privacy.local_steps or job.algorithm.steps or job.algorithm.passes * math.ceil(examples / batch)
    return privacy.model_copy(update={"batch_size": batch}), steps


def example_charge(job: JobConfig, examples: int, noise_multiplier: float | None = None) -> Charge:
    """What a round costs a silo of so many examples, with the job's noise where none is given.

    Raises `PrivacyError` for too few of them.
    """
    privacy, steps = example_training(job, examples)
    if noise_multiplier is not None:
        privacy = privacy.model_copy(update={"noise_multiplier": noise_multiplier})
    return step_charge(privacy, examples, steps * max(1, job.rounds)).repeated(steps)

"""Why a job's noise is correlated over rounds as it is, in words for `roundtable privacy plan`."""

from __future__ import annotations

import math

from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import FtrlLevel
from roundtable.privacy.levels import workload
from roundtable.privacy.mechanisms.factorise import (
    BANDS,
    Banded,
    Factorisation,
    best_factorisation,
    optimal_banded,
)
from roundtable.privacy.mechanisms.ftrl import MatrixMechanism
from roundtable.privacy.mechanisms.toeplitz import Workload, rms, square_root

MOST_BANDS = 512


def memory(factorisation: Factorisation, dimension: int) -> str:
    """What the coordinator keeps between rounds."""
    return f"{4 * factorisation.kept * dimension / 2**20:,.1f} MiB"


def correlation(job: JobConfig, ftrl: MatrixMechanism, dimension: int) -> str:
    """How noise is correlated, what it is optimised for, and what else there is."""
    assert isinstance(job.privacy, FtrlLevel)
    models, chosen = workload(job), ftrl.factorisation

    def noise(factorisation: Factorisation) -> float:
        return rms(factorisation.column(ftrl.rounds), models, ftrl.period)

    if job.privacy.coefficients is not None:
        how = "with the job's own coefficients"
    elif ftrl.rate is not None and job.privacy.bands is None:
        how = f"a band for each group, up to {BANDS}"
    elif job.privacy.bands is None and job.privacy.buffers is None:
        how = "which keeps the least of those with little noise"
    else:
        how = "as the job says"
    how += f", amplified by sampling {ftrl.separation} groups in turn" if ftrl.rate is not None else ""
    others = [
        f"{other}: {noise(other):.4g} ({memory(other, dimension)}{remark})"
        for other, remark in _others(ftrl, models)
    ]
    return (
        f"Noise is correlated over rounds: {chosen}, {how}; {_words(job, models)}, over {ftrl.rounds} rounds "
        f"of which one silo's are {ftrl.separation} apart at least. Root mean square noise on the models, in "
        f"noise multipliers: {noise(chosen):.4g} ({memory(chosen, dimension)} kept); {'; '.join(others)}."
    )


def _others(ftrl: MatrixMechanism, models: Workload) -> list[tuple[Factorisation, str]]:
    most = min(ftrl.separation, models.rounds, MOST_BANDS)
    found: list[tuple[Factorisation, str]] = [
        (optimal_banded(models, most, ftrl.period), f", bands = {most}"),
        (Banded((1.0,)), ", independent"),
    ]
    if ftrl.rate is None:
        found.insert(0, (best_factorisation(models, ftrl.separation), ""))
    distinct = {str(each): (each, remark) for each, remark in found if str(each) != str(ftrl.factorisation)}
    return list(distinct.values())


def likely_groups(noise_multiplier: float, rounds: int, share: float) -> int:
    """The number of groups, a power of 2, with which amplified banded noise is likely least.

    `share` of the population is in a round on average, `noise_multiplier` that of one release which spends
    the budget. The noise that so many sampled releases need is taken from their central limit (Bu, Dong,
    Long & Su 2020). That is no bound: it only chooses what is then accounted for.
    """
    sums = Workload.prefix_sums(rounds)
    errors: dict[int, float] = {}
    for power in range(MOST_BANDS.bit_length()):
        groups = 2**power
        if groups * share > 1.0 or groups > rounds:
            break
        reach = groups * share * math.sqrt(math.ceil(rounds / groups)) * noise_multiplier
        noise = 1.0 / math.sqrt(math.log1p(1.0 / reach**2))
        errors[groups] = noise * rms(square_root(groups), sums, rounds)
    return min(errors, key=lambda groups: errors[groups])


def _words(job: JobConfig, models: Workload) -> str:
    server = job.aggregation.server_optimizer
    if server.name not in ("fedavg", "fedavgm"):
        return f"optimised for prefix sums, as for steps of {server.name} nothing better is known"
    parts = [f"the server's momentum {models.momentum:g}"] if models.momentum else []
    parts += [] if models.is_toeplitz else ["the learning-rate schedule"]
    return f"optimised for {' and '.join(parts) or 'prefix sums'}"

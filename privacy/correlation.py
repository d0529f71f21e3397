"""Why a job's noise is correlated over rounds as it is, in words for `roundtable privacy plan`."""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import FtrlLevel
from roundtable.privacy.levels import workload
from roundtable.privacy.mechanisms.factorise import (
    Banded,
    Factorisation,
    best_factorisation,
    optimal_banded,
)
from roundtable.privacy.mechanisms.ftrl import MatrixMechanism
from roundtable.privacy.mechanisms.toeplitz import Workload, rms

MOST_BANDS = 512


def memory(factorisation: Factorisation, dimension: int) -> str:
    """What the coordinator keeps between rounds."""
    return f"{4 * factorisation.kept * dimension / 2**20:,.1f} MiB"


def correlation(job: JobConfig, ftrl: MatrixMechanism, dimension: int) -> str:
    """How noise is correlated, what it is optimised for, and what else there is."""
    assert isinstance(job.privacy, FtrlLevel)
    models, chosen = workload(job), ftrl.factorisation

    def noise(factorisation: Factorisation) -> float:
        return rms(factorisation.column(ftrl.rounds), models, ftrl.separation)

    if job.privacy.coefficients is not None:
        how = "with the job's own coefficients"
    elif job.privacy.bands is None and job.privacy.buffers is None:
        how = "which keeps the least of those with little noise"
    else:
        how = "as the job says"
    others = [
        f"{other}: {noise(other):.4g} ({memory(other, dimension)}{remark})"
        for other, remark in _others(chosen, models, ftrl.separation)
    ]
    return (
        f"Noise is correlated over rounds: {chosen}, {how}; {_words(job, models)}, over {ftrl.rounds} rounds "
        f"of which one silo's are {ftrl.separation} apart at least. Root mean square noise on the models, in "
        f"noise multipliers: {noise(chosen):.4g} ({memory(chosen, dimension)} kept); {'; '.join(others)}."
    )


def _others(chosen: Factorisation, models: Workload, separation: int) -> list[tuple[Factorisation, str]]:
    most = min(separation, models.rounds, MOST_BANDS)
    found = [
        (best_factorisation(models, separation), ""),
        (optimal_banded(models, most, separation), f", bands = {most}"),
        (Banded((1.0,)), ", independent"),
    ]
    distinct = {str(each): (each, remark) for each, remark in found if str(each) != str(chosen)}
    return list(distinct.values())


def _words(job: JobConfig, models: Workload) -> str:
    server = job.aggregation.server_optimizer
    if server.name not in ("fedavg", "fedavgm"):
        return f"optimised for prefix sums, since steps of {server.name} are no sums of the rounds"
    parts = [f"momentum {models.momentum:g}"] if models.momentum else []
    parts += [] if models.is_toeplitz else ["the learning-rate schedule"]
    return "optimised for " + ("the server's " + " and ".join(parts) if parts else "prefix sums")

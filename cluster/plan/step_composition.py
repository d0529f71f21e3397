"""Which algorithms a silo's cluster can train by: those that say all they do to a step in its description."""

from __future__ import annotations

from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.known_algorithms import BUILTINS, make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError


def check_step(job: JobConfig) -> None:
    """Raises ConfigError, with the reason, for an algorithm that needs a client's whole model or vector while
    it trains; what needs it before and after is done beside the ranks."""
    algorithm = make_algorithm(job.algorithm)
    if algorithm.goes_on() and job.algorithm.name in BUILTINS and algorithm.hooked() == "begins":
        return
    reason = ""
    if (hook := algorithm.hooked()) is not None:
        reason = f"works on a client's whole module by its {hook}"
    elif algorithm.measures:
        reason = "measures a client's whole model before the first step"
    elif algorithm.rests():
        reason = "lets parameters of a client's model rest"
    elif _needs_whole_vector(algorithm):
        reason = "works on a client's whole vector"
    if reason:
        raise ConfigError(
            f"[cluster] and algorithm {job.algorithm.name!r}: it {reason}, and a rank of the cluster may "
            "hold only a part; leave out [cluster] for this job"
        )


def _needs_whole_vector(algorithm: ClientAlgorithm) -> bool:
    ends = type(algorithm).end is not ClientAlgorithm.end
    return ends or algorithm.step().corrected or bool(algorithm.places) or type(algorithm).personal()

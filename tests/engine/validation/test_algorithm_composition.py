"""What an algorithm of somebody's own declares is held against what training looks at."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor, nn

from roundtable.core import parse_job
from roundtable.core.algorithms.contract import (
    ClientAlgorithm,
    ClientRound,
    Composition,
    SecondModel,
)
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine.validation.algorithm_composition import check_algorithm, check_exact

PRIVATE = """[privacy]
level = "example"
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-5
batch_size = 4"""


EXACT = """task = "t"
[cohort]
size = 3
minimum = 3
[evaluation]
every = 0
[aggregation.validation]
policy = "fail"
norm_ratio = "off"
[regions]
sum = false
"""
MASKS = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1e6'


class Everywhere(ClientAlgorithm):
    composition = Composition(levels=frozenset({"none", "example"}))


class Hooked(Everywhere):
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        loss, found = work.gradients()
        return loss, [None, *found[1:]]


class Resting(Everywhere):
    def resting(self, model: nn.Module) -> Sequence[str]:
        return ["weight"]


class Twofold(Everywhere):
    def second(self, round: ClientRound) -> SecondModel | None:
        return None


@pytest.mark.parametrize(("kind", "hook"), [(Hooked, "gradients"), (Resting, "resting"), (Twofold, "second")])
def test_what_steps_of_dp_sgd_would_pass_over_is_refused_under_example_level(
    kind: type[ClientAlgorithm], hook: str
) -> None:
    plain, private = parse_job('task = "t"\nrounds = 1'), parse_job(f'task = "t"\nrounds = 1\n{PRIVATE}')
    algorithm = kind(plain.algorithm)
    check_algorithm(plain, algorithm)
    with pytest.raises(PrivacyError, match=rf"its {hook}\(\) would not be asked"):
        check_algorithm(private, algorithm)
    check_algorithm(private, Everywhere(plain.algorithm))
    check_algorithm(private, make_algorithm(private.algorithm))


def test_exact_sums_go_through_relays_where_those_add_in_the_ring_alone() -> None:
    summed = EXACT.replace("sum = false", "sum = true")
    check_exact(parse_job(EXACT), "an analysis")
    check_exact(parse_job(summed + MASKS), "an analysis")
    with pytest.raises(ConfigError, match=r"nothing else than regions\.sum = false"):
        check_exact(parse_job(summed), "an analysis")


def test_a_schedule_over_the_job_ends_behind_its_warm_up() -> None:
    table = '[algorithm]\nsteps = 6\nschedule = "cosine"\nschedule_over = "job"\nschedule_warm_up = '
    job = parse_job(f'task = "t"\nrounds = 3\n{table}17')
    check_algorithm(job, make_algorithm(job.algorithm))
    job = parse_job(f'task = "t"\nrounds = 3\n{table}18')
    with pytest.raises(ConfigError, match="18 steps of warm-up: the job has 3 rounds of 6 steps"):
        check_algorithm(job, make_algorithm(job.algorithm))

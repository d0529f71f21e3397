"""A rule that no round can satisfy is refused before the first one."""

from __future__ import annotations

import pytest

from roundtable.core import parse_job
from roundtable.core.errors import ConfigError
from roundtable.engine import make_plan
from roundtable.engine.validation.feasibility import check_budget, check_rule


def check(aggregation: str, clients: int, tables: str = "") -> None:
    job = parse_job(f'task = "t"\n{tables}\n[aggregation]\n{aggregation}\n')
    check_rule(job, make_plan(job, clients), clients)


@pytest.mark.parametrize(
    ("aggregation", "clients", "tables", "message"),
    [
        ('rule = "trimmed_mean"\nparameters = { f = 5 }', 10, "", r"in a round of 10: .* n > 2f"),
        ('rule = "krum"\nparameters = { f = 4 }', 10, "", r"n > 2f \+ 2"),
        ('rule = "multi_krum"\nparameters = { f = 1, m = 11 }', 10, "", "m must be from 1 to n = 10"),
        ('rule = "median"\npre = [{ name = "nnm", f = 6 }]', 10, "", "nnm"),
        ('rule = "krum"\nparameters = { f = 2 }', 100, "[cohort]\nsize = 6", "in a round of 6"),
        (
            'rule = "krum"\nparameters = { f = 2 }',
            100,
            '[round]\nmode = "buffered"\nbuffer = 6',
            "in a round of 6",
        ),
    ],
)
def test_what_no_round_can_satisfy(aggregation: str, clients: int, tables: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(aggregation, clients, tables)


@pytest.mark.parametrize("clients", [1, 11, 300])
@pytest.mark.parametrize(
    "aggregation",
    [
        "",
        'weighting = "inverse_loss"',
        'weighting = "custom"\nweights = { north = 2.0 }',
        'rule = "median"',
        'rule = "trimmed_mean"\nparameters = { f = 0 }',
        'rule = "geometric_median"',
        'rule = "minimum_diameter_averaging"\nparameters = { f = 0 }',
        'rule = "centred_clipping"\nparameters = { tau = 1.0 }',
        'rule = "dnc"\nparameters = { f = 0 }',
        'rule = "foolsgold"',
        'rule = "monna"\nparameters = { f = 0, pivot = "north" }',
    ],
)
def test_what_a_round_may_satisfy(aggregation: str, clients: int) -> None:
    check(aggregation, clients)


def test_a_sampled_cohort_has_no_size_to_judge() -> None:
    tables = '[cohort]\nstrategy = "poisson"\nprobability = 0.5'
    check('rule = "krum"\nparameters = { f = 4 }', 10, tables)


@pytest.mark.parametrize("level", ["client", "client_local", "distributed", "dp_ftrl"])
@pytest.mark.parametrize(
    ("noise", "sound"), [("noise_multiplier = 0.2", False), ("noise_multiplier = 2.0", True), ("", True)]
)
def test_noise_that_leaves_no_first_round(level: str, noise: str, sound: bool) -> None:
    tables = '[cohort]\nsize = 10\n[evaluation]\nevery = 0\n[aggregation]\nweighting = "uniform"'
    privacy = f'[privacy]\nlevel = "{level}"\nclip_norm = 1.0\ndelta = 1e-3\nepsilon = 8.0\n{noise}'
    plan = make_plan(parse_job(f'task = "t"\nrounds = 1\n{tables}\n{privacy}\n'), 10, (slice(0, 8),))
    if sound:
        check_budget(plan)
        return
    with pytest.raises(ConfigError, match=r"would spend epsilon = .* of privacy.epsilon = 8, .*\(0\.2\)"):
        check_budget(plan)

"""What the ways of error feedback do not go together with, before round 1."""

from __future__ import annotations

import pytest
import torch

from roundtable.core import parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.layout import Layout
from roundtable.engine import make_plan
from roundtable.engine.validation.transfer_composition import check_cohort_is_all

FIXED = """
[cohort]
size = 3
minimum = 3
[aggregation]
weighting = "uniform"
[aggregation.validation]
norm_ratio = "off"
[transfer]
up = "topk(ratio=0.1)"
feedback = "ef21"
"""


def ef21(*changes: tuple[str, str]) -> JobConfig:
    text = FIXED
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_job('task = "t"' + text)


def test_a_fixed_cohort_is_taken() -> None:
    job = ef21()
    assert make_plan(job, 3).estimates
    check_cohort_is_all(job, 3)
    with pytest.raises(ConfigError, match="asks 3 of 4 clients"):
        check_cohort_is_all(job, 4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("size = 3\n", "", "set cohort.size and cohort.minimum"),
        ("minimum = 3", "minimum = 2", "set cohort.size and cohort.minimum"),
        ("minimum = 3", "minimum = 3\nover_selection = 1.5", "over_selection = 1"),
        ("minimum = 3", 'minimum = 3\nstrategy = "round_robin"', 'strategy = "uniform"'),
        ('weighting = "uniform"', "", "each with the same weight"),
        ('weighting = "uniform"', 'weighting = "uniform"\nrule = "median"', 'rule = "mean"'),
        ('norm_ratio = "off"', "", 'norm_ratio = "off"'),
        ('norm_ratio = "off"', 'norm_ratio = "off"\npolicy = "clip"\nmax_norm = 1.0', 'policy = "clip" out'),
    ],
)
@pytest.mark.filterwarnings("ignore:.*count as zero in each coordinate")
def test_anything_else_is_not(old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(ef21((old, new)), 3)


def test_nor_is_a_level_of_privacy() -> None:
    noisy = '[privacy]\nlevel = "example"\nclip_norm = 1.0\nnoise_multiplier = 1.0\ndelta = 1e-5\n[transfer]'
    with pytest.raises(PrivacyError, match="no single round's noise or masks cover"):
        make_plan(ef21(("[transfer]", noisy)), 3)


def test_momentum_at_silos_and_at_the_server_would_add_up() -> None:
    text = (
        '[transfer]\nup = "topk(ratio=0.1)"\nmomentum = 0.9\n[aggregation.server_optimizer]\nname = "fedavgm"'
    )
    with pytest.raises(ConfigError, match="both would add up"):
        make_plan(parse_job(f'task = "t"\n{text}'), 3)
    make_plan(parse_job(f'task = "t"\n{text.replace("fedavgm", "fedavg")}'), 3)


def test_the_factors_that_a_silo_keeps_are_refused_where_the_coordinator_adds_noise() -> None:
    text = """task = "t"
[cohort]
strategy = "poisson"
probability = 0.5
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "client"
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-5
[transfer]
up = "lowrank"
feedback = "off"
"""
    with pytest.raises(PrivacyError, match="set warm=false"):
        make_plan(parse_job(text), 100)
    make_plan(parse_job(text.replace('"lowrank"', '"lowrank(warm=false)"')), 100)


COMMON = """task = "t"
[privacy]
level = "none"
secure_aggregation = true
clip_norm = 1.0
[transfer]
up = "lowrank(basis=cohort)"
[evaluation]
every = 0
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("secure_aggregation = true\nclip_norm = 1.0", "", "each update travels by itself"),
        ("[evaluation]", 'down = "int8"\n[evaluation]', "rounded it would not be orthonormal"),
        (
            'level = "none"',
            'level = "distributed"\nnoise_multiplier = 1.0\ndelta = 1e-5',
            "between odd and even ones",
        ),
        (
            "[evaluation]",
            '[cohort]\nsize = 12\n[aggregation]\nrule = "centred_clipping"\n'
            "parameters = { tau = 1.0 }\n[evaluation]",
            "had another basis",
        ),
        (
            "[evaluation]",
            '[algorithm]\nname = "scaffold"\nsteps = 2\n[aggregation]\nweighting = "uniform"\n[evaluation]',
            "changes it too much",
        ),
    ],
)
def test_factors_by_the_cohorts_basis_are_for_plain_sums(old: str, new: str, words: str) -> None:
    make_plan(parse_job(COMMON), 100)
    text = COMMON.replace(old, new)
    if "distributed" in text:
        text = text.replace("secure_aggregation = true\n", "") + '[aggregation]\nweighting = "uniform"\n'
        text += "[cohort]\nsize = 4\n"
    if "centred" in text:
        text = text.replace("clip_norm", "group_size = 3\nclip_norm")
    with pytest.raises((ConfigError, PrivacyError), match=words):
        make_plan(parse_job(text), 100)


def test_a_model_without_the_basis_is_not_begun_with() -> None:
    plan, layout = make_plan(parse_job(COMMON), 100), Layout.of({"a": torch.empty(8, 9)})
    assert plan.over(layout.with_basis(4 * 17)).common
    with pytest.raises(ConfigError, match=r"comes with a basis of 0 values, and transfer\.up takes 68"):
        plan.over(layout)

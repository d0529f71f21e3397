"""A count's bounded pull on Poisson's likelihood, against sums over the distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from noisy_surveys import released, survey
from scipy import stats

from roundtable.core.analyses.noisy.bounded_counts import BoundedScore, expected
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable
from roundtable.privacy import solve_noise, sums_charge

COUNTS = np.arange(400.0)


@example(1.0, -2.0, 0.5)
@given(st.floats(0.001, 60), st.floats(-2, 80), st.floats(0.01, 90))
def test_expectations_are_sums_over_the_distribution(mean: float, center: float, bound: float) -> None:
    cut = np.clip(COUNTS - center, -bound, bound)
    wanted = float((cut * stats.poisson.pmf(COUNTS, mean)).sum())
    [found] = expected(np.array([mean]), np.array([center]), bound)
    assert found == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=25)
@given(st.floats(0.01, 59), st.floats(1, 80))
def test_pulls_of_the_models_counts_are_0_in_the_mean_whatever_the_bound(mean: float, times: float) -> None:
    """And the weight is their derivative, no less than their variance."""
    bound = times * max(1.0, np.sqrt(mean))
    chance = stats.poisson.pmf(COUNTS, mean)
    pull, weight = BoundedScore(bound, 60.0).at(COUNTS, np.full(len(COUNTS), mean))
    assert np.abs(pull).max() <= bound
    assert abs(float(pull @ chance)) < 0.01 * np.sqrt(mean)
    assert weight[0] == pytest.approx(float((pull * COUNTS) @ chance), rel=0.02, abs=1e-3)
    assert weight[0] >= float(pull**2 @ chance) * 0.98
    if bound > 60 + mean:
        assert pull[:50] == pytest.approx(COUNTS[:50] - mean, abs=1e-6)


def test_the_noise_does_not_grow_with_the_largest_count_there_may_be() -> None:
    """The same rows under a range of 12, and of 48: errors a fifth larger at most, and intervals hold."""
    draw = np.random.default_rng(0)
    age = draw.uniform(0, 100, 8000)
    visits = draw.poisson(np.exp(0.4 + 0.01 * (age - 50))) * 1.0
    noise = solve_noise(sums_charge(1.0), 2.0, 1e-6).noise_multiplier
    errors = []
    for most in (12, 48):
        columns = {"age": ColumnTable(least=0, most=100), "visits": ColumnTable(least=0, most=most)}
        asked = survey([{"ask": "poisson", "outcome": "visits", "on": ["age"]}], noise, columns)
        table = DataTable({"age": age, "visits": np.minimum(visits, 12)}, columns)
        [answer] = released(asked, [table], noise, 1)
        assert abs(answer.values["coefficients"][1] - 0.01) < 4 * answer.values["errors"][1]
        errors.append(answer.values["errors"][1])
    assert errors[1] < 1.2 * errors[0]
    assert errors[0] < 0.001

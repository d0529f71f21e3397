"""Groups under secure aggregation, simulated: the protocol and its bare sums agree; a poisoner loses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundtable.core.seeds import numpy_generator
from roundtable.privacy.secagg import combine_beacon, make_groups

GROUPED = {
    "seed": 4,
    "evaluation__every": 0,
    "simulation__clients": 9,
    "cohort__size": 9,
    "rounds": 2,
    "aggregation__rule": "trimmed_mean",
    "aggregation__parameters": {"f": 1},
    "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 50.0, "group_size": 3},
}
HOSTILE = {"simulation__attack": {"name": "sign_flip", "count": 1, "scale": 30.0}}


def test_fast_and_real_give_the_same_bits(run):
    twelve = {**GROUPED, "simulation__clients": 13, "cohort__size": 13, "cohort__minimum": 9}
    drops = {**twelve, "simulation__dropouts": {"dropout": 0.1}}
    real, fast = run(**drops), run(**drops, simulation__masking="fast")
    assert real.status == fast.status == "finished"
    assert torch.equal(real.model.vector, fast.model.vector)
    assert sum(real.history["failed"]) > 0
    for one, other in zip(real.history.records, fast.history.records, strict=True):
        assert one.charge["groups"] == other.charge["groups"]
        assert one.excluded == other.excluded


def test_the_groups_are_those_that_the_nonces_draw(run):
    result = run(**GROUPED)
    (first, second) = (record.charge["groups"] for record in result.history.records)
    cohort = result.history.records[0].cohort
    nonces = [numpy_generator(4, 1, 1, client, "nonce").bytes(32) for client in cohort]
    assert [tuple(group["members"]) for group in first] == make_groups(cohort, 3, combine_beacon(nonces))
    assert [group["members"] for group in first] != [group["members"] for group in second]


def test_a_poisoner_is_outvoted_in_its_group(run):
    honest, attacked = run(**GROUPED), run(**GROUPED, **HOSTILE)
    naive = {**GROUPED, "aggregation__rule": "mean", "aggregation__parameters": {}}
    naive["privacy"] = {"level": "none", "secure_aggregation": True, "clip_norm": 50.0}
    spoiled = run(**naive, **HOSTILE)
    safe = (attacked.model.vector - honest.model.vector).norm()
    harm = (spoiled.model.vector - honest.model.vector).norm()
    assert safe < 0.3 * harm
    charge = attacked.history.records[0].charge
    assert "the protocol ran" in charge["secure_aggregation"]
    assert [group["silos"] for group in charge["groups"]] == [3, 3, 3]


@pytest.mark.parametrize("masking", ["real", "fast"])
def test_too_few_groups_fail_the_attempt(run, masking):
    lost = {"simulation__dropouts": {"dropout": 0.3}, "cohort__minimum": 1, "cohort__retries": 0}
    result = run(**GROUPED, **lost, simulation__masking=masking)
    assert result.status == "paused"
    assert "groups are left, 3 are needed" in result.reason or "of at least 9 updates" in result.reason


def test_noise_of_each_group(run):
    privacy = {"level": "distributed", "delta": 1e-3, "noise_multiplier": 1.0, "clip_norm": 1.0}
    privacy |= {"group_size": 3}
    settings = {**GROUPED, "privacy": privacy, "aggregation__weighting": "uniform", "rounds": 1}
    settings |= {"aggregation__rule": "median", "aggregation__parameters": {}}
    private, real = run(**settings, simulation__masking="fast"), run(**settings)
    assert torch.equal(private.model.vector, real.model.vector)
    start = run(**settings | {"privacy": {**privacy, "noise_multiplier": 1e-6}})
    spread = (private.model.vector - start.model.vector).numpy().std()
    # Three shares of variance 1/2, divided by three silos; the median of three has 0.67 of one's deviation.
    assert spread == pytest.approx(0.67 * np.sqrt(3 / 2) / 3, rel=0.15)
    assert private.history.records[0].charge["level"] == "distributed"

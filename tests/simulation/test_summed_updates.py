"""Updates that a backend adds up where they are go through the validation of any others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from any_job_task import Toy

from roundtable.core import JobConfig
from roundtable.simulation import simulate


@pytest.mark.parametrize(("policy", "weighting"), [("exclude", "examples"), ("clip", "uniform")])
def test_longer_than_the_usual_are_left_out_or_clipped(run: Any, policy: str, weighting: str) -> None:
    checks = {"norm_ratio": 1.0, "policy": policy}
    settings = {"rounds": 2, "aggregation__weighting": weighting, "aggregation__validation": checks}
    reference = run(**settings)
    found = run(**settings, simulation__backend="stacked")
    assert "stacked clients" in found.backend
    assert found.history["excluded"] == reference.history["excluded"]
    assert (sum(found.history["excluded"]) > 0) is (policy == "exclude")
    torch.testing.assert_close(found.model.vector, reference.model.vector, atol=1e-5, rtol=1e-4)
    plain = run(rounds=2, aggregation__weighting=weighting, simulation__backend="stacked")
    assert not torch.allclose(found.model.vector, plain.model.vector, atol=1e-4)
    for mine, theirs in zip(found.history.records, reference.history.records, strict=True):
        assert mine.excluded.keys() == theirs.excluded.keys()
        assert mine.weights == pytest.approx(theirs.weights)


def test_a_job_may_fail_on_them(run: Any) -> None:
    checks = {"norm_ratio": 1.0, "policy": "fail"}
    ended = []
    for backend in ("sequential", "stacked"):
        found = run(rounds=1, aggregation__validation=checks, simulation__backend=backend)
        ended.append((found.status, re.sub(r"[0-9.]{5,}", "", found.reason)))
    assert "the job fails on such" in ended[0][1]
    assert ended[0] == ended[1]


def test_figures_of_single_updates_are_there_by_each_backend(run: Any) -> None:
    """A diagnosis that the job asks for, and what averaging low-rank factors has lost."""
    how = {"rounds": 1, "aggregation__diagnosis": True}
    one, other = (
        run(**how, simulation__backend=each).history.records[0] for each in ("sequential", "stacked")
    )
    assert other.diagnosis.keys() == one.diagnosis.keys() >= {"norms", "influence"}
    job = {"task": "t", "rounds": 1, "algorithm": {"steps": 2, "batch_size": 8}}
    lost = []
    for backend in ("sequential", "stacked"):
        document = {**job, "simulation": {"clients": 3, "backend": backend}}
        found = simulate(JobConfig.model_validate(document), Toy(factors=2), progress=False)
        lost.append(found.history.records[0].training["merge_error"][0])
    assert lost[1] == pytest.approx(lost[0], rel=1e-3)
    assert lost[0] > 0

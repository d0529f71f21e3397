"""What a coordinator with real agents publishes bears out the epsilon that it tells; mistakes are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from canary_silos import CONFIDENCE, audited

from roundtable.core import JobConfig
from roundtable.core.privacy_table import privacy_from
from roundtable.engine import selection
from roundtable.engine.policies import synchronous
from roundtable.privacy import CentralDP
from roundtable.privacy.audit.report import AuditReport, report
from roundtable.privacy.mechanisms.noise import KeyStream
from roundtable.server.jobs import combiner
from roundtable.server.jobs.privacy_budget import Account

LEVELS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "client": (3, {"size": 3}, {}),
    "encoded": (3, {"size": 3}, {"level": "client"}),
    "dp_ftrl": (3, {"size": 1}, {"bands": 3, "separation": 3}),
    "blt": (3, {"size": 1}, {"level": "dp_ftrl", "buffers": 2, "separation": 3}),
    "distributed": (3, {"size": 3}, {"dropout_tolerance": 0.0}),
    "client_local": (1, {"size": 1}, {}),
    "example": (1, {"size": 1}, {"population": 60, "batch_size": 12, "local_steps": 2}),
}
QUICK = ("client", "dp_ftrl", "distributed", "example")
COORDINATES = 4096
UP = "randomk(ratio=0.25, indices=cohort) | int8"


def job_of(level: str, **cohort: Any) -> JobConfig:
    _, usual, privacy = LEVELS[level]
    return JobConfig.model_validate(
        {
            "task": "t",
            "rounds": 3,
            "cohort": cohort or usual,
            "aggregation": {"weighting": "uniform"},
            "evaluation": {"every": 0},
            "transfer": {"up": UP, "feedback": "off"} if level == "encoded" else {},
            "privacy": {"level": level, "clip_norm": 0.5, "delta": 1e-3, "epsilon": 4.0, **privacy},
        }
    )


def refuted(found: AuditReport) -> list[str]:
    return [finding.name for finding in found.findings if finding.refuted]


@pytest.mark.parametrize(
    ("level", "share", "coordinates"),
    [
        *((level, 0.8, COORDINATES) for level in QUICK),
        *(
            pytest.param(level, share, coordinates, marks=pytest.mark.slow)
            for level in LEVELS
            for share, coordinates in ((0.8, COORDINATES), (0.96, 1 << 16))
            if level not in QUICK or share > 0.8
        ),
    ],
)
async def test_honest_noise_bears_out_what_is_stated_and_a_part_of_it_does_not(
    level: str, share: float, coordinates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of random-k a quarter of the coordinates shows noise.
    coordinates *= 4 if level == "encoded" else 1
    async with audited(tmp_path, job_of(level), LEVELS[level][0], coordinates) as served:
        own, told = await served.own()
        with monkeypatch.context() as mistake:
            served.weaken(share, mistake)
            less, _ = await served.own()
        faint = await served.faint(3)
    honest = report(served.canary, faint, own, CONFIDENCE, told)
    weak = report(served.canary, faint, less, CONFIDENCE)
    assert told == pytest.approx(served.canary.epsilon(), rel=1e-6)
    assert refuted(honest) == []
    assert not honest.refuted
    assert refuted(weak) == ["noise multiplier"]
    # Two estimates from 4096 draws each: their ratio deviates by 1.6 %.
    assert weak.findings[0].seen == pytest.approx(share * honest.findings[0].seen, rel=0.1)
    if level != "example":
        # Few draws leave the sampling rate open, and with it the bound on epsilon.
        assert 0.85 * honest.stated < honest.bound < honest.stated < weak.bound


CYCLIC = {"separation": 2, "bands": 2, "cohorts": "hidden"}


def cyclic_job() -> JobConfig:
    job = job_of("dp_ftrl", strategy="poisson", probability=0.4)
    table = {**job.privacy.model_dump(), "bands": None, **CYCLIC}
    return job.model_copy(update={"rounds": 6, "privacy": privacy_from(table)})


@pytest.mark.slow
async def test_amplified_correlated_noise_bears_out_what_is_stated_and_its_faults_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the noise; silos that are drawn in every round, whosever turn it is; coins that are none."""
    async with audited(tmp_path, cyclic_job(), 5, COORDINATES) as served:
        own, told = await served.own()
        with monkeypatch.context() as mistake:
            served.weaken(0.5, mistake)
            less, _ = await served.own()
        drawn = await served.faint(24)
        with monkeypatch.context() as mistake:
            mistake.setattr(synchronous, "in_turn", lambda names, *rest: names)
            undivided = await served.faint(24)
        monkeypatch.setitem(selection.STRATEGIES, "poisson", lambda names, *rest: list(names))
        always = await served.faint(24)
    honest = report(served.canary, drawn, own, CONFIDENCE, told)
    assert told == pytest.approx(served.canary.epsilon(), rel=1e-6)
    assert refuted(honest) == []
    assert not honest.refuted
    faults = {
        "noise multiplier": (drawn, less),
        "separation": (undivided, own),
        "sampling rate": (always, own),
    }
    for name, (faint, noise) in faults.items():
        found = report(served.canary, faint, noise, CONFIDENCE, told)
        assert name in refuted(found)
        assert set(refuted(found)) <= {name, "sampling rate"}
    # Few draws leave the sampling rate open, and with it the bound on epsilon where the noise is at fault.
    assert found.bound > found.stated


@pytest.mark.slow
async def test_a_cohort_that_is_always_the_same_is_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("client", strategy="poisson", probability=0.4)
    async with audited(tmp_path, job, 5, COORDINATES) as served:
        own, told = await served.own()
        drawn = await served.faint(24)
        monkeypatch.setitem(selection.STRATEGIES, "poisson", lambda names, *rest: list(names[:2]))
        always = await served.faint(32)
    honest = report(served.canary, drawn, own, CONFIDENCE, told)
    fixed = report(served.canary, always, own, CONFIDENCE, told)
    assert not honest.refuted
    assert refuted(fixed) == ["sampling rate"]
    assert fixed.bound > fixed.stated


async def test_a_batch_that_is_always_the_same_is_no_sample(tmp_path: Path) -> None:
    async with audited(tmp_path, job_of("example"), 1, COORDINATES) as served:
        own, told = await served.own()
        drawn = await served.faint(20)
        (tmp_path / "batch").touch()
        always = await served.faint(20)
    honest = report(served.canary, drawn, own, CONFIDENCE, told)
    fixed = report(served.canary, always, own, CONFIDENCE, told)
    assert not honest.refuted
    assert refuted(fixed) == ["sampling rate"]
    assert fixed.bound > fixed.stated


@pytest.mark.slow
async def test_a_batch_that_is_drawn_once_for_all_steps_of_a_round_is_found(tmp_path: Path) -> None:
    async with audited(tmp_path, job_of("example"), 1, COORDINATES) as served:
        own, told = await served.own()
        drawn, apart = await served.faint(3), await served.whole()
        (tmp_path / "once").touch()
        together = await served.whole()
    honest = report(served.canary, drawn, own, CONFIDENCE, told, apart)
    once = report(served.canary, drawn, own, CONFIDENCE, told, together)
    assert [finding.name for finding in honest.findings][3] == "draws of steps"
    assert not honest.refuted
    assert refuted(once) == ["draws of steps"]
    assert once.refuted


@pytest.mark.parametrize("level", [pytest.param("client_local", marks=pytest.mark.slow), "example"])
async def test_what_a_silo_clips_too_late_itself_is_found(level: str, tmp_path: Path) -> None:
    (tmp_path / "late").touch()
    async with audited(tmp_path, job_of(level), 1, COORDINATES) as served:
        found = await served.report(3)
    assert refuted(found) == ["change by one unit"]
    assert 1.4 < found.findings[1].seen <= 1.5
    assert found.refuted


async def test_one_silo_that_is_clipped_too_late_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = CentralDP._factors

    def late(self: CentralDP, *norms: Any) -> Any:
        found = factors(self, *norms)
        found[0] *= 1.5
        return found

    monkeypatch.setattr(CentralDP, "_factors", late)
    async with audited(tmp_path, job_of("client"), 3, COORDINATES) as served:
        found = await served.report(3)
    assert refuted(found) == ["change by one unit"]
    assert 1.4 < found.findings[1].seen < 1.5
    assert found.bound > found.stated


async def test_silos_that_do_not_rest_are_found_under_correlated_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronous, "rested", lambda names, state: names)
    monkeypatch.setitem(selection.STRATEGIES, "uniform", lambda names, *rest: list(names[:1]))
    async with audited(tmp_path, job_of("dp_ftrl"), 3, COORDINATES) as served:
        found = await served.report(3)
    assert "separation" in refuted(found)
    assert found.bound > found.stated


async def test_noise_that_is_used_in_two_rounds_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Repeated(KeyStream):
        guarantee = True

        def __init__(self) -> None:
            super().__init__(bytes(32))

    monkeypatch.setattr(combiner, "SecureNoise", Repeated)
    async with audited(tmp_path, job_of("client"), 3, COORDINATES) as served:
        found = await served.report(3)
    assert "noise multiplier" in refuted(found)
    assert found.bound > 100.0


async def test_a_release_that_the_ledger_does_not_hold_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three models are published, and two of them charged."""
    honest = {"reserve": Account.reserve, "release": Account.release}
    for name, real in honest.items():

        async def unseen(self: Account, step: Any, real: Any = real) -> None:
            if step.round != 2:
                await real(self, step)

        monkeypatch.setattr(Account, name, unseen)
    async with audited(tmp_path, job_of("client"), 3, COORDINATES) as served:
        found = await served.report(3)
    assert refuted(found) == []
    assert found.stated < 0.85 * served.canary.epsilon()
    assert found.refuted

"""`roundtable privacy audit`: a job's mechanism in a simulation, its exit code, and jobs that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from torch import Tensor

from roundtable.cli.main import run
from roundtable.core import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.privacy.audit.canary_job import CanaryJob
from roundtable.privacy.example_level import dp_sgd
from roundtable.privacy.mechanisms import central_noise, distributed, gaussian_mechanism
from roundtable.privacy.mechanisms.clipping import Clipped, clip
from roundtable.privacy.mechanisms.noise import KeyStream
from roundtable.simulation import driver
from roundtable.simulation.canary_rounds import audit_job

JOB = """
task = "absent.py:T"
rounds = 6
[cohort]
size = 5
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[simulation]
clients = 5
[privacy]
level = "client"
clip_norm = 0.3
delta = 1e-3
epsilon = 3.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def audit(file: Path, *more: str) -> int:
    return run(["privacy", "audit", str(file), "--coordinates", "4096", *more])


def test_an_honest_job_passes_and_says_how_much_was_seen(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(file, "--json", "--confidence", "0.999999") == 0
    told = json.loads(capsys.readouterr().out)
    assert 0.85 * told["stated"] < told["bound"] < told["stated"] <= 3.0
    assert [finding["name"] for finding in told["findings"]] == [
        "noise multiplier",
        "change by one unit",
        "kind of noise",
    ]


CODEC = """
import torch
import roundtable as rt

class Half(rt.Codec):
    unit = 1
    traits = rt.Traits("bounded", lambda n: 1.0, lambda n: 1.0 + 2**-8)
    def size(self, count):
        return 2 * count
    def encode(self, values, first, key):
        return values.to(torch.bfloat16).view(torch.uint8).numpy()
    def decode(self, data, out):
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch.bfloat16))
"""


def test_an_encoding_in_a_file_beside_the_job_is_audited_with_it(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "own_codec.py").write_text(CODEC)
    up = "transfer={up='randomk(ratio=0.5) | own_codec.py:Half', feedback='off'}"
    assert audit(file, "--json", "--confidence", "0.999999", "--set", up) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0.75 * told["stated"] < told["bound"] < told["stated"]


def test_half_the_noise_is_refuted_with_exit_code_1(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = central_noise.noise_onto
    monkeypatch.setattr(central_noise, "noise_onto", lambda v, std, *more: honest(v, 0.5 * std, *more))
    assert audit(file, "--rounds", "2") == 1
    said = capsys.readouterr()
    assert "REFUTED: less privacy than stated" in said.out
    assert "round 4 of 4 with canaries" in said.err


def test_noise_used_twice_leaves_no_epsilon_and_still_gives_sound_json(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Repeated(KeyStream):
        guarantee = False

        def __init__(self, *path: object) -> None:
            super().__init__(blake3(b"the same").digest())

    monkeypatch.setattr(driver, "SeededNoise", Repeated)
    assert audit(file, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["bound"] is None or told["bound"] > 100.0
    assert told["refuted"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["privacy={level='none'}"], "no differential privacy"),
        (["privacy.level='example'"], "privacy.population: the examples of a silo"),
        (["privacy.level='distributed'", "privacy.group_size=5"], "audit the job without groups"),
        (["round={mode='buffered', buffer=2}", "cohort.size=4"], "audit the job with synchronous rounds"),
        (["privacy.sigma=1"], "unknown key"),
    ],
)
def test_a_job_that_cannot_be_audited_is_refused_in_words(
    file: Path, changes: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(file, *(part for change in changes for part in ("--set", change))) == 2
    assert reason in capsys.readouterr().err


def job_of(**privacy: Any) -> JobConfig:
    cohort = privacy.pop("cohort", {})
    table = {"clip_norm": 0.3, "delta": 1e-4, "epsilon": 4.0, **privacy}
    values = {"task": "t", "rounds": 8, "cohort": cohort, "algorithm": {"steps": 3, "batch_size": 50}}
    quiet = {"aggregation": {"weighting": "uniform"}, "evaluation": {"every": 0}}
    return JobConfig.model_validate({**values, **quiet, "privacy": table})


@pytest.mark.parametrize(
    ("job", "clients"),
    [
        (job_of(level="client", cohort={"size": 6}), 20),
        (job_of(level="client", clipping="adaptive", epsilon=8.0), 60),
        (job_of(level="dp_ftrl", bands=4, cohort={"size": 3}), 12),
        pytest.param(
            job_of(
                level="dp_ftrl",
                cohorts="hidden",
                separation=4,
                cohort={"strategy": "poisson", "probability": 0.5},
            ),
            24,
            marks=pytest.mark.slow,
        ),
        (job_of(level="distributed", cohort={"size": 10}), 10),
        (job_of(level="example", population=500), 3),
    ],
    ids=["fixed size", "adaptive", "dp_ftrl", "amplified", "with dropouts", "example"],
)
def test_honest_mechanisms_are_not_refuted(job: JobConfig, clients: int) -> None:
    found = audit_job(job, clients, coordinates=2048, confidence=1.0 - 1e-6)
    assert not found.refuted
    assert 0.3 * found.stated < found.bound < found.stated


def test_a_unit_that_always_takes_part_would_stand_out_in_the_faint_rounds() -> None:
    canary = CanaryJob.of(job_of(level="example", population=100_000, delta=1e-6), 1, 64)
    assert canary.units < canary.population
    assert canary.rate == pytest.approx(50 / 100_000)
    certain = canary.rate ** canary.faint_rounds(0.999)
    assert certain * canary.units < 1e-3
    assert canary.epsilon(1e3) < 0.1 < canary.epsilon()


def late_choice(*given: Any, honest: Any = dp_sgd.choose) -> Any:
    *before, clip_norm, mode = given
    return honest(*before, 1.5 * clip_norm, mode)


def late_clip(vector: Tensor, clip_norm: float) -> Clipped:
    return clip(vector, 1.5 * clip_norm)


@pytest.mark.parametrize(
    ("job", "place", "name", "late"),
    [
        (job_of(level="example", population=200), dp_sgd, "choose", late_choice),
        (job_of(level="client_local"), gaussian_mechanism, "clip", late_clip),
    ],
    ids=["example", "client_local"],
)
def test_what_a_silo_clips_too_late_is_seen(
    job: JobConfig, place: Any, name: str, late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, late)
    found = audit_job(job, 5, coordinates=2048, rounds=2)
    change = found.findings[1]
    assert change.refuted
    assert 1.4 < change.seen < 1.5
    assert found.bound > found.stated


def test_nothing_is_concluded_where_no_canary_leaves_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of noise are for integers of a bounded norm: longer ones, clipped too late, become zeros."""
    monkeypatch.setattr(distributed, "clip", late_clip)
    with pytest.raises(PrivacyError, match="no canary left a trace"):
        audit_job(job_of(level="distributed", cohort={"size": 5}), 5, coordinates=2048, rounds=2)

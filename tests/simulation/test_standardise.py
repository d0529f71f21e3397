"""`[standardise]`: the same figures at every client and backend, frozen into the job, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.core.config import JobConfig, job_from_json, load_job
from roundtable.core.errors import AggregationError, ConfigError, PrivacyError, RoundtableError, TaskError
from roundtable.core.tables.standardise_table import StandardiseTable
from roundtable.core.task import Site
from roundtable.engine.validation.round_plan import aggregation_config
from roundtable.engine.validation.standardise_composition import check_filled, check_standardise
from roundtable.preparation import prepare
from roundtable.simulation import simulate
from roundtable.surveys import analyse, json_of, load_survey

NAMES = ("alder", "birch", "cedar")
TASK = """
import torch
from torch import nn

import roundtable as rt


class Ages(rt.Task):
    def model(self):
        return nn.Linear(1, 1)

    def data(self, site):
        table = site.table("people")
        ages = torch.tensor(table.matrix(["age"]), dtype=torch.float32).nan_to_num(0.0)
        return (ages, ages), (ages, ages)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()


class Own(Ages):
    def data(self, site):
        return (torch.ones(8, 1), torch.ones(8, 1)), None
"""
JOB = """
task = "ages.py:Ages"
rounds = 2
cohort.size = 3
[standardise]
table = "people"
[standardise.columns.age]
unit = "years"
least = 0
most = 120
missing = ["?"]
[simulation]
clients = 3
backend = "sequential"
[simulation.data]
people = [{ file = "FOLDER/alder.csv" }, { file = "FOLDER/birch.csv" }, { file = "FOLDER/cedar.csv" }]
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job beside its task and the three clients' tables."""
    for number, name in enumerate(NAMES):
        ages = np.random.default_rng(number).integers(20, 90, 40)
        lines = ["age", *("?" if place == 7 else str(age) for place, age in enumerate(ages))]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "ages.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB.replace("FOLDER", str(tmp_path)))
    return tmp_path / "job.toml"


def ages_of(folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All clients' rows together, without the missing ones."""
    lines = [(folder / f"{name}.csv").read_text().split()[1:] for name in NAMES]
    return np.array([float(line) for own in lines for line in own if line != "?"])


def table_of(job: JobConfig) -> StandardiseTable:
    assert job.standardise is not None
    return job.standardise


def test_all_clients_train_on_columns_of_the_pooled_mean_and_deviation(job: Path) -> None:
    result = simulate(job, progress=False, run_dir=job.parent / "run", overrides={"rounds": 1})
    pooled, age = ages_of(job.parent), table_of(result.job).columns["age"]
    assert age.mean == pytest.approx(pooled.mean(), rel=1e-14)
    assert age.sd == pytest.approx(pooled.std(ddof=1), rel=1e-14)
    check_filled(result.job)
    assert job_from_json(result.job.to_json()) == result.job
    site = Site("birch", 1, 3, result.job.simulation.data, standardise=table_of(result.job))
    own = site.table("people").column("age")
    raw = np.array((job.parent / "birch.csv").read_text().replace("?", "nan").split()[1:], dtype=float)
    assert np.array_equal(own, (raw - age.mean) / age.sd, equal_nan=True)
    assert np.flatnonzero(np.isnan(own)).tolist() == [7]
    whole = simulate(job, progress=False)
    resumed = simulate(job, progress=False, run_dir=job.parent / "run", resume=True)
    elsewhere = {"simulation.backend": "processes", "simulation.workers": 1}
    for other in (resumed, simulate(job, progress=False, overrides=elsewhere)):
        assert table_of(other.job) == table_of(whole.job)
        assert torch.equal(other.model.vector, whole.model.vector)
    (job.parent / "alder.csv").write_text("age\n" + "30\n40\n50\n60\n70\n")
    with pytest.raises(ConfigError, match=r"another job|differs|standardise"):
        simulate(job, progress=False, run_dir=job.parent / "run", resume=True, overrides={"rounds": 3})


def test_figures_come_out_of_the_answers_of_an_analysis(job: Path) -> None:
    survey = """
table = "people"
columns.age = { least = 0, most = 120, missing = ["?"], unit = "years" }
questions = [{ ask = "describe", columns = ["age"] }]
"""
    files = "".join(f'{name} = "{name}.csv"\n' for name in NAMES)
    (job.parent / "survey.toml").write_text(f"{survey}[silos]\n{files}")
    found = analyse(load_survey(job.parent / "survey.toml"))
    (job.parent / "found.json").write_text(json_of(found))
    text = job.read_text()
    named = text[: text.index("[standardise]")] + '[standardise]\ntable = "people"\ncolumns = ["age"]\n'
    job.write_text(f'{named}answers = "found.json"\n{text[text.index("[simulation]") :]}')
    prepared = prepare(job)
    assert table_of(prepared.job).columns["age"].sd == found[0]["age"]["all"]["sd"]
    assert "found.json, BLAKE3 " in table_of(prepared.job).source
    assert table_of(prepared.job).found == "exact"
    noised = {**found.to_dict(), "privacy": {"guarantee": True}}
    (job.parent / "found.json").write_text(json.dumps(noised))
    assert table_of(prepare(job).job).found == "noised"
    for wrong in (
        "[]",
        "{",
        '{"answers": []}',
        json.dumps({"answers": [{"ask": "describe", "answered": True, "values": {"age": {}}}]}),
    ):
        (job.parent / "found.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"found\.json"):
            prepare(job)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"task": "ages.py:Own"}, RoundtableError, r"reads its data without site\.table\('people'\)"),
        ({"standardise.columns.age": {"missing": ["?"]}}, ConfigError, "neither mean and sd, nor least"),
        ({"standardise.columns.age.kind": "category"}, ConfigError, "unit, least and most are of numbers"),
        ({"standardise.columns.age.mean": 3.0}, ConfigError, "mean and sd belong together"),
        ({"standardise.least_count": 1000}, AggregationError, "fewer rows than the least count"),
        ({"standardise.table": "others"}, ConfigError, "no table 'others'"),
        ({"simulation.clients": 4}, ConfigError, "3 tables for 4 clients"),
        ({"standardise.columns": {}}, ConfigError, "at least 1"),
        ({"standardise.answers": "nothing.json"}, ConfigError, "nothing.json cannot be read"),
        ({"aggregation.rule": "fltrust"}, ConfigError, "no silo's table"),
        (
            {"privacy": {"level": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}},
            PrivacyError,
            "carry no noise",
        ),
    ],
)
def test_what_cannot_be_done_exactly_is_refused(
    job: Path, overrides: Mapping[str, Any], error: type[RoundtableError], message: str
) -> None:
    with pytest.raises(error, match=message):
        simulate(job, progress=False, overrides=overrides)


def test_a_constant_column_and_lacking_figures_are_refused(job: Path) -> None:
    for name in NAMES:
        (job.parent / f"{name}.csv").write_text("age\n" + "50\n" * 9)
    with pytest.raises(ConfigError, match="'age' is constant over all silos"):
        simulate(job, progress=False)
    lacking = load_job(job)
    with pytest.raises(ConfigError, match="'age' has no mean and sd yet"):
        check_filled(lacking)
    site = Site("alder", 0, 3, lacking.simulation.data, standardise=lacking.standardise)
    with pytest.raises(TaskError, match="lacks figures"):
        site.table("people")
    given = {"standardise.columns.age.mean": 50.0, "standardise.columns.age.sd": 10.0}
    private = {"level": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "population": 3}
    uniform = {"aggregation.weighting": "uniform", "privacy": private, "evaluation.every": 0}
    public = load_job(job, {**given, **uniform})
    check_standardise(public, aggregation_config(public.aggregation))
    known = replace(site, standardise=table_of(load_job(job, given)))
    assert known.table("people").column("age").tolist() == [0.0] * 9

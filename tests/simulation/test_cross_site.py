"""Every model at every client: a matrix that equals each client's training and evaluation by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from roundtable.cli.main import run as run_command
from roundtable.client import LocalWork, evaluate, train
from roundtable.core import Site, initial_state, load_task
from roundtable.core.errors import ConfigError
from roundtable.simulation import simulate

HERE = Path(__file__).parent
TASK = load_task("worlds.py:Perceptron", HERE)
SETTINGS = {"rounds": 2, "simulation__clients": 3, "cohort__size": 3}


@pytest.mark.parametrize("backend", ["sequential", "vectorised", "stacked", "processes"])
def test_each_cell_is_what_training_and_measuring_by_hand_give(make_job, tmp_path, backend):
    job = make_job(**SETTINGS, simulation__backend=backend, simulation__workers=2, keep__best=True)
    job = job.model_copy(update={"stop": job.stop.model_copy(update={"metric": "accuracy"})})
    result = simulate(job, folder=HERE, run_dir=tmp_path, cross_site=True)
    table, given = result.cross_site, result.model
    assert table.clients == ["client-0", "client-1", "client-2"]
    assert list(table.rows) == ["global", *table.clients]
    assert (table.round, table.metrics) == (result.best.round, ["accuracy", "loss"])
    data = [TASK.data(Site(name, index, 3)) for index, name in enumerate(table.clients)]
    for place, name in enumerate(["global", *table.clients]):
        vector = given.vector.clone()
        if place:
            work = LocalWork(job, given.layout, given.vector, table.round + 1, name)
            vector += train(TASK, initial_state(TASK, job.seed), data[place - 1][0], work).delta
        for (_, test), client in zip(data, table.clients, strict=True):
            sums = evaluate(TASK, initial_state(TASK, job.seed), test, given.layout, vector)
            means = {metric: value / count for metric, (value, count) in sums.items()}
            assert table.rows[name][client] == pytest.approx(means, abs=1e-5)
    if backend == "sequential":
        written = list(csv.DictReader((tmp_path / "cross_site.csv").open()))
        assert len(written) == 12
        assert (tmp_path / "cross_site.png").stat().st_size > 1000
        assert table.matrix("loss")["global"]["client-1"] == table.rows["global"]["client-1"]["loss"]
        assert len(table.lines()) == 5
        assert table._repr_html_().count("<tr>") == 5
        with pytest.raises(ConfigError, match="has 'acuracy'; measured are accuracy, loss"):
            table.matrix("acuracy")
        again = simulate(job, folder=HERE, run_dir=tmp_path, resume=True, cross_site=True)
        assert again.cross_site == table


def test_models_that_nobody_may_see_or_that_are_not_whole_are_refused(make_job):
    masked = {"privacy__level": "none", "privacy__secure_aggregation": True, "privacy__clip_norm": 1.0}
    masked |= {"evaluation__every": 0}
    for changes, reason in (
        (masked, "noise and masks keep from everybody"),
        ({"model__local": ["*.weight"]}, "a part of their own"),
        ({"simulation__clients": 101}, "for at most 100"),
    ):
        with pytest.raises(ConfigError, match=reason):
            simulate(make_job(**{**SETTINGS, **changes}), folder=HERE, cross_site=True)


def test_the_command_shows_the_matrix(tmp_path, capsys):
    (tmp_path / "worlds.py").write_text((HERE / "worlds.py").read_text())
    (tmp_path / "job.toml").write_text(
        'task = "worlds.py:Perceptron"\nrounds = 1\n[simulation]\nclients = 2\nbackend = "sequential"\n'
    )
    assert run_command(["simulate", str(tmp_path / "job.toml"), "--cross-site"]) == 0
    assert "Each model (rows) at each client, after round 1:" in capsys.readouterr().out
    assert run_command(["simulate", str(tmp_path / "job.toml"), "--cross-site", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["cross_site"]
    assert [(row["model"], row["client"]) for row in rows][:3] == [
        ("global", "client-0"),
        ("global", "client-1"),
        ("client-0", "client-0"),
    ]

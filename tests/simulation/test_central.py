"""A test set at the server of a simulation: what the global model makes of it, beside the clients' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundtable.client import evaluate
from roundtable.core import Site, load_task
from roundtable.core.errors import ConfigError, TaskError
from roundtable.simulation import simulate

HERE = Path(__file__).parent
Perceptron = type(load_task("worlds.py:Perceptron", HERE))


class Examined(Perceptron):
    """With a test set at the server: other data than any client's."""

    def test_data(self, site):
        assert (site.name, site.index, site.count) == ("server", 0, 1)
        return self.data(Site("server", 0, 1, site.options))[1]


def test_a_test_set_at_the_server_is_measured_beside_the_clients_stops_and_resumes(make_job, tmp_path):
    settings = {"stop__metric": "central_accuracy", "stop__patience": 2, "keep__best": True}
    job = make_job(rounds=6, evaluation__every=2, **settings)
    whole = simulate(job, Examined())
    column = whole.history["central_accuracy"]
    data = Examined().test_data(Site("server"))
    for made in (whole.best.round, len(column)):
        model = whole.models[made]
        sums = evaluate(Examined(), Examined().model(), data, model.layout, model.vector)
        assert column[made - 1] == pytest.approx(sums["accuracy"][0] / sums["accuracy"][1])
        assert whole.history["central_loss"][made - 1] == pytest.approx(sums["loss"][0] / sums["loss"][1])
    assert whole.best.round == column.index(max(column)) + 1
    assert "central_accuracy" in whole.reason
    assert [row.get("accuracy") is None for row in whole.history[:3]] == [True, False, True]
    simulate(job, Examined(), run_dir=tmp_path, overrides={"rounds": 1, "stop.patience": 2})
    resumed = simulate(job, Examined(), run_dir=tmp_path, resume=True)
    assert (resumed.history["central_accuracy"], resumed.reason) == (column, whole.reason)
    labels = [line.get_label() for axis in whole.plot().axes for line in axis.lines]
    assert any(label.endswith("(server)") for label in labels)
    sparse = simulate(make_job(rounds=3, simulation__test_every=2), Examined())
    assert [value is None for value in sparse.history["central_loss"]] == [True, False, False]


def test_what_the_server_cannot_measure_is_refused_before_round_1(make_job):
    central = {"stop__metric": "central_loss", "stop__target": 0.1}
    with pytest.raises(ConfigError, match=r"there are none: give the task a method test_data"):
        simulate(make_job(**central), Perceptron)
    with pytest.raises(ConfigError, match=r"there are none"):
        simulate(make_job(**central, simulation__test_every=0), Examined())
    with pytest.raises(ConfigError, match=r"the local tensor .* set simulation.test_every = 0"):
        simulate(make_job(model__local=["*.weight"]), Examined())

    class Broken(Perceptron):
        def test_data(self, site):
            raise ValueError("no file test.csv")

    with pytest.raises(TaskError, match=r"test_data\(\) failed: ValueError: no file test.csv"):
        simulate(make_job(), Broken())

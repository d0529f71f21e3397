"""Algorithms of one's own in every backend: run exactly, or refused by name before anything trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundtable.client.training.batches import epoch_orders, ordering_of
from roundtable.cluster.plan.step_composition import check_step
from roundtable.core import Layout, Site, initial_state, job_from_json, load_job, load_task, parse_job
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import NumberedNames
from roundtable.simulation import simulate

HERE = Path(__file__).parent
VARIATES = {"aggregation__weighting": "uniform", "rounds": 4, "evaluation__every": 0}
MEASURED = [
    {"algorithm__name": "qfedavg", "algorithm__q": 0.5},
    {"algorithm__name": "scaffold", "algorithm__option": 1},
]
HELD = {"algorithm__name": "own_algorithms.py:Held", "algorithm__strength": 0.3}


@pytest.mark.parametrize("backend", ["auto", "vectorised", "stacked"])
def test_own_gradients_are_recorded_as_they_are(run, backend):
    damped = {"algorithm__name": "own_algorithms.py:Damped"}
    reference = run("Perceptron", **damped)
    assert not torch.allclose(reference.model.vector, run("Perceptron").model.vector, rtol=1e-3)
    result = run("Perceptron", **damped, simulation__backend=backend, simulation__workers=1)
    assert "recorded steps" in result.backend
    assert ("because" in result.backend) == (backend == "stacked")
    torch.testing.assert_close(result.model.vector, reference.model.vector, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Choosy", "a tensor's value into Python"),
        ("Placed", "'own_algorithms.py:Placed' works on each client's module by its while_training"),
    ],
)
def test_what_no_recording_says_runs_client_by_client_and_the_log_says_why(run, name, why):
    own = {"algorithm__name": f"own_algorithms.py:{name}"}
    reference = run("Perceptron", **own)
    for backend in ("vectorised", "stacked"):
        result = run("Perceptron", **own, simulation__backend=backend, simulation__workers=1)
        torch.testing.assert_close(result.model.vector, reference.model.vector, rtol=1e-5, atol=1e-7)
        assert why in result.backend


@pytest.mark.parametrize("backend", ["auto", "vectorised", "stacked"])
def test_what_a_step_says_runs_everywhere(run, backend):
    reference = run("Perceptron", algorithm__name="fedprox", algorithm__mu=0.3)
    result = run("Perceptron", **HELD, simulation__backend=backend, simulation__workers=1)
    torch.testing.assert_close(result.model.vector, reference.model.vector, rtol=2e-4, atol=2e-6)
    assert not torch.allclose(result.model.vector, run("Perceptron").model.vector, rtol=1e-3)


def test_what_rests_stays_in_recorded_steps_and_is_refused_by_stacks_and_clusters(run):
    decayed = {
        "algorithm__weight_decay": 0.1,
        "algorithm__momentum": 0.5,
        "algorithm__max_gradient_norm": 0.5,
    }
    settings = {**HELD, **decayed, "algorithm__name": "own_algorithms.py:HeldInPart"}
    reference = run("Perceptron", **settings)
    first = reference.model.layout.averaged[0]
    begun = reference.model.layout.flatten(initial_state(perceptron(), reference.job.seed))
    place = slice(first.offset, first.offset + first.size)
    assert torch.equal(reference.model.vector[place], begun[place])
    assert not torch.equal(reference.model.vector, begun)
    for backend in ("vectorised", "stacked"):
        result = run("Perceptron", **settings, simulation__backend=backend, simulation__workers=1)
        assert ("not stacked because" in result.backend) == (backend == "stacked")
        assert "recorded steps" in result.backend
        torch.testing.assert_close(result.model.vector, reference.model.vector, rtol=2e-4, atol=2e-6)
    with pytest.raises(ConfigError, match="lets parameters of a client's model rest"):
        check_step(reference.job.model_copy(update={"algorithm": fixed_head()}))


def fixed_head():
    return parse_job('task = "t"\n[algorithm]\nname = "fedbabu"\ntuning_steps = 1').algorithm


def test_workers_find_the_algorithm_where_the_job_lies(run):
    reference = run("Perceptron", **HELD)
    result = run("Perceptron", **HELD, simulation__backend="processes", simulation__workers=2)
    assert torch.equal(result.model.vector, reference.model.vector)


def test_its_table_is_checked_with_file_and_line(tmp_path):
    (tmp_path / "own_algorithms.py").write_text((HERE / "own_algorithms.py").read_text())
    file = tmp_path / "job.toml"
    file.write_text(
        'task = "t"\n[algorithm]\nname = "own_algorithms.py:Held"\nstrenght = 0.1\nstrength = 0.1'
    )
    with pytest.raises(
        ConfigError, match=r"job.toml:4: algorithm.strenght: unknown key; did you mean 'strength'"
    ):
        load_job(file)
    file.write_text('task = "t"\n[algorithm]\nname = "own_algorithms.py:Held"\nstrength = 0.1')
    job = load_job(file)
    assert job.algorithm.strength == 0.1
    assert job_from_json(job.to_json()).to_json() == job.to_json()


def test_who_has_the_job_alone_keeps_its_keys_and_does_not_run_it(run, tmp_path):
    job = parse_job(
        'task = "worlds.py:Perceptron"\n[algorithm]\nname = "own_algorithms.py:Held"\nstrenght = 1.0'
    )
    assert job_from_json(job.to_json()) == job
    with pytest.raises(ConfigError, match="strenght"):
        simulate(job, folder=HERE)
    with pytest.raises(ConfigError, match=r"there is no file .*own_algorithms.py"):
        simulate(job, folder=tmp_path)


def test_an_object_that_is_no_algorithm_is_refused(run):
    with pytest.raises(ConfigError, match=r"not a subclass of roundtable.ClientAlgorithm"):
        run("Perceptron", algorithm__name="own_algorithms.py:Ordinary")


def perceptron():
    return load_task("worlds.py:Perceptron", HERE)


def controlled_in_double(job, contributors):
    """(model, c) after rounds of SCAFFOLD with these contributors: training written out, in float64."""
    task, table, count = perceptron(), job.algorithm, job.simulation.clients
    model = initial_state(task, job.seed).double()
    layout = Layout.of(model)
    x = layout.flatten(model).double()
    c, own = torch.zeros_like(x), {}
    for round, names in enumerate(contributors, start=1):
        updates, changes = [], []
        for name in names:
            index = NumberedNames(count).index_of(name)
            (inputs, labels), _ = task.data(Site(name, index, count))
            c_i, w, steps = own.get(name, torch.zeros_like(x)), x.clone(), 0
            for order in epoch_orders(len(labels), **ordering_of(job, round, name)):
                for rows in order.split(table.batch_size):
                    for spec in layout.averaged:
                        values = w[spec.offset : spec.offset + spec.size].view(spec.shape)
                        model.state_dict()[spec.name].copy_(values)
                    loss = task.loss(model, (inputs[rows].double(), labels[rows]))
                    g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
                    w, steps = w - table.learning_rate * (g + c - c_i), steps + 1
            changes.append(-c - (w - x) / (table.learning_rate * steps))
            own[name] = c_i + changes[-1]
            updates.append(w - x)
        x = x + torch.stack(updates).mean(0)
        c = c + len(names) / count * torch.stack(changes).mean(0)
    return x, c


@pytest.mark.parametrize("name", ["own_algorithms.py:ControlVariates", "scaffold"])
@pytest.mark.parametrize("backend", ["sequential", "vectorised", "stacked", "processes"])
def test_control_variates_equal_float64_in_every_backend(run, name, backend):
    """Half of the clients a round, with unequal numbers of steps: c, each c_i and the model."""
    workers = 2 if backend == "processes" else 1
    where = {"simulation__backend": backend, "simulation__workers": workers}
    result = run("Perceptron", algorithm__name=name, **VARIATES, **where)
    assert " because " not in result.backend
    model, control = controlled_in_double(result.job, [r.contributors for r in result.history.records])
    size = result.model.layout.model.size
    torch.testing.assert_close(result.model.vector[:size].double(), model, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.model.vector[size:].double(), control, rtol=1e-3, atol=1e-4)
    assert control.abs().max() > 0.01
    assert set(result.model.state_dict()) == set(perceptron().model().state_dict())


def test_a_client_whose_update_is_lost_does_not_move_its_variate(run, tmp_path):
    """c is the mean of all c_i, which a dropout of an attempt or a failed client must not break."""
    dropouts = {"dropout": 0.4}
    result = run(
        "Perceptron", algorithm__name="scaffold", **VARIATES, simulation__dropouts=dropouts, cohort__minimum=1
    )
    contributors = [record.contributors for record in result.history.records]
    assert min(map(len, contributors)) < 5
    model, control = controlled_in_double(result.job, contributors)
    size = result.model.layout.model.size
    torch.testing.assert_close(result.model.vector[:size].double(), model, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.model.vector[size:].double(), control, rtol=1e-3, atol=1e-4)


def test_a_run_that_is_taken_up_again_ends_with_the_same_bits(run, tmp_path):
    whole = run("Perceptron", algorithm__name="scaffold", **VARIATES)
    run("Perceptron", algorithm__name="scaffold", **{**VARIATES, "rounds": 2}, _run_dir=tmp_path / "run")
    later = run("Perceptron", algorithm__name="scaffold", **VARIATES, _run_dir=tmp_path / "run", _resume=True)
    assert torch.equal(later.model.vector, whole.model.vector)


@pytest.mark.parametrize("own", MEASURED, ids=lambda own: own["algorithm__name"])
def test_what_is_measured_first_is_recorded_over_workers_dropouts_and_a_resumption(run, tmp_path, own):
    settings = {**VARIATES, **own, "simulation__dropouts": {"dropout": 0.4}, "cohort__minimum": 1}
    reference, vectorised = run("Perceptron", **settings), {**settings, "simulation__backend": "vectorised"}
    alone = run("Perceptron", **vectorised, simulation__workers=1)
    vectorised["simulation__workers"] = 2
    run("Perceptron", **{**vectorised, "rounds": 2}, _run_dir=tmp_path / "run")
    later = run("Perceptron", **vectorised, _run_dir=tmp_path / "run", _resume=True)
    assert " because " not in later.backend
    contributors = [record.contributors for record in reference.history.records]
    assert min(map(len, contributors)) < 5
    assert [record.contributors for record in later.history.records] == contributors
    assert torch.equal(later.model.vector, alone.model.vector)
    torch.testing.assert_close(later.model.vector, reference.model.vector, rtol=2e-4, atol=2e-6)
    stacked = run("Perceptron", **{**settings, "rounds": 1}, simulation__backend="stacked")
    assert "not stacked because" in stacked.backend
    assert "measures each client's model on all of its data" in stacked.backend


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aggregation__weighting": "examples"}, "weighting = 'examples' and algorithm 'scaffold'"),
        ({"aggregation__rule": "median"}, 'set rule = "mean" without pre'),
        ({"transfer__up": "bfloat16"}, "no rule for rounding it"),
        ({"algorithm__max_gradient_norm": 1.0}, "max_gradient_norm and algorithm 'scaffold'"),
        (
            {"round__mode": "buffered", "round__buffer": 2, "cohort__size": None},
            "train from different models",
        ),
        (
            {
                "privacy__level": "client",
                "privacy__delta": 1e-3,
                "privacy__noise_multiplier": 1.0,
                "privacy__clip_norm": 1.0,
            },
            "privacy.level = 'client': algorithm 'scaffold'",
        ),
        (
            {"privacy__level": "none", "privacy__secure_aggregation": True, "privacy__clip_norm": 1.0},
            "no rule for clipping it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_it_does_not_go_together_with_is_refused_by_name(run, settings, words):
    settings = {**VARIATES, **settings}
    with pytest.raises((ConfigError, PrivacyError)) as caught:
        run("Perceptron", algorithm__name="scaffold", **settings)
    assert words in str(caught.value)

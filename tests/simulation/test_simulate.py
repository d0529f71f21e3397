"""Whole runs: the engine in virtual time, the same bits for the same seed, dropouts that are reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roundtable.core import Site, load_task, open_model
from roundtable.core.errors import ConfigError, ResourceError, RoundtableError, StorageError, TaskError
from roundtable.simulation import simulate

HERE = Path(__file__).parent
Perceptron = type(load_task("worlds.py:Perceptron", HERE))


def test_training_learns_and_says_how(run):
    result = run(rounds=6, simulation__clients=6, cohort__size=6)
    assert result.status == "finished"
    assert result.history["accuracy"][-1] > 0.8
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]
    assert result.history[-1]["clients"] == 6
    assert len(result.history[2:4]) == 2
    assert result.history.to_csv().splitlines()[0].startswith("round,attempt,clients,failed,excluded")
    assert "accuracy" in repr(result)
    assert result.model.metadata["round"] == "6"
    with pytest.raises(KeyError, match="no column 'acuracy'; there are round"):
        result.history["acuracy"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(run):
    one, two, other = run(), run(), run(seed=6)
    assert torch.equal(one.model.vector, two.model.vector)
    assert one.history.records == two.history.records
    assert not torch.equal(one.model.vector, other.model.vector)


def test_nothing_of_the_process_is_left_changed(run):
    torch.manual_seed(3)
    threads, before = torch.get_num_threads(), torch.random.get_rng_state()
    queued = len(torch.cuda._queued_calls)
    run(rounds=1)
    # torch.manual_seed would queue a call and its stack trace for each client, for a GPU that is not there.
    assert len(torch.cuda._queued_calls) <= queued + 1
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), before)


def test_progress_tells_of_clients_and_rounds(run):
    heard = []
    run(_progress=heard.append, cohort__over_selection=1.0)
    rounds = [event for event in heard if event.kind == "round"]
    assert [event.round for event in rounds] == [1, 2, 3]
    assert rounds[-1].seconds_left == 0.0
    assert rounds[0].usage.memory > 1 << 20
    trained = [event for event in heard if event.kind == "clients" and event.phase == "train"]
    assert [event.done for event in trained if event.round == 2] == [1, 2, 3, 4, 5]


def test_a_task_may_be_an_object_or_a_class(make_job):
    job = make_job()
    by_name = simulate(job, folder=HERE)
    assert torch.equal(by_name.model.vector, simulate(job, Perceptron).model.vector)
    assert torch.equal(by_name.model.vector, simulate(job, Perceptron()).model.vector)


def test_overrides_apply_to_a_job_as_to_its_file(make_job):
    job = make_job()
    result = simulate(job, Perceptron, overrides={"rounds": 1, "cohort.size": 2})
    assert len(result.history) == 1
    assert result.job.cohort.size == 2
    assert result.job == make_job(rounds=1, cohort__size=2)
    with pytest.raises(ConfigError, match=r"--set cohort\.sise: cohort\.sise: unknown key"):
        simulate(job, Perceptron, overrides={"cohort.sise": 2})


def test_a_failing_client_is_named_and_the_round_goes_on(run):
    result = run("Broken", simulation__clients=5)
    assert result.status == "finished"
    reason = result.history.records[0].failures["client-1"]
    assert "data() failed for client-1: ValueError: column 'age' is missing (worlds.py, line " in reason
    assert reason.endswith(", in data)")


@pytest.mark.parametrize(
    ("task", "backend"),
    [
        ("Unlearnable", "vectorised"),
        ("LearnableOnce", "sequential"),
        ("LearnableOnce", "processes"),
        ("LearnableOnce", "vectorised"),
    ],
)
def test_a_mistake_that_all_clients_meet_ends_the_run_with_its_traceback(make_job, tmp_path, task, backend):
    """Not asked again and again; and nothing that did not train leaves a model, a table or a curve."""
    job = make_job(task, simulation__backend=backend, simulation__workers=2, algorithm__batch_size=9)
    with pytest.raises(TaskError) as told:
        simulate(job, folder=HERE, run_dir=tmp_path / "run")
    said = str(told.value)
    assert re.search(r"nothing was trained: the task fails at each of the \d clients that were tried", said)
    assert re.search(r'\n  File ".*worlds.py", line \d+, in loss\n', said)
    assert said.endswith("ValueError: no label 'outcome'")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"model.safetensors", "curves.png", "history.csv", "clients.csv"}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"right": torch.ones(9)}, "'right' is a Tensor of shape [9]"),
        ({"right": (torch.ones(2, 2), 4)}, "'right' is a tuple of 2: a Tensor of shape [2, 2], a int"),
        ([0.5], "they are a list of 1: a float"),
    ],
)
def test_a_metric_of_another_form_is_named_with_its_form_and_no_traceback(make_job, metrics, words):
    class Misshapen(Perceptron):
        def metrics(self, model, batch):
            return metrics

    with pytest.raises(TaskError) as told:
        simulate(make_job(), Misshapen())
    assert str(told.value).endswith(f"for example {{'accuracy': (correct, total)}}, and {words}")


def test_when_too_many_fail_the_job_pauses_with_the_reason(run):
    result = run(simulation__dropouts={"crash_training": 1.0}, cohort__retries=1)
    assert result.status == "paused"
    assert "crashed in training" in result.reason


@pytest.mark.parametrize("measured", [0, 1])
def test_a_metric_that_fails_at_every_client_fails_the_run(make_job, measured):
    """Before round 1, where one batch shows it, and else behind the round that shows it."""

    class Unmeasured(Perceptron):
        calls = 0

        def metrics(self, model, batch):
            self.calls += 1
            if self.calls > measured:
                raise ValueError("no column 'outcome'")
            return super().metrics(model, batch)

    if not measured:
        with pytest.raises(TaskError, match=r"each of the 3 clients .* client-0: metrics\(\) does"):
            simulate(make_job(), Unmeasured())
        simulate(make_job(evaluation__every=0), Unmeasured())
        return
    result = simulate(make_job(), Unmeasured())
    assert (result.status, len(result.history)) == ("paused", 1)
    assert "no client could evaluate the model of round 1; client-0: " in result.reason
    assert "ValueError: no column 'outcome'" in result.reason


def test_what_is_odd_of_a_task_is_said_before_the_first_round(make_job, tmp_path):
    class Everyones(Perceptron):
        def data(self, site):
            return super().data(Site("all"))

    heard = []
    simulate(make_job(rounds=1), Everyones(), run_dir=tmp_path / "run", progress=heard.append)
    notes = [event.note for event in heard if event.note is not None]
    assert notes[0].kind == "odd_task"
    assert notes[0].message.startswith("warning: data() asks neither site.shard(labels) nor site.index")
    resumed = []
    simulate(make_job(rounds=2), Everyones(), run_dir=tmp_path / "run", resume=True, progress=resumed.append)
    assert not [event for event in resumed if event.note is not None and event.note.kind == "odd_task"]


def test_the_labels_of_a_client_that_fails_are_told_where_another_one_passes(make_job):
    class Unequal(Perceptron):
        def data(self, site):
            (inputs, labels), test = super().data(site)
            return (inputs, labels + 2 if site.index == 0 else labels), test

    heard = []
    simulate(make_job(rounds=1, cohort__minimum=1), Unequal(), progress=heard.append)
    odd = [event.note.message for event in heard if event.note is not None and event.note.kind == "odd_task"]
    assert odd[0].startswith("warning: client-0: loss() does not take a batch: IndexError: ")
    assert "labels of this batch run from 2 to 4, and the model gives 3 scores: labels must be" in odd[0]
    assert odd[0].endswith("; subtract 2 from them in data()")


def test_more_clients_a_round_than_exist_are_refused(run):
    with pytest.raises(
        ConfigError, match=r"cohort\.size = 9 asks for more clients .* simulation\.clients = 8"
    ):
        run(cohort__size=9)


def test_an_empty_client_is_refused_with_the_remedy(run, tmp_path):
    (tmp_path / "tiny.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "import roundtable as rt\n"
        "class Tiny(rt.Task):\n"
        "    def model(self): return nn.Linear(2, 2)\n"
        "    def data(self, site):\n"
        "        rows = site.shard(torch.zeros(4))\n"
        "        return (torch.zeros(len(rows), 2), torch.zeros(len(rows)).long()), None\n"
        "    def loss(self, model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])\n"
    )
    job = "task = 'tiny'\n[simulation]\nclients = 9\nbackend = 'sequential'\n"
    (tmp_path / "job.toml").write_text(job)
    with pytest.raises(ConfigError, match=r"iid leaves 5 of 9 clients .* have fewer clients"):
        simulate(tmp_path / "job.toml")


def test_batchnorm_counters_stay_with_their_clients(run):
    result = run("BatchNorm", rounds=4)
    assert result.status == "finished"
    assert result.history["loss"][-1] < result.history["loss"][0]


def test_bfloat16_updates_are_rounded_as_if_they_had_travelled(run):
    exact, rounded = run(rounds=1), run(rounds=1, transfer__up="bfloat16")
    difference = (exact.model.vector - rounded.model.vector).abs().max()
    assert 0 < difference < 0.01


class TestRunDirectory:
    def test_it_holds_what_a_person_wants_to_read(self, run, tmp_path):
        result = run(_run_dir=tmp_path / "run")
        folder = tmp_path / "run"
        assert json.loads((folder / "job.json").read_text())["cohort"]["size"] == 5
        assert json.loads((folder / "environment.json").read_text())["backend"] == "sequential"
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        assert [line["record"]["round"] for line in lines] == [1, 2, 3]
        assert len((folder / "history.csv").read_text().splitlines()) == 4
        assert torch.equal(open_model(folder / "model.safetensors").vector, result.model.vector)
        assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert sorted(path.name for path in (folder / "state").iterdir()) == [
            "checkpoint.json",
            "model-3.safetensors",
            "server-3.safetensors",
        ]

    def test_a_used_folder_is_refused_and_so_is_another_job(self, run, tmp_path):
        run(_run_dir=tmp_path)
        with pytest.raises(ConfigError, match="holds a run already"):
            run(_run_dir=tmp_path)
        with pytest.raises(ConfigError, match=r"of another job: seed, simulation\.clients differ"):
            run(_run_dir=tmp_path, _resume=True, seed=9, simulation__clients=9)

    def test_a_damaged_checkpoint_is_said(self, run, tmp_path):
        run(_run_dir=tmp_path)
        (tmp_path / "state" / "checkpoint.json").write_text("{")
        with pytest.raises(StorageError, match="cannot be resumed"):
            run(_run_dir=tmp_path, _resume=True)

    def test_a_finished_run_can_be_given_more_rounds(self, run, tmp_path):
        run(_run_dir=tmp_path / "a", rounds=2)
        longer = run(_run_dir=tmp_path / "a", _resume=True, rounds=4)
        assert torch.equal(longer.model.vector, run(rounds=4).model.vector)
        assert longer.history["round"] == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("tables", "why"),
        [
            ({"algorithm__schedule": "cosine", "algorithm__schedule_over": "job"}, "the learning rates over"),
            ({"privacy": {"epsilon": 8.0}}, "follows from privacy.epsilon and the number of rounds"),
            ({"privacy": {"level": "dp_ftrl", "noise_multiplier": 1.0}}, "correlated over all rounds"),
        ],
    )
    def test_more_rounds_are_refused_where_earlier_ones_would_have_been_others(
        self, run, tmp_path, tables, why
    ):
        """Rounds whose noise is for two rounds are not the first of four; nor is their epsilon."""
        if "privacy" in tables:
            noisy = {"level": "client", "clip_norm": 1.0, "delta": 1e-3, **tables["privacy"]}
            tables = {"privacy": noisy, "evaluation__every": 0, "aggregation__weighting": "uniform"}
        settings = {**tables, "simulation__backend": "sequential"}
        run(_run_dir=tmp_path / "a", rounds=2, **settings)
        with pytest.raises(ConfigError, match=f"of 2 rounds, which cannot go on to 4: .*{why}"):
            run(_run_dir=tmp_path / "a", _resume=True, rounds=4, **settings)

    def test_more_rounds_of_a_stated_noise_spend_more(self, run, tmp_path):
        noisy = {"level": "client", "clip_norm": 1.0, "delta": 1e-3, "noise_multiplier": 1.0}
        tables = {"privacy": noisy, "evaluation__every": 0, "aggregation__weighting": "uniform"}
        run(_run_dir=tmp_path / "a", rounds=2, **tables)
        longer = run(_run_dir=tmp_path / "a", _resume=True, rounds=4, **tables)
        assert torch.equal(longer.model.vector, run(rounds=4, **tables).model.vector)

    @pytest.mark.parametrize("optimizer", ["fedavg", "fedadam"])
    @pytest.mark.parametrize("stop_at", [1, 2])
    def test_an_interrupted_run_goes_on_to_the_same_bits(self, run, tmp_path, stop_at, optimizer):
        settings = {
            "rounds": 4,
            "aggregation__server_optimizer": {"name": optimizer, "learning_rate": 0.1},
            "simulation__devices": {"speed": {"median": 20.0, "sigma": 0.5}},
            "cohort__over_selection": 1.4,
        }

        def interrupt(event):
            if event.kind == "clients" and event.round == stop_at + 1 and event.done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run("BatchNorm", **settings, _run_dir=tmp_path, _progress=interrupt)
        resumed = run("BatchNorm", **settings, _run_dir=tmp_path, _resume=True)
        whole = run("BatchNorm", **settings)
        assert torch.equal(resumed.model.vector, whole.model.vector)
        assert resumed.history.records == whole.history.records

    def test_a_killed_run_goes_on_to_the_same_bits(self, run, make_job, tmp_path):
        script = (
            "import os, signal, sys\n"
            "from pathlib import Path\n"
            "from roundtable.core import job_from_json\n"
            "from roundtable.simulation import simulate\n"
            "def die(event):\n"
            "    if event.kind == 'clients' and event.round == 3:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "job = job_from_json(Path(sys.argv[1]).read_text())\n"
            "simulate(job, folder=Path(sys.argv[2]), run_dir=sys.argv[3], progress=die)\n"
        )
        (tmp_path / "job.json").write_text(make_job(rounds=4).to_json())
        command = [sys.executable, "-c", script, tmp_path / "job.json", HERE, tmp_path / "run"]
        assert subprocess.run(command, check=False).returncode == -9
        resumed = run(rounds=4, _run_dir=tmp_path / "run", _resume=True)
        assert torch.equal(resumed.model.vector, run(rounds=4).model.vector)


def test_a_task_that_makes_no_sense_is_refused(make_job):
    class Needy(Perceptron):
        def __init__(self, argument):
            self.argument = argument

    class Broken(Perceptron):
        def __init__(self):
            raise TypeError("not yet")

    with pytest.raises(ConfigError, match="needs the parameter 'argument'"):
        simulate(make_job(), Needy)
    with pytest.raises(TaskError, match="creating it failed: TypeError: not yet"):
        simulate(make_job(), Broken)
    with pytest.raises(RoundtableError):
        simulate(make_job("Nowhere"), folder=HERE)


def test_ray_that_is_not_installed_is_said(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ResourceError, match=r"pip install .roundtable-fl\[ray\]"):
        run(simulation__backend="ray")


class TestTracking:
    def test_a_simulation_writes_what_its_history_says(self, run, tmp_path):
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        table = {"tensorboard": str(tmp_path / "runs")}
        for rounds in (2, 4):
            result = run(rounds=rounds, tracking=table, _run_dir=tmp_path / "first", _resume=rounds == 4)
        shown = EventAccumulator(str(tmp_path / "runs" / "first"))
        shown.Reload()
        assert [event.step for event in shown.Scalars("accuracy")] == [1, 2, 3, 4]
        values = [event.value for event in shown.Scalars("accuracy")]
        assert values == pytest.approx(result.history["accuracy"])
        assert {"train_loss", "clients", "time", "seconds"} <= set(shown.Tags()["scalars"])

    def test_what_is_not_installed_is_said_before_round_1(self, run, monkeypatch):
        def absent(name):
            raise ImportError(f"No module named {name!r}")

        monkeypatch.setattr("roundtable.core.observability.tracking.import_module", absent)
        with pytest.raises(ResourceError, match=r"'roundtable-fl\[wandb\]'"):
            run(tracking={"wandb": "project"})


class TestPandas:
    def test_a_history_becomes_a_frame(self, run):
        pytest.importorskip("pandas")
        history = run(evaluation__every=2).history
        frame = history.to_pandas()
        assert list(frame.columns) == history.columns
        assert frame["accuracy"].isna().tolist() == [True, False, False]
        assert frame["train_loss"].tolist() == history["train_loss"]

    def test_without_pandas_the_extra_is_named(self, run, monkeypatch):
        def absent(name):
            raise ImportError(f"No module named {name!r}")

        history = run(rounds=1).history
        monkeypatch.setattr("roundtable.simulation.reporting.history.import_module", absent)
        with pytest.raises(ResourceError, match=r"pip install 'roundtable-fl\[pandas\]'"):
            history.to_pandas()


def test_names_of_metrics_are_text_in_a_notebook_and_a_terminal(make_job):
    class Hostile(Perceptron):
        def metrics(self, model, batch):
            return {"<script>\x1b[2J": (1.0, 1)}

    history = simulate(make_job(rounds=1), Hostile()).history
    assert "<script>" not in history._repr_html_()
    assert "&lt;script&gt;" in history._repr_html_()
    assert repr(history).replace("\n", "").isprintable()


def test_changes_that_are_rounded_on_the_way_down_lose_little_and_resume(run, tmp_path):
    """Silos train from what they hold; what int4 has left out of it is in the checkpoint."""
    coarse = {"transfer": {"down": "int4(block=64)"}, "rounds": 4}
    exact, whole = run(rounds=4), run(**coarse)
    assert "as silos hold it" in whole.model.metadata["transfer"]
    off = (whole.model.vector - exact.model.vector).norm() / exact.model.vector.norm()
    assert 0 < off < 0.1
    run(**{**coarse, "rounds": 2}, _run_dir=tmp_path / "run")
    resumed = run(**coarse, _run_dir=tmp_path / "run", _resume=True)
    assert torch.equal(resumed.model.vector, whole.model.vector)


@pytest.mark.parametrize("up", ["topk(ratio=0.05) | int8", "lowrank(rank=1) | bfloat16"])
def test_error_feedback_brings_back_what_an_encoding_dropped(run, up):
    """Against float32, with and without: and a run that is the same twice is the same."""
    exact = run(rounds=6).model.vector
    distance = {}
    for feedback in ("auto", "off"):
        made = run(rounds=6, transfer__up=up, transfer__feedback=feedback).model.vector
        assert torch.equal(made, run(rounds=6, transfer__up=up, transfer__feedback=feedback).model.vector)
        distance[feedback] = float((made - exact).norm())
    assert distance["auto"] < distance["off"]


def test_ef21_and_momentum_go_on_from_what_clients_and_server_remember(run, tmp_path):
    """A resumed run ends with the same bits: g, u and e are in the checkpoint, and the server's G."""
    fixed = {
        "cohort": {"size": 8, "minimum": 8},
        "aggregation": {"weighting": "uniform", "validation": {"norm_ratio": "off"}},
        "transfer": {"up": "topk(ratio=0.2)", "feedback": "ef21"},
    }
    corrected = {"transfer": {"up": "topk(ratio=0.05, warmup=2) | int8 | zstd", "momentum": 0.5}}
    for name, job in (("ef21", fixed), ("momentum", corrected)):
        whole = run(**job, rounds=4)
        run(**job, rounds=2, _run_dir=tmp_path / name)
        resumed = run(**job, rounds=4, _run_dir=tmp_path / name, _resume=True)
        assert torch.equal(resumed.model.vector, whole.model.vector)


def test_what_does_not_go_together_is_refused_before_round_1(run):
    with pytest.raises(ConfigError, match="would see mostly zeros"):
        run(rounds=1, transfer__up="randomk(ratio=0.1)", aggregation__rule="median")
    with pytest.warns(UserWarning, match="count as zero in each coordinate"):
        run(rounds=1, transfer__up="topk(ratio=0.5)", aggregation__rule="median")


def test_the_best_and_every_kth_model_are_kept_and_a_resumed_run_keeps_the_same(make_job, run, tmp_path):
    """In memory as on disk: a run that went on ends with what one gave that was never interrupted."""
    settings = {
        "keep__every": 2,
        "stop__metric": "loss",
        "stop__patience": 3,
        # So large a step that the loss goes up again.
        "algorithm__learning_rate": 8.0,
    }
    whole = run(rounds=9, **settings)
    losses = whole.history["loss"]
    first = losses.index(min(losses)) + 1
    assert (whole.best.round, whole.best.value) == (first, min(losses))
    assert (len(losses), whole.clients.round) == (first + 3, first)
    assert list(whole.models) == sorted({0, first, len(losses), *range(2, len(losses) + 1, 2)})
    assert {made: model.metadata.get("round", "0") for made, model in whole.models.items()} == {
        made: str(made) for made in whole.models
    }
    assert torch.equal(whole.model.vector, whole.models[first].vector)
    simulate(make_job(rounds=first + 1, **settings), folder=HERE, run_dir=tmp_path)
    resumed = simulate(make_job(rounds=9, **settings), folder=HERE, run_dir=tmp_path, resume=True)
    assert (resumed.best, resumed.reason, list(resumed.models)) == (
        whole.best,
        whole.reason,
        list(whole.models),
    )
    assert torch.equal(open_model(tmp_path / "model.safetensors").vector, whole.model.vector)
    with pytest.raises(KeyError, match=r"round 99 was not kept; kept are those of rounds 0, "):
        whole.models[99]
    last = run(rounds=9, **settings, keep__best=False)
    assert (last.best, last.model.metadata["round"]) == (None, str(first + 3))
    assert last.reason.endswith("has not improved for 3 evaluations; the model is the last")
    with pytest.raises(ConfigError, match="keep differ"):
        simulate(make_job(rounds=9, **settings, keep__best=False), folder=HERE, run_dir=tmp_path, resume=True)

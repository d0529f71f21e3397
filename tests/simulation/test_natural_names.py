"""Names of clients: people see them wherever they read of clients, and nothing of a run depends on them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from roundtable.cli.main import run as run_command
from roundtable.core import parse_job
from roundtable.core.errors import ConfigError, StorageError, TaskError
from roundtable.core.measures.columns import COLUMNS
from roundtable.simulation import Progress, Result, describe_partition, simulate
from roundtable.simulation.world.natural_names import NaturalNames, checked_names
from roundtable.simulation.world.partition import make_partition
from tests.simulation.worlds import Perceptron

SITES = ["Charité", "Mayo", "Rigshospitalet"]
JOB = parse_job(
    'task = "-"\nrounds = 2\nseed = 3\n[cohort]\nminimum = 1\n[algorithm]\n'
    'batch_size = 8\nlearning_rate = 0.1\n[simulation]\nclients = 3\nbackend = "sequential"\n'
    'partition = { name = "natural" }\n'
)


class Shared(Perceptron):
    """All clients' rows in one data set; `keys` say whose each is. Training fails at one of them."""

    def __init__(self, keys=SITES, fails=None):
        super().__init__()
        self.keys, self.fails = keys, fails

    def data(self, site):
        if site.index == self.fails:
            raise RuntimeError(f"no disk at {site.name}")
        rows = torch.from_numpy(site.shard(np.repeat(np.asarray(self.keys), 12)))
        chance = torch.Generator().manual_seed(1)
        points, labels = torch.randn(36, 12, generator=chance), torch.arange(36) % 3
        return (points[rows], labels[rows]), (points[rows][:6], labels[rows][:6])


class Named(Shared):
    """The same, without keys that are names."""

    def __init__(self, names, fails=None):
        super().__init__([0, 1, 2], fails)
        self.names = names

    def client_names(self, count):
        return self.names(count) if callable(self.names) else self.names


def run(task, folder: Path | None = None, **options) -> Result:
    return simulate(JOB, task, run_dir=folder, **options)


@pytest.mark.parametrize("source", ["partition", "task"])
def test_names_stand_where_people_read_of_clients_and_change_no_bit(tmp_path: Path, source: str) -> None:
    notes: list[Progress] = []
    if source == "partition":
        task, nameless = Shared(fails=1), Shared([0, 1, 2], fails=1)
    else:
        task, nameless = Named(SITES, fails=1), Named(None, fails=1)
    named = run(task, tmp_path / "named", progress=notes.append)
    plain = run(nameless, tmp_path / "plain")
    assert torch.equal(named.model.vector, plain.model.vector)
    assert named.history.records == plain.history.records
    assert dict(named.clients.rows) == dict(plain.clients.rows)
    assert not plain.names
    assert not (tmp_path / "plain" / "clients.json").exists()
    assert next(iter(plain.clients)).keys() == {"round", "client", "loss", "accuracy"}
    # Tables, files, events and notes; both names where a program reads.
    rows = list(csv.DictReader((tmp_path / "named" / "clients.csv").open(encoding="utf-8")))
    found = [("client-0", "Charité"), ("client-2", "Rigshospitalet")]
    assert [(row["client"], row["client_name"]) for row in rows] == found
    assert [(row["client"], row["client_name"]) for row in named.clients] == found
    assert [line.split()[0] for line in named.clients.lines()[1:3]] == ["Charité", "Rigshospitalet"]
    assert "Charité" in named.clients._repr_html_()
    assert "client-" not in "\n".join([*named.clients.lines(), named.clients._repr_html_()])
    lines = [json.loads(line) for line in (tmp_path / "named" / "events.jsonl").read_text().splitlines()]
    failed = next(line for line in lines if line["client"] == "client-1")
    assert failed["client_name"] == "Mayo"
    said = "\n".join(step.note.message for step in notes if step.note is not None)
    assert "Mayo" in said
    assert "client-1" not in said
    again = run(task, tmp_path / "named", resume=True)
    assert again.names == named.names


def test_a_matrix_has_names_for_models_and_test_data(tmp_path: Path) -> None:
    table = run(Shared(), tmp_path, cross_site=True).cross_site
    assert list(table.matrix()) == ["global", "client-0", "client-1", "client-2"]
    assert [line.split()[0] for line in table.lines()] == ["accuracy", "global", *SITES]
    assert table.lines()[0].split()[1:] == SITES
    row = list(csv.DictReader((tmp_path / "cross_site.csv").open(encoding="utf-8")))[-1]
    assert (row["model"], row["model_name"]) == ("client-2", "Rigshospitalet")
    axis = table.plot().axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == SITES
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["global", *SITES]
    assert "client-" not in table._repr_html_()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (SITES[:2], "2 names for 3 clients"),
        ("abc", "a list of names is wanted"),
        (["a", "b", 3], "client 2 is 3, which is no text"),
        (["a", "b", "a"], "clients 0 and 2 are both called 'a'"),
        (["a", "b", ""], "1 to 64 characters"),
        (["a", "b", "c" * 65], "1 to 64 characters"),
        (["a", "b", " c"], "no space at either end"),
        (["a", "b", "c\x1b[2J"], r"'c\\x1b\[2J', which cannot be printed"),
        (["a", "b", "c\u202e"], r"'c\\u202e', which cannot be printed"),
        (["a", "client-0", "c"], "which tables say of something else"),
        (["a", "global", "c"], "which tables say of something else"),
        (lambda count: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_names_of_a_task_are_checked_before_round_1(names, said: str) -> None:
    with pytest.raises(TaskError, match=rf"Named.client_names\(\).*{said}"):
        run(Named(names))


def test_keys_that_are_no_names_leave_the_numbers_and_it_is_said() -> None:
    notes: list[Progress] = []
    result = run(Shared(["a", "b", "c" * 65]), progress=notes.append)
    assert not result.names
    (note,) = [step.note for step in notes if step.note is not None and step.note.kind == "nameless_clients"]
    assert "clients keep their numbers" in note.message
    assert run(Named(None)).names == NaturalNames()


def test_a_partition_names_clients_only_where_each_has_one_key() -> None:
    users = np.repeat([907, 12, 33], 4)
    natural = make_partition({"name": "natural"}, 0)
    assert natural.names(3) is None
    natural(users, 0, 3)
    assert natural.names(3) == ("12", "33", "907")
    natural(users, 0, 2)
    assert natural.names(2) is None
    # The keys of a test set that are others: then no name would be true of both.
    natural(np.repeat([907, 12, 34], 4), 0, 3)
    assert natural.names(3) is None
    assert make_partition({"name": "natural"}, 0).assignment(np.repeat([0.5, 1.5], 2), 2).names is None
    report = describe_partition({"name": "natural"}, users, 3)
    assert [line.split()[0] for line in str(report).splitlines()[-3:]] == ["12", "33", "907"]
    assert [tick.get_text() for tick in report.plot().axes[0].get_xticklabels()] == ["12", "33", "907"]


def test_a_partition_of_ones_own_may_name_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numpy as np\n"
        "def halves(labels, count, seed, *, second: str = 'south'):\n"
        "    return np.arange(len(labels)) % count, ['north', second]\n"
    )
    spec = {"name": "own.py:halves"}
    assert make_partition(spec, 0, tmp_path).assignment(np.zeros(6), 2).names == ("north", "south")
    with pytest.raises(ConfigError, match="clients 0 and 1 are both called 'north'"):
        make_partition({**spec, "second": "north"}, 0, tmp_path).assignment(np.zeros(6), 2)


def test_the_hospitals_of_the_example_have_their_names(root: Path, tmp_path: Path, capsys) -> None:
    ask = ["simulate", str(root / "examples/heart/job.toml"), "--set", "rounds=1", "--run-dir", str(tmp_path)]
    assert run_command([*ask, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    names = [row["client_name"] for row in values["clients"]]
    assert names == ["cleveland", "hungarian", "switzerland", "va"]
    assert run_command([*ask, "--resume"]) == 0
    assert "cleveland" in capsys.readouterr().out
    (tmp_path / "clients.json").write_text('{"client-0": "a\\u202eb"}')
    with pytest.raises(StorageError, match="delete it, and clients have numbers"):
        simulate(root / "examples/heart/job.toml", overrides={"rounds": 1}, run_dir=tmp_path, resume=True)


def test_names_in_a_sentence_are_whole_words() -> None:
    names = NaturalNames({"client-1": "Mayo", "client-12": "Ulm"})
    assert names.said("client-1, client-12 and client-123 of myclient-1") == (
        "Mayo, Ulm and client-123 of myclient-1"
    )
    assert checked_names(SITES, 3) == tuple(SITES)


@pytest.mark.parametrize("name", ["client_name", "round", "model", "train_loss", "central_loss"])
def test_no_metric_overwrites_a_column(tmp_path: Path, name: str) -> None:
    """Neither one that a task measures nor one that a job works out of others; and before anything trains."""

    class Overwrites(Named):
        def metrics(self, model, batch):
            return {name: (1.0, len(batch[1]))}

    notes: list[Progress] = []
    with pytest.raises(TaskError, match=f"{name!r} is a column .* call it another name, such as 'my_{name}'"):
        run(Overwrites(SITES), tmp_path / "run", progress=notes.append)
    assert not any(step.kind == "round" for step in notes)
    with pytest.raises(ConfigError, match=f"{name!r} is a column"):
        parse_job(f'task = "t"\n[metrics]\n{name} = "2*loss"\n')


def test_every_column_of_the_tables_is_one_that_no_metric_takes() -> None:
    result = run(Named(SITES))
    known = COLUMNS | {"loss", "accuracy"}
    for table in (result.history, result.clients):
        assert {name for row in table for name in row if not name.startswith(("train_", "before_"))} <= known

"""The doctor tries each task of a silo in a training process, and leaves everything as it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_port

from roundtable.client.policy.config import load_agent_config
from roundtable.client.policy.known_jobs import KnownJob, KnownJobs
from roundtable.core.config import JobConfig
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.doctor.inquiries import Check, answers
from roundtable.doctor.task_checks import trials

TASK = """
import json, sys, time, torch
from pathlib import Path
from torch.utils.data import IterableDataset
import roundtable as rt

class Sound(rt.Task):
    def model(self):
        return torch.nn.Linear(2, 1)
    def data(self, site):
        Path(site.options["told"]).write_text(site.name)
        rows = torch.ones(40, 2)
        return (rows, rows[:, :1]), (rows, rows[:, :1])
    def loss(self, model, batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()

class Sized(Sound):
    def __init__(self, hidden, depth, dropout=0.0):
        pass

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(2), torch.ones(1)

class Stream(Sound):
    def data(self, site):
        return Endless(), Endless()

class NoModel(Sound):
    def model(self):
        raise RuntimeError("no weights in the cupboard")

class NoData(Sound):
    def data(self, site):
        return torch.load(site.options["absent"]), None

class NoTests(Sound):
    def metrics(self, model, batch):
        raise KeyError("the truth about Jane Doe")

class Hangs(Sound):
    def model(self):
        time.sleep(1000)
"""


@pytest.fixture
def silo(tmp_path: Path) -> Path:
    """The folder of a silo that is enrolled and has tasks.py."""
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "north", "agent", tmp_path / "credentials")
    (tmp_path / "tasks.py").write_text(TASK)
    (tmp_path / "broken.py").write_text("import cupboard\n")
    return tmp_path


def tried(folder: Path, rehearsal: str = "5m", **tasks: str) -> list[Check]:
    """What the doctor says of these tasks."""
    return list(answers(trials(load_agent_config(write(folder, rehearsal, **tasks)), skip=False)))


def write(folder: Path, rehearsal: str = "5m", **tasks: str) -> Path:
    names = "".join(f"{name} = {json.dumps(reference)}\n" for name, reference in tasks.items())
    file = folder / "agent.toml"
    file.write_text(
        f'coordinator = "127.0.0.1:{free_port()}"\n[limits]\ndevice = "cpu"\nrehearsal = "{rehearsal}"\n'
        f'[tasks]\n{names}[data]\ntold = "{folder}/told"\nabsent = "{folder}/absent.pt"\n'
        "[policy]\nepsilon = 3\n"
    )
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def children() -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                yield (entry / "cmdline").read_text()
        except OSError:
            continue


def test_what_fails_is_named_with_its_place_and_the_others_are_tried(silo: Path) -> None:
    checks = tried(
        silo,
        imports="broken.py",
        model="tasks.py:NoModel",
        data="tasks.py:NoData",
        tests="tasks.py:NoTests",
        sound="tasks.py:Sound",
    )
    imports, model, data, tests, sound, memory, disk = checks
    assert [check.state for check in checks] == ["fail"] * 4 + ["ok"] * 3, checks
    assert "imports: the silo cannot import its code: " in imports.message
    assert "No module named 'cupboard'" in imports.message
    assert f"`cd {silo} && " in imports.remedy
    assert "model: the silo cannot make its model: " in model.message
    assert "RuntimeError in tasks.py" in model.message
    assert "no weights in the cupboard" in model.message
    assert "data: the silo cannot open its data: " in data.message
    assert f"No such file or directory: '{silo}/absent.pt'" in data.message
    assert "mend [data] of agent.toml" in data.remedy
    assert "tests: the silo cannot evaluate one batch: " in tests.message
    assert "KeyError in tasks.py" in tests.message
    assert sound.message == "sound: a batch of 32 trained on, one evaluated"
    assert "MiB are free" in memory.message
    assert "room for 6 such" in disk.message
    assert (silo / "told").read_text() == "north"
    assert not any("roundtable.client.worker" in command for command in children())


def remember(folder: Path, task: object, name: str, **tables: object) -> None:
    """The silo took part in such a job."""
    job = JobConfig.model_validate({"task": task, **tables})
    known = KnownJob(name, job.digest, job.to_json(), job.task.name, "", "", "0" * 64, time.time())
    KnownJobs(folder / "state").remember(known)


@pytest.mark.slow
def test_a_task_that_waits_for_a_jobs_values_is_not_tried_and_does_not_fail(silo: Path) -> None:
    (check,) = tried(silo, sized="tasks.py:Sized")
    assert check.state == "warn"
    assert check.remedy == '`parameters = ["hidden", "depth"]` below [tasks.sized]'
    file = write(silo)
    table = '[tasks.sized]\nuse = "tasks.py:Sized"\nparameters = ["depth", "hidden"]\n'
    file.write_text(file.read_text() + table)
    (check,) = answers(trials(load_agent_config(file), skip=False))
    assert (check.state, check.name) == ("ok", "rehearsal")
    assert "sized: not tried: it needs a job's `[task]` values (hidden, depth)" in check.message
    task = {"name": "sized", "hidden": 3, "depth": 2}
    remember(silo, task, "b" * 12)
    done, *_ = answers(trials(load_agent_config(file), skip=False))
    assert done.message == "sized: a batch of 32 trained on, one evaluated"


@pytest.mark.slow
def test_a_silo_that_answers_analyses_is_tried_by_its_tables(silo: Path) -> None:
    file = write(silo, analysis="analysis")
    file.write_text(f'{file.read_text()}[data.people]\nfile = "people.csv"\n[data.people.columns.age]\n')
    (silo / "people.csv").write_text("age\n" + "50\n" * 9)

    def said() -> Check:
        return next(answers(trials(load_agent_config(file), skip=False)))

    assert said().state == "ok", said()
    asked = {
        "name": "analysis",
        "table": "people",
        "columns": {"age": {"least": 0, "most": 120}},
        "questions": [{"ask": "describe", "columns": ["age"]}],
    }
    remember(silo, "analysis", "c" * 12, algorithm=asked, aggregation={"weighting": "uniform"})
    assert said().state == "ok", said()
    (silo / "people.csv").write_text("age\nfifty\n")
    assert said().state == "fail"
    assert "column 'age', row 1: not a finite number" in said().message


def test_nothing_is_spent_kept_or_moved(silo: Path) -> None:
    """A job at example level would charge the silo's account, a stream's round would move its place in it."""
    private = {"level": "example", "epsilon": 2.0, "delta": 1e-5, "clip_norm": 1.0}
    remember(silo, "sound", "job-1", rounds=2, algorithm={"batch_size": 7}, privacy=private)
    remember(silo, "stream", "job-2", algorithm={"batch_size": 5, "steps": 1000})
    kept = silo / "state" / "jobs" / "job-2" / "round-3.1.safetensors"
    kept.parent.mkdir()
    kept.write_bytes(b"the place in the stream")
    before = contents(silo / "state")
    checks = tried(silo, sound="tasks.py:Sound", stream="tasks.py:Stream")
    assert [check.message for check in checks if check.name == "rehearsal"] == [
        "sound: a batch of 7 trained on, none evaluated, as its job allows no evaluation",
        "stream: a batch of 5 trained on, one evaluated",
    ]
    assert contents(silo / "state") == before
    assert not (silo / "state" / "privacy").exists()
    assert not (silo / "state" / "spool").exists()


def test_a_task_that_hangs_is_told_after_its_time(silo: Path) -> None:
    (check,) = tried(silo, "1s", hangs="tasks.py:Hangs")
    assert check.state == "fail"
    assert check.message.endswith("it was not done after 1 s; [limits] rehearsal gives more")
    assert not any("roundtable.client.worker" in command for command in children())


@pytest.mark.slow
def test_the_limits_of_rounds_hold(silo: Path) -> None:
    (silo / "big.py").write_text(TASK.replace("torch.ones(40, 2)", "torch.ones(1 << 29, 2)"))
    file = write(silo, big="big.py:Sound")
    file.write_text(file.read_text() + 'max_memory = "1GiB"\n')
    (check,) = answers(trials(load_agent_config(file), skip=False))
    assert check.state == "fail"
    assert "cannot open its data: the training process holds" in check.message
    assert "[policy] max_memory" in check.message


def test_code_that_the_silo_has_not_allowed_is_not_run(silo: Path) -> None:
    (silo / "sneaky.py").write_text(f"open({str(silo / 'ran')!r}, 'w')\n")
    file = write(silo, sneaky="sneaky.py")
    pinned = f'sneaky = {{ use = "sneaky.py", blake3 = "{"0" * 64}" }}'
    file.write_text(file.read_text().replace('sneaky = "sneaky.py"', pinned))
    (check,) = answers(trials(load_agent_config(file), skip=False))
    assert (check.state, "blake3" in check.message) == ("fail", True)
    assert not (silo / "ran").exists()


def test_it_can_be_left_out(silo: Path) -> None:
    (check,) = tried(silo, "0s", hangs="tasks.py:Hangs")
    assert (check.state, check.message) == ("ok", "not tried: [limits] rehearsal = 0")
    (check,) = answers(trials(load_agent_config(write(silo, hangs="tasks.py:Hangs")), skip=True))
    assert check.message == "not tried: --no-rehearsal"
    assert not (silo / "told").exists()

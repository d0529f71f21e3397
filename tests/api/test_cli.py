"""The command line without a coordinator: what it prints, its exit codes, and one message a mistake."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from roundtable.cli.jobs.job_view import in_one_line
from roundtable.cli.main import cli, run
from roundtable.core import load_job, parse_job
from roundtable.core.evidence.release import release
from roundtable.proto import operator_pb2

Command = Any
ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command(roundtable: Command) -> None:
    said = roundtable("--help")
    assert said.code == 0
    for name in (
        "ca",
        "client",
        "clients",
        "compare",
        "completion",
        "demo",
        "doctor",
        "job",
        "privacy",
        "server",
        "simulate",
        "sweep",
        "task",
    ):
        assert f"  {name} " in said.out


def test_every_command_says_in_one_line_of_a_terminal_what_it_does() -> None:
    def cut(group: click.Group, path: str) -> list[str]:
        room = 80 - 2 - 6 - max(len(name) for name in group.commands)
        found = []
        for name, command in group.commands.items():
            if command.get_short_help_str(room).endswith("..."):
                found.append(f"{path} {name}")
            if isinstance(command, click.Group):
                found += cut(command, f"{path} {name}")
        return found

    assert cut(cli, "roundtable") == []


def test_usage_errors_are_exit_code_2(roundtable: Command) -> None:
    for line in (["nonsense"], ["job"], ["job", "check"], ["ca", "issue", "a", "--role", "king"]):
        said = roundtable(*line)
        assert said.code == 2, line
        assert "Usage" in said.err
    role = roundtable("operator", "revoke", "nobody").err.splitlines()[-1]
    assert role.endswith("Choose from: relay, viewer, data-scientist, operator, admin")
    assert "ROUNDTABLE_COORDINATOR" in roundtable("job", "list").err
    assert "ROUNDTABLE_CREDENTIALS" in roundtable("clients", "list", "--coordinator", "a:1").err


def test_version(roundtable: Command) -> None:
    assert roundtable("--version").out == roundtable("version").out
    found = json.loads(roundtable("version", "--json").out)
    assert (found["roundtable"], found["commit"]) == release()
    migrations = ROOT / "server" / "migrations" / "versions"
    assert found["schema"] == sorted(file.stem[1:5] for file in migrations.glob("v*.py"))[-1]
    assert found["protocol"] == "1"
    assert f"commit {release().commit}" in roundtable("version").out.splitlines()


@pytest.mark.parametrize(
    ("shell", "sign"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete ")]
)
def test_completion_scripts(roundtable: Command, shell: str, sign: str) -> None:
    said = roundtable("completion", shell)
    assert said.code == 0
    assert sign in said.out
    assert "_ROUNDTABLE_COMPLETE" in said.out


def test_check_says_what_the_job_is(roundtable: Command, job_file: Path) -> None:
    said = roundtable("job", "check", job_file)
    assert said.code == 0
    assert "job.toml is valid" in said.out
    assert "tensors that do not travel: none\n" in said.out
    found = json.loads(roundtable("job", "check", job_file, "--json", "--set", "rounds=9").out)
    assert (found["task"], found["parameters"], found["rounds"]) == ("Small", 3, 9)


def test_check_names_of_many_tensors_the_first() -> None:
    """An adapter's job has a frozen tensor for each layer of its base."""
    names = [f"layer.{number}" for number in range(1200)]
    assert in_one_line(names) == "layer.0, layer.1, layer.2 and 1,197 more (--json)"
    assert in_one_line(names[:3]) == "layer.0, layer.1, layer.2"
    assert in_one_line(7) == "7"


def test_resolved_shows_every_default_and_is_itself_a_job(roundtable: Command, job_file: Path) -> None:
    job = load_job(job_file)
    said = roundtable("job", "show", "--resolved", job_file)
    assert parse_job(said.out) == job
    for table in (
        "model",
        "cohort",
        "algorithm",
        "aggregation",
        "privacy",
        "evaluation",
        "stop",
        "transfer",
        "simulation",
    ):
        assert f"\n[{table}]\n" in said.out
        for field in type(getattr(job, table)).model_fields:
            assert f"{field} " in said.out or f".{field}]" in said.out
    assert 'level = "none"                            # no differential privacy' in said.out
    assert json.loads(roundtable("job", "show", "--resolved", job_file, "--json").out)["rounds"] == 2


@pytest.mark.parametrize(
    "values",
    [
        'simulation.data = {path = "a \\"quoted\\" é"}\nrounds = 1',
        'privacy = {level = "client", epsilon = 8, delta = 1e-5, clip_norm = 1.0}',
        'aggregation.rule = "trimmed_mean"\naggregation.parameters = {f = 1}',
        'simulation.partition = {name = "dirichlet", alpha = 1e-3}',
        'simulation.data = {"a b" = [1, 2.5, true]}',
    ],
)
def test_resolved_round_trips_odd_values(roundtable: Command, tmp_path: Path, values: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'task = "t"\n{values}', encoding="utf-8")
    said = roundtable("job", "show", "--resolved", path)
    assert parse_job(said.out) == load_job(path)


def test_set_takes_toml_values_and_bare_words(roundtable: Command, job_file: Path) -> None:
    said = roundtable(
        "job", "show", "--resolved", job_file, "--json",
        "--set", "cohort.strategy=round_robin",
        "--set", "algorithm.learning_rate = 0.5",
        "--set", 'aggregation.pre=[{name = "nnm", f = 1}]',
    )  # fmt: skip
    found = json.loads(said.out)
    assert found["cohort"]["strategy"] == "round_robin"
    assert found["algorithm"]["learning_rate"] == 0.5
    assert found["aggregation"]["pre"] == [{"name": "nnm", "f": 1}]
    assert roundtable("job", "check", job_file, "--set", "rounds").code == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[cohort]\nsizes = 2", r"job.toml:4: cohort.sizes: unknown key; did you mean 'size'?"),
        ('rounds = "ten"', "job.toml:3: rounds:"),
        ("rounds = ", "not valid TOML"),
        ("[aggregation]\nrule = 'meen'", "meen"),
        ("[cohort]\nsize = 6\n[aggregation]\nrule = 'krum'\nparameters = { f = 2 }", "krum needs n > 2f + 2"),
        ("[simulation.dropouts]\ndropuot = 0.1", "simulation.dropouts: dropuot: unknown key"),
        (
            "[simulation]\npartition = { name = 'dirichlt' }",
            "simulation.partition.name: unknown partition 'dirichlt'",
        ),
        ("[simulation.attack]\nname = 'alie'", "simulation.attack: say how many attack"),
        ("[model]\nlocal = ['haed.*']", "model.local: the pattern 'haed.*' fits none"),
        ("rounds = 0", "job.toml:3: rounds: Input should be greater than or equal to 1"),
        (
            "privacy = { level = 'client', clip_norm = 1, delta = 1e-5, epsilon = 8, bnads = 2 }",
            "privacy.bnads: unknown key",
        ),
        ("[aggregation]\nrule = 'trimmed_mean'\nparameters = { f = -1 }", "f counts byzantine silos"),
    ],
)
def test_a_wrong_job_file_is_one_message(
    roundtable: Command, tmp_path: Path, job_file: Path, change: str, message: str
) -> None:
    job_file.write_text(f'task = "small"\n\n{change}\n')
    said = roundtable("job", "check", job_file)
    assert said.code == 2
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err


def test_check_warns_of_rounds_that_cannot_be_simulated(roundtable: Command, job_file: Path) -> None:
    settings = ("--set", "cohort.size=20", "--set", "simulation.clients=5")
    said = roundtable("job", "check", job_file, *settings)
    assert said.code == 0
    assert "It cannot be simulated: cohort.size = 20" in said.out


def test_a_file_with_a_byte_order_mark_is_read(roundtable: Command, job_file: Path) -> None:
    job_file.write_text("\ufeff" + job_file.read_text())
    assert roundtable("job", "check", job_file).code == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("missing", "task 'missing' not found"),
        ("broken", "running"),
        ("no_such_module:Task", "No module named 'no_such_module'"),
        ("small.py:Large", "has no 'Large'"),
    ],
)
def test_a_task_that_cannot_be_imported(
    roundtable: Command, tmp_path: Path, job_file: Path, task: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    said = roundtable("job", "check", job_file, "--set", f"task={task}")
    assert said.code == 2
    assert roundtable("simulate", job_file, "--set", f"task={task}").code == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_a_missing_job_file(roundtable: Command, tmp_path: Path) -> None:
    said = roundtable("job", "check", tmp_path / "none.toml")
    assert said.code == 2
    assert "none.toml: cannot be read" in said.err


def test_ca_init_and_issue(roundtable: Command, tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    assert roundtable("ca", "init", ca).code == 0
    again = roundtable("ca", "init", ca)
    assert again.code == 1
    assert "already exists" in again.err
    hub = ["ca", "issue", "hub", "--role", "coordinator", "--ca", ca, "--out", tmp_path / "hub"]
    without = roundtable(*hub)
    assert without.code == 1
    assert "--host" in without.err
    said = roundtable(*hub, "--host", "localhost")
    assert said.code == 0
    names = {path.name for path in (tmp_path / "hub").iterdir()}
    assert names == {"ca.crt", "node.crt", "node.key", "identity.crt", "identity.key"}
    assert roundtable(*hub[:-1], tmp_path / "enrolling", "--host", "localhost", "--enrols").code == 0
    assert (tmp_path / "enrolling" / "issuing.key").stat().st_mode & 0o077 == 0
    described = subprocess.run(
        ["openssl", "x509", "-in", tmp_path / "hub" / "node.crt", "-noout", "-text"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for sign in (
        "CN = hub",
        "OU = coordinator",
        "DNS:localhost",
        "TLS Web Server Authentication",
        "prime256v1",
    ):
        assert sign in described


def test_nothing_listens(roundtable: Command, tmp_path: Path) -> None:
    roundtable("ca", "init", tmp_path / "ca")
    roundtable("ca", "issue", "ada", "--role", "operator", "--ca", tmp_path / "ca", "--out", tmp_path / "ada")
    said = roundtable("job", "list", "--coordinator", "127.0.0.1:9", "--credentials", tmp_path / "ada")
    assert said.code == 1
    assert "nothing listens at 127.0.0.1:9" in said.err
    assert len(said.err.strip().splitlines()) == 1
    malformed = roundtable("job", "list", "--coordinator", "here", "--credentials", tmp_path / "ada")
    assert malformed.code == 2
    assert "host:port" in malformed.err
    nobody = roundtable("job", "list", "--coordinator", "127.0.0.1:9", "--credentials", tmp_path / "none")
    assert nobody.code == 1
    assert "roundtable ca issue" in nobody.err


def test_doctor(roundtable: Command, tmp_path: Path) -> None:
    roundtable("ca", "init", tmp_path / "ca")
    roundtable("ca", "issue", "ada", "--role", "operator", "--ca", tmp_path / "ca", "--out", tmp_path / "ada")
    said = roundtable(
        "doctor",
        "--json",
        "--listen",
        "127.0.0.1:0".replace(":0", ":39999"),
        "--credentials",
        tmp_path / "ada",
    )
    checks = {check["name"]: check for check in json.loads(said.out)}
    assert set(checks) == {
        "python",
        "versions",
        "gpu",
        "disk",
        "port",
        "certificates",
        "coordinator",
        "clock",
        "demo",
    }
    assert checks["certificates"]["state"] == "ok"
    assert "operator 'ada'" in checks["certificates"]["message"]
    (tmp_path / "ada" / "node.key").chmod(0o644)
    loose = json.loads(roundtable("doctor", "--json", "--credentials", tmp_path / "ada").out)
    assert any(c["state"] == "warn" and "chmod 600" in c["remedy"] for c in loose)
    failing = roundtable("doctor", "--credentials", tmp_path / "nobody")
    assert failing.code == 1
    assert "fail    certificates" in failing.out


def test_simulate(roundtable: Command, job_file: Path, tmp_path: Path) -> None:
    said = roundtable("simulate", job_file, "--json", "--run-dir", tmp_path / "run")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["status"] == "finished"
    assert [row["round"] for row in found["history"]] == [1, 2]
    again = roundtable("simulate", job_file, "--run-dir", tmp_path / "run")
    assert again.code == 2
    assert "holds a run already" in again.err
    assert roundtable("simulate", job_file, "--resume").code == 2
    lines = roundtable("simulate", job_file).out
    assert "round 2/2" in lines
    assert "finished" in lines


def test_a_task_is_tried_and_explained(roundtable: Command, job_file: Path) -> None:
    task = job_file.parent / "small.py"
    said = roundtable("task", "check", task)
    assert said.code == 0, said.err
    assert "4 to train on, no test data; a batch of 32: [4, 2] float32, [4, 1] float32" in said.out
    assert "One thing is odd:\n  1. data() asks neither site.shard(labels) nor" in said.out
    wrong = task.with_name("wrong.py")
    wrong.write_text(task.read_text().replace("torch.ones(4, 2)", "{}[site.name]"))
    failed = roundtable("task", "check", f"{wrong}:Small", "--job", job_file, "--client", 1, "--json")
    assert failed.code == 1
    found = json.loads(failed.out)
    assert (found["client"], found["failed"], found["odd"][0]["about"]) == ("client-1", "data", "data")
    assert "KeyError: 'client-1' (wrong.py, line 4, in data)" in found["odd"][0]["says"]
    nobody = roundtable("task", "check", task, "--job", job_file, "--client", 2)
    assert (nobody.code, nobody.err.count("\n")) == (2, 1)
    assert "--client 2: simulation.clients = 2, so the last one is 1" in nobody.err
    assert roundtable("task", "check", task, "--set", "algorithm.steps=none").code == 2


def test_a_simulation_goes_on_after_ctrl_c(roundtable: Command, job_file: Path, tmp_path: Path) -> None:
    line = ["simulate", str(job_file), "--run-dir", str(tmp_path / "run"), "--set"]
    process = subprocess.Popen(
        [sys.executable, "-m", "roundtable", *line, "rounds=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for said in process.stdout:
        if "round      3/100000" in said:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"roundtable simulate {job_file} --run-dir {tmp_path / 'run'} --resume --set rounds=100000`" in err
    assert "Traceback" not in err
    done = len((tmp_path / "run" / "history.jsonl").read_text().splitlines())
    resumed = roundtable(*line, f"rounds={done + 1}", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    rounds = [row["round"] for row in json.loads(resumed.out)["history"]]
    assert rounds == list(range(1, done + 2))


def test_sweep_and_compare(roundtable: Command, job_file: Path, tmp_path: Path) -> None:
    folder, curves, listed = tmp_path / "runs", tmp_path / "curves.png", tmp_path / "runs.toml"
    said = roundtable("sweep", job_file, "--out", folder, "--vary", "algorithm.learning_rate=[0.1, 0.2]")
    assert said.code == 0, said.err
    assert "algorithm.learning_rate" in said.out
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    rows = json.loads(roundtable("compare", *runs, "--json", "--plot", curves).out)
    assert [row["algorithm.learning_rate"] for row in rows] == [0.1, 0.2]
    assert curves.read_bytes().startswith(b"\x89PNG")
    listed.write_text('[[run]]\nrounds = 1\n"cohort.size" = 1\n')
    single = roundtable("sweep", job_file, "--out", tmp_path / "single", "--runs", listed, "--json")
    assert [row["rounds"] for row in json.loads(single.out)] == [1]
    assert roundtable("sweep", job_file, "--out", folder).code == 2
    assert roundtable("compare", tmp_path).code == 1


def test_privacy_plan_compares_before_anything_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "digits" / "job.toml"
    table = 'privacy={level="client",clip_norm=1.0,delta=1e-3,noise_multiplier=30.0,accountant="rdp"}'
    given = ["--set", table, "--set", "evaluation.every=0", "--set", "aggregation.weighting=uniform"]
    found = CliRunner().invoke(cli, ["privacy", "plan", str(example), *given, "--json"])
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["rows"][-1]["round"] == 20
    assert any(each["name"].startswith("DP-FTRL") for each in values["alternatives"])


def test_a_table_of_jobs_fits_a_terminal_and_json_has_the_whole_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = f"round 1 failed 4 times; the last reason: {'no silo answered; ' * 20}"
    jobs = [
        operator_pb2.Job(id="J-20260101-abcdef", name="heart", status="paused", reason=reason, rounds=9),
        operator_pb2.Job(
            id="J-20260102-abcdef", name="digits", status="finished", reason="all rounds", rounds=2
        ),
    ]
    told = SimpleNamespace(jobs=lambda: jobs)
    monkeypatch.setattr("roundtable.cli.jobs.job.connect", lambda *_: nullcontext(told))
    assert run(["job", "list"]) == 0
    _, paused, finished = capsys.readouterr().out.splitlines()
    assert paused.endswith("round 1 failed 4 times; the last reason: no silo answered;…")
    assert finished.endswith("all rounds"), "no blanks up to the longest line"
    assert run(["job", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["reason"] == reason
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["job", "list"]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 80
    assert "J-20260101" in shown

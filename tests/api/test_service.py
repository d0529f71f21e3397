"""The command line against a real coordinator and two real agents, each a process of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import roundtable as rt
from roundtable.child_processes import Children
from roundtable.core import Layout, Model, model_digest, open_model, save_model
from roundtable.core.errors import EncodingError, LayoutError
from roundtable.core.foundation.checkpoint_files import write_checkpoint
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.demo import await_agents, free_port
from roundtable.preparation import prepare

Command = Any

TASK = """
import torch, roundtable as rt

class Small(rt.Task):
    def model(self):
        return torch.nn.Linear(2, 1)

    def data(self, site):
        chance = torch.Generator().manual_seed(len(site.name))
        inputs = torch.randn(40, 2, generator=chance)
        targets = inputs @ torch.tensor([[1.0], [-2.0]])
        return (inputs[:30], targets[:30]), (inputs[30:], targets[30:])

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
FRAMED = TASK.replace("Small", "Framed").replace(
    "return torch.nn.Linear(2, 1)",
    "frozen = torch.nn.Linear(2, 2).requires_grad_(False)\n"
    "        return torch.nn.Sequential(frozen, torch.nn.Linear(2, 1))",
)
JOB = 'task = "small"\nrounds = 3\n\n[cohort]\nsize = 2\n\n[algorithm]\nlearning_rate = 0.1\n'


@dataclass(frozen=True)
class Service:
    """Where the coordinator listens, also for those without a certificate, and the folder of everything."""

    address: str
    folder: Path
    door: str

    @property
    def options(self) -> list[str]:
        return ["--coordinator", self.address, "--credentials", str(self.folder / "ada")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    create_ca(folder / "ca")
    issue(folder / "ca", "hub", "coordinator", folder / "hub", ["127.0.0.1"])
    issue(folder / "ca", "ada", "operator", folder / "ada")
    issue(folder / "ca", "ann", "admin", folder / "ann")
    (folder / "small.py").write_text(TASK)
    (folder / "framed.py").write_text(FRAMED)
    (folder / "job.toml").write_text(JOB)
    (folder / "framed.toml").write_text(JOB.replace("small", "framed.py:Framed"))
    address, door = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with Children(folder / "logs") as children:
        options = [
            "--listen",
            address,
            "--state",
            str(folder / "state"),
            "--credentials",
            str(folder / "hub"),
            "--enrolment",
            door,
        ]
        children.start("hub", ["server", *options])
        for name in ("north", "south"):
            issue(folder / "ca", name, "agent", folder / name / "credentials")
            (folder / name / "agent.toml").write_text(
                f'coordinator = "{address}"\n[tasks]\nsmall = "{folder}/small.py:Small"\n'
                f'"framed.py:Framed" = "{folder}/framed.py:Framed"\n'
            )
            children.start(name, ["client", "--config", str(folder / name / "agent.toml")])
        with rt.OperatorClient(address, folder / "ada") as operator:
            await_agents(operator, children, 2)
        yield Service(address, folder, door)


@pytest.fixture
def job(service: Service, roundtable: Command) -> str:
    """The identifier of a finished job."""
    said = roundtable(
        "job", "submit", service.folder / "job.toml", *service.options, "--json", "--request-id", "shared"
    )
    identifier = json.loads(said.out)["id"]
    assert roundtable("job", "watch", identifier, *service.options).code == 0
    return str(identifier)


def test_submit_and_watch_shows_each_round_and_ends_well(service: Service, roundtable: Command) -> None:
    said = roundtable("job", "submit", service.folder / "job.toml", *service.options, "--watch")
    assert said.code == 0, said.err
    for number in (1, 2, 3):
        assert f"round {number}/3" in said.out
    assert "2 of 2 silos" in said.out
    assert "north, south" in said.out
    assert "is finished" in said.out


def test_watch_as_json_is_one_event_a_line(service: Service, roundtable: Command, job: str) -> None:
    events = [
        json.loads(line)
        for line in roundtable("job", "watch", job, *service.options, "--json").out.splitlines()
    ]
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    rounds = [event["detail"] for event in events if event["kind"] == "round_committed"]
    assert len(rounds) == 3
    assert rounds[-1]["evaluation"]["loss"] < rounds[0]["evaluation"]["loss"]
    later = roundtable("job", "watch", job, *service.options, "--json", "--from", 4).out.splitlines()
    assert json.loads(later[0])["sequence"] == 4


def test_a_job_goes_on_from_the_model_of_another(
    service: Service, roundtable: Command, job: str, tmp_path: Path
) -> None:
    last = tmp_path / "last.safetensors"
    assert roundtable("job", "model", job, *service.options, "-o", last).code == 0
    line = ["job", "submit", service.folder / "job.toml", *service.options]
    said = roundtable(*line, "--json", "--model", last)
    second = json.loads(said.out)["id"]
    assert roundtable("job", "watch", second, *service.options).code == 0

    def losses(identifier: str) -> list[float]:
        lines = roundtable("job", "watch", identifier, *service.options, "--json").out.splitlines()
        committed = [event for event in map(json.loads, lines) if event["kind"] == "round_committed"]
        return [event["detail"]["evaluation"]["loss"] for event in committed]

    assert losses(second)[0] < losses(job)[-1]
    other = tmp_path / "other.safetensors"
    save_model(other, Model(Layout.of({"w": torch.zeros(3)}), torch.zeros(3)))
    refused = roundtable(*line, "--model", other)
    assert refused.code == 2
    assert "does not hold a model of task" in refused.err
    opened = open_model(last)
    save_model(other, replace(opened, vector=torch.full_like(opened.vector, torch.nan)))
    assert "not finite" in roundtable(*line, "--model", other).err


def test_a_model_goes_out_as_shards_and_in_again(
    service: Service, roundtable: Command, job: str, tmp_path: Path
) -> None:
    fetch = ["job", "model", job, *service.options, "-o", tmp_path / "shards"]
    assert "name a file, or give --shard-size" in roundtable(*fetch[:-1], tmp_path).err
    assert "is not a size of memory" in roundtable(*fetch, "--shard-size", "much").err
    said = roundtable(*fetch, "--shard-size", "8B")
    assert said.code == 0, said.err
    files = sorted(path.name for path in (tmp_path / "shards").iterdir())
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files == [*shards, "model.safetensors.index.json"]
    assert "is there already and not empty" in roundtable(*fetch, "--shard-size", "8B").err
    whole = tmp_path / "whole.safetensors"
    assert roundtable(*fetch[:-1], whole).code == 0
    assert str(rt.load_model(tmp_path / "shards")) == str(rt.load_model(whole))
    prepared = [prepare(service.folder / "job.toml", start=start) for start in (whole, tmp_path / "shards")]
    assert len({model_digest(each.model) for each in prepared}) == 1
    assert f"rt.load_model({json.dumps(str(tmp_path / 'shards'))})" in said.out
    (tmp_path / "shards" / shards[1]).write_bytes(b"damaged")
    refused = roundtable("job", "submit", service.folder / "job.toml", *service.options, "--model", fetch[-1])
    assert refused.code == 1
    assert "model-00002-of-00002.safetensors is damaged" in refused.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": torch.ones(1, 2, dtype=torch.bfloat16)}, ""),
        ({"weight": None}, "lacks 'weight'"),
        ({"more": torch.zeros(1)}, "has 'more', which the model has not"),
        ({"weight": torch.zeros(2, 1)}, r"'weight' is float32 \[2, 1\], and the model .* float32 \[1, 2\]"),
        ({"weight": torch.zeros(1, 2, dtype=torch.float64)}, r"'weight' is float64 \[1, 2\]"),
        ({"bias": torch.tensor([torch.nan])}, "'bias' holds NaN or infinity"),
    ],
    ids=str,
)
def test_a_checkpoint_to_start_from_has_the_models_tensors(
    changes: dict[str, torch.Tensor | None], said: str, tmp_path: Path
) -> None:
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB)
    whole: dict[str, torch.Tensor | None] = {"weight": torch.zeros(1, 2), "bias": torch.zeros(1), **changes}
    write_checkpoint({name: each for name, each in whole.items() if each is not None}, tmp_path / "c", 4)
    if not said:
        assert prepare(tmp_path / "job.toml", start=tmp_path / "c").model.vector.tolist() == [1, 1, 0]
        return
    with pytest.raises(LayoutError, match=said):
        prepare(tmp_path / "job.toml", start=tmp_path / "c")


def test_frozen_tensors_of_a_checkpoint_are_held_to_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "framed.py").write_text(FRAMED.replace("frozen =", "torch.manual_seed(1); frozen ="))
    (tmp_path / "job.toml").write_text(JOB.replace('"small"', '"framed.py:Framed"'))
    own = prepare(tmp_path / "job.toml").task.model().state_dict()  # type: ignore[union-attr]
    assert set(own) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    own["1.weight"] = torch.full((1, 2), 3.0)
    write_checkpoint(own, tmp_path / "c", 8)
    assert prepare(tmp_path / "job.toml", start=tmp_path / "c").model.vector[:2].tolist() == [3.0, 3.0]
    write_checkpoint({**own, "0.bias": torch.ones(2)}, tmp_path / "d", 8)
    with pytest.raises(LayoutError, match=r"'0\.bias' is frozen and has other values"):
        prepare(tmp_path / "job.toml", start=tmp_path / "d")


def test_the_same_request_is_the_same_job(service: Service, roundtable: Command, job: str) -> None:
    line = [
        "job",
        "submit",
        service.folder / "job.toml",
        *service.options,
        "--json",
        "--request-id",
        "shared",
    ]
    assert json.loads(roundtable(*line).out)["id"] == job


def test_diagnose_a_job(service: Service, roundtable: Command, job: str) -> None:
    said = roundtable("job", "diagnose", job, *service.options)
    assert said.out.startswith("round 3 of 3: mean over 2 updates")
    assert [line.split()[0] for line in said.out.splitlines()[2:4]] == ["north", "south"]
    assert "set [aggregation] diagnosis = true" in said.out


def test_list_and_show(service: Service, roundtable: Command, job: str) -> None:
    listed = {
        found["id"]: found for found in json.loads(roundtable("job", "list", *service.options, "--json").out)
    }
    assert listed[job]["status"] == "finished"
    assert listed[job]["submitter"] == "ada"
    table = roundtable("job", "list", *service.options).out
    assert job in table
    assert "3/3" in table
    shown = json.loads(roundtable("job", "show", job, *service.options, "--json").out)
    assert [record["round"] for record in shown["history"]] == [1, 2, 3]
    assert shown["job_config"]["rounds"] == 3
    text = roundtable("job", "show", job, *service.options).out
    assert "3 of 3 committed" in text
    assert "loss" in text
    resolved = roundtable("job", "show", job, "--resolved", *service.options).out
    assert "over_selection = 1.0" in resolved


def test_a_jobs_record_joins_times_silos_rounds_models_and_faults(
    service: Service, roundtable: Command, job: str
) -> None:
    found = json.loads(roundtable("job", "record", job, *service.options, "--json").out)
    times = found["times"]
    assert times["submitted"] <= times["began"] <= times["ended"]
    assert abs(times["ended"] - times["submitted"] - times["ran"] - times["waited"]) < 1e-3
    assert list(found["silos"]) == ["north", "south"]
    for silo in found["silos"].values():
        assert (silo["asked"], silo["contributed"]) == (3, 3)
        (setup,) = silo["setups"]
        assert (setup["machines"], setup["ranks"], setup["device"], setup["round"]) == (1, 1, "cpu", 1)
    assert [each["round"] for each in found["rounds"]] == [1, 2, 3]
    assert found["rounds"][-1]["metrics"]["evaluation"]["loss"] > 0
    assert found["models"]["rounds"]["3"] == found["models"]["newest"]
    assert found["faults"] == []
    text = roundtable("job", "record", job, *service.options).out
    assert "No fault." in text
    assert "north" in text


def test_clients(service: Service, roundtable: Command, job: str) -> None:
    found = json.loads(roundtable("clients", "list", *service.options, "--json").out)
    assert [client["name"] for client in found] == ["north", "south"]
    assert all(client["online"] and client["tasks"] == ["framed.py:Framed", "small"] for client in found)
    assert all(client["completed"] >= 3 for client in found)
    assert all(time.time() - client["last_seen"] < 60 for client in found)
    assert "north" in roundtable("clients", "list", *service.options).out


def test_a_client_is_disabled_and_enabled(service: Service, roundtable: Command) -> None:
    said = roundtable("clients", "disable", "north", "--reason", "its disk is full", *service.options)
    assert said.out.startswith("Disabled north: its disk is full. `roundtable clients enable north` ends")
    try:
        assert "disabled: its disk is full" in roundtable("clients", "list", *service.options).out
    finally:
        said = roundtable("clients", "enable", "north", *service.options, "--json")
    assert (json.loads(said.out)["name"], json.loads(said.out)["disabled"]) == ("north", "")
    again = roundtable("clients", "enable", "north", *service.options)
    assert (again.code, "'north' is not disabled; nothing was changed" in again.err) == (2, True)


def test_the_model_is_fetched_verified_and_loads(
    service: Service, roundtable: Command, job: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    said = roundtable("job", "model", job, "-o", path, *service.options)
    assert said.code == 0, said.err
    assert "verified" in said.out
    lines = [line.strip() for line in said.out.splitlines() if "rt" in line.split("(")[0] or "import" in line]
    assert lines[0] == "import roundtable as rt"
    code = "\n".join(lines).replace('"small"', f'"{service.folder}/small.py"')
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert set(rt.load_model(path)) == {"weight", "bias"}


def test_frozen_weights_stay_and_are_put_in_where_the_task_is(
    service: Service, roundtable: Command, tmp_path: Path
) -> None:
    said = roundtable("job", "submit", service.folder / "framed.toml", *service.options, "--watch")
    assert said.code == 0, said.err
    assert "3 of 9 values travel (33.3%): 2 frozen tensors, such as '0.weight'" in said.err
    job = next(line for line in said.out.splitlines() if line.startswith("Submitted job")).split()[2]
    path = tmp_path / "model.safetensors"
    fetch = ["job", "model", job, "-o", path, *service.options]
    assert "It lacks 2 frozen tensors, such as '0.weight'" in roundtable(*fetch).out
    with pytest.raises(EncodingError, match="lacks 2 frozen tensors"):
        rt.load_model(path)
    assert set(rt.load_model(path, partial=True)) == {"1.weight", "1.bias"}
    said = roundtable(*fetch, "--task", service.folder, "--json")
    assert json.loads(said.out)["lacking"] == []
    assert set(rt.load_model(path)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    # What was put in changes nothing about where the model comes from.
    assert model_digest(open_model(path).without_frozen()) == json.loads(said.out)["digest"]


def test_an_interrupted_fetch_goes_on(service: Service, job: str, tmp_path: Path) -> None:
    with rt.OperatorClient(service.address, service.folder / "ada") as operator:
        found = operator.job(job).job.model
        path = tmp_path / "model.safetensors"
        operator.get_artifact(found.digest, found.size, path)
        whole = path.read_bytes()
        path.unlink()
        path.with_name(f"model.safetensors.{found.digest[:12]}.partial").write_bytes(whole[:100])
        seen: list[tuple[int, int]] = []
        operator.get_artifact(found.digest, found.size, path, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == whole
    assert seen[-1] == (len(whole), len(whole))


def test_a_damaged_part_is_noticed(service: Service, job: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with rt.OperatorClient(service.address, service.folder / "ada") as operator:
        found = operator.job(job).job.model
        partial = path.with_name(f"model.safetensors.{found.digest[:12]}.partial")
        partial.write_bytes(b"x" * 100)
        with pytest.raises(rt.RoundtableError, match="do not have that digest"):
            operator.get_artifact(found.digest, found.size, path)
        assert not path.exists()
        operator.get_artifact(found.digest, found.size, path)
    assert path.stat().st_size == found.size


def test_what_a_coordinator_calls_a_model_names_no_path(service: Service, tmp_path: Path) -> None:
    with rt.OperatorClient(service.address, service.folder / "ada") as operator:
        for named in ("../../../x", "", "A" * 64):
            with pytest.raises(rt.RoundtableError, match="which is no digest"):
                operator.get_artifact(named, 1, tmp_path / "out" / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_pause_resume_cancel(service: Service, roundtable: Command) -> None:
    long = ["--set", "rounds=100000", "--json"]
    submitted = json.loads(
        roundtable("job", "submit", service.folder / "job.toml", *service.options, *long).out
    )
    name = submitted["id"]
    assert json.loads(roundtable("job", "pause", name, *service.options, "--json").out)["status"] == "paused"
    watched = roundtable("job", "watch", name, *service.options)
    assert watched.code == 1
    assert f"roundtable job resume {name}" in watched.out
    assert roundtable("job", "resume", name, *service.options).code == 0
    assert "cancelled" in roundtable("job", "cancel", name, *service.options).out
    assert roundtable("job", "watch", name, *service.options).code == 1
    again = roundtable("job", "resume", name, *service.options)
    assert again.code == 2
    assert "cancelled already" in again.err


def test_ctrl_c_leaves_the_job_running(service: Service, roundtable: Command) -> None:
    job_file = str(service.folder / "job.toml")
    line = ["job", "submit", job_file, *service.options, "--watch", "--set", "rounds=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "roundtable", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    name = first.split()[2]
    while "round 1/" not in process.stdout.readline().replace("     ", ""):
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"roundtable job watch {name}" in err
    assert "Traceback" not in err
    shown = json.loads(roundtable("job", "show", name, *service.options, "--json").out)
    assert shown["job"]["status"] == "running"
    assert roundtable("job", "cancel", name, *service.options).code == 0


def test_applying_a_file_again_and_again_starts_its_job_once(service: Service, roundtable: Command) -> None:
    line = ["job", "apply", "-f", str(service.folder / "job.toml"), *service.options, "--json"]
    line += ["--set", "name=declared", "--set", "rounds=100000"]

    def state(name: str) -> str:
        shown = roundtable("job", "show", name, *service.options, "--json").out
        return str(json.loads(shown)["job"]["status"])

    both = [
        subprocess.Popen([sys.executable, "-m", "roundtable", *line], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    (name,) = {each["job"]["id"] for each in said}
    assert "started" in {each["action"] for each in said}
    again = json.loads(roundtable(*line).out)
    assert (again["action"], again["job"]["id"], again["changes"]) == ("unchanged", name, [])
    changed = [*line, "--set", "algorithm.learning_rate=0.2"]
    refused = roundtable(*changed)
    assert refused.code == 2
    assert f"job than {name}, which is" in refused.err
    assert "algorithm.learning_rate: 0.1 → 0.2" in refused.err
    assert "rounds:" not in refused.err
    assert state(name) == "running"
    replaced = json.loads(roundtable(*changed, "--when-changed", "replace").out)
    second = replaced["job"]["id"]
    assert (replaced["action"], replaced["changes"]) == ("started", ["algorithm.learning_rate: 0.1 → 0.2"])
    assert second != name
    assert state(name) == "cancelled"
    # Somebody stops it by hand: what is declared does not undo that, and says so.
    assert roundtable("job", "cancel", second, *service.options).code == 0
    stopped = roundtable(*changed)
    assert (stopped.code, json.loads(stopped.out)["action"]) == (1, "unchanged")
    # Back to what was declared first: a new job, not the old one that was cancelled.
    third = json.loads(roundtable(*line).out)
    assert (third["action"], third["job"]["id"] in (name, second)) == ("started", False)
    assert roundtable("job", "cancel", third["job"]["id"], *service.options).code == 0


def test_another_operators_job_of_the_same_name_is_not_ones_own(
    service: Service, roundtable: Command, tmp_path: Path
) -> None:
    issue(service.folder / "ca", "eve", "operator", tmp_path / "eve")
    line = ["job", "apply", "-f", service.folder / "job.toml", "--json", "--set", "name=common"]
    whose = {"ada": service.options[-1], "eve": tmp_path / "eve"}
    said = {
        name: json.loads(roundtable(*line, "--coordinator", service.address, "--credentials", folder).out)
        for name, folder in whose.items()
    }
    assert {name: each["job"]["submitter"] for name, each in said.items()} == {"ada": "ada", "eve": "eve"}
    assert said["ada"]["job"]["id"] != said["eve"]["job"]["id"]
    assert {each["action"] for each in said.values()} == {"started"}


def test_an_unknown_job(service: Service, roundtable: Command) -> None:
    said = roundtable("job", "show", "nonsense", *service.options)
    assert said.code == 2
    assert "nonsense" in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_doctor_looks_at_the_coordinator(service: Service, roundtable: Command) -> None:
    said = roundtable("doctor", "--json", *service.options, "--listen", service.address)
    checks = {check["name"]: check for check in json.loads(said.out)}
    assert said.code == 0
    assert "2 agents online" in checks["coordinator"]["message"]
    assert checks["clock"]["state"] == "ok"
    assert checks["port"]["state"] == "warn"
    assert "coordinator runs here already" in checks["port"]["remedy"]


def test_doctor_of_an_admin_and_of_a_token(service: Service, roundtable: Command, tmp_path: Path) -> None:
    admin = ("--coordinator", service.address, "--credentials", service.folder / "ann")
    folder = tmp_path / "token"
    assert roundtable("token", "create", "dora", "--role", "viewer", "--out", folder, *admin).code == 0
    for address, credentials in ((service.address, service.folder / "ann"), (service.door, folder)):
        said = roundtable("doctor", "--json", "--coordinator", address, "--credentials", credentials)
        checks = {check["name"]: check for check in json.loads(said.out)}
        assert said.code == 0
        assert "2 agents online" in checks["coordinator"]["message"]
        assert checks["clock"]["state"] == "ok"
    said = roundtable("clients", "list", "--coordinator", service.address, "--credentials", folder)
    assert "with a token" in said.err
    assert "`enrolment` address" in said.err


def test_a_token_is_not_made_that_could_not_be_written(
    service: Service, roundtable: Command, tmp_path: Path
) -> None:
    admin = ("--coordinator", service.address, "--credentials", service.folder / "ann")
    (tmp_path / "token").touch()
    said = roundtable("token", "create", "eve", "--role", "viewer", "--out", tmp_path, *admin)
    assert said.code == 2
    assert "is not overwritten" in said.err
    listed = json.loads(roundtable("token", "list", "--json", *admin).out)
    assert "eve" not in [token["name"] for token in listed]


def test_secrets_and_revocations_are_json_for_programs(
    service: Service, roundtable: Command, tmp_path: Path
) -> None:
    admin = ("--coordinator", service.address, "--credentials", service.folder / "ann", "--json")
    made = json.loads(roundtable("token", "create", "prog", "--role", "viewer", *admin).out)
    assert made["token"]
    kept = roundtable("token", "create", "kept", "--role", "viewer", "--out", tmp_path / "kept", *admin)
    assert json.loads(kept.out)["credentials"] == str(tmp_path / "kept")
    assert "token" not in json.loads(kept.out)
    voided = json.loads(roundtable("token", "revoke", "prog", *admin).out)
    assert (voided["name"], voided["revoked"]) == ("prog", True)
    revoked = json.loads(roundtable("client", "revoke", "west", *admin).out)
    assert revoked == {"silo": "west", "known": False, "calls": 0}


def test_revoking_a_name_that_nobody_has_is_told(service: Service, roundtable: Command) -> None:
    said = roundtable("client", "revoke", "nroth", *service.options)
    assert said.code == 0
    assert "No silo of that name has ever connected here (north, south)" in said.err


def test_services_keep_their_files_to_themselves(service: Service, job: str) -> None:
    kept = [service.folder / "state", *(service.folder / "state").rglob("*")]
    kept += [service.folder / "north" / "state", *(service.folder / "north" / "state").rglob("*")]
    assert len(kept) > 10
    # What the services remove meanwhile is open to nobody.
    assert [place for place in kept if place.exists() and place.stat().st_mode & 0o077] == []


def _refused(service: Service, roundtable: Command, credentials: Path) -> str:
    said = roundtable("job", "list", "--coordinator", service.address, "--credentials", credentials)
    assert said.code == 1
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err
    return str(said.err)


def test_certificates_that_do_not_open_the_door(
    service: Service, roundtable: Command, tmp_path: Path
) -> None:
    ca = service.folder / "ca"
    start = datetime.now(UTC) - timedelta(days=9)
    assert "expired on" in _refused(
        service, roundtable, issue(ca, "ada", "operator", tmp_path / "old", days=1, start=start)
    )
    create_ca(tmp_path / "other")
    other = issue(tmp_path / "other", "ada", "operator", tmp_path / "stranger")
    assert "is from another authority" in _refused(service, roundtable, other)
    shutil.copy(ca / "ca.crt", other / "ca.crt")
    assert "was not issued by" in _refused(service, roundtable, other)
    agent = issue(ca, "harbour", "agent", tmp_path / "harbour")
    assert "here as agent" in _refused(service, roundtable, agent)


def test_a_name_that_the_certificate_does_not_hold(service: Service, roundtable: Command) -> None:
    address = service.address.replace("127.0.0.1", "localhost")
    said = roundtable("job", "list", "--coordinator", address, "--credentials", service.folder / "ada")
    assert said.code == 1
    assert "is not for the name 'localhost'" in said.err


def test_a_second_coordinator_on_the_same_port(service: Service, tmp_path: Path) -> None:
    line = ["server", "--listen", service.address, "--state", str(tmp_path), "--credentials"]
    done = subprocess.run(
        [sys.executable, "-m", "roundtable", *line, str(service.folder / "hub")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert service.address in done.stderr
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_watching_outlives_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", ["127.0.0.1"])
    issue(tmp_path / "ca", "ada", "operator", tmp_path / "ada")
    issue(tmp_path / "ca", "north", "agent", tmp_path / "north" / "credentials")
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB.replace("size = 2", "size = 1").replace("= 3", "= 300"))
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "north" / "agent.toml").write_text(
        f'coordinator = "{address}"\n[tasks]\nsmall = "{tmp_path}/small.py:Small"\n'
    )
    hub = ["server", "--listen", address, "--state", str(tmp_path), "--credentials", str(tmp_path / "hub")]
    with Children(tmp_path / "logs") as children, rt.OperatorClient(address, tmp_path / "ada") as operator:
        first = children.start("hub", hub)
        children.start("north", ["client", "--config", str(tmp_path / "north" / "agent.toml")])
        await_agents(operator, children, 1)
        prepared = prepare(tmp_path / "job.toml")
        save_model(tmp_path / "initial.safetensors", prepared.model)
        job = operator.submit(prepared.job, tmp_path / "initial.safetensors")
        sequence, rounds, killed = 0, 0, False
        for update in operator.watch(job.id):
            for event in update.events:
                sequence += 1
                assert event.sequence == sequence
                rounds += event.kind == "round_committed"
            if rounds >= 20 and not killed:
                killed = True
                first.process.kill()
                first.process.wait()
                children.start("hub-again", hub)
        assert operator.job(job.id).job.status == "finished"
    assert killed
    assert rounds == 300


def test_the_privacy_of_a_job_is_told_before_it_has_spent_any(service: Service, roundtable: Command) -> None:
    private = service.folder / "private.toml"
    table = 'level = "client"\ncohorts = "known"\nclip_norm = 1.0\ndelta = 1e-3\nnoise_multiplier = 4.0\n'
    lines = '[aggregation]\nweighting = "uniform"\n[evaluation]\nevery = 0\n[privacy]\n' + table
    private.write_text(JOB.replace("size = 2", "size = 2\nminimum = 2\nwait = 3600") + lines)
    made = roundtable("job", "submit", private, "--json", *service.options)
    assert made.code == 0, made.err
    identifier = json.loads(made.out)["id"]
    told = json.loads(roundtable("job", "privacy", identifier, "--json", *service.options).out)
    assert 0.0 < told["own_forecast"] <= told["forecast"]
    assert {each["party"]: each["holds"] for each in told["protections"]}[
        "who runs the coordinator's machine"
    ] is False
    said = roundtable("job", "privacy", identifier, *service.options)
    assert said.code == 0, said.err
    assert f"{told['own_forecast']:.4f} by it alone" in said.out
    assert "it sees each silo's update as it was sent, and who was drawn" in " ".join(said.out.split())
    roundtable("job", "cancel", identifier, *service.options)

"""Rounds made again by an auditor: honest ones are verified, each way to cheat is named."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from federation import NAMES, agents, federation_of, run_job, silo
from installed import install

from roundtable.aggregation import TensorMatrix
from roundtable.cli.main import run
from roundtable.core import JobConfig, Model, load_task, open_model
from roundtable.core.encodings import get_encoding
from roundtable.core.encodings.foreign.foreign_codec import ENTRY_POINT_GROUP
from roundtable.core.evidence.audit_log import AuditEntry
from roundtable.core.identity.credentials import load_silo_identity
from roundtable.core.identity.signing import envelope
from roundtable.core.initial_model import initial_model
from roundtable.core.models import model_blocks
from roundtable.core.plugins.code_hash import hash_of_code
from roundtable.engine import Rows, combine, initial_server_state, make_plan
from roundtable.engine.messages import RowReference, Update
from roundtable.engine.validation.round_plan import aggregation_config

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Linear(4, 3)
    def data(self, site):
        g = torch.Generator().manual_seed(site.options["seed"])
        x = torch.randn(16 * (1 + site.options["seed"]), 4, generator=g)
        return (x, x[:, :3].argmax(1)), None
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
JOB: dict[str, Any] = {
    "task": "toy",
    "rounds": 3,
    "cohort": {"size": 3, "minimum": 3},
    "algorithm": {"learning_rate": 0.3, "steps": 2, "batch_size": 8},
    "aggregation": {"server_optimizer": {"name": "fedadam", "learning_rate": 0.1}},
    "evaluation": {"every": 0},
}
Change = Callable[["Cheat"], None]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a coordinator's state, credentials, the silos' logs, and the bundle of an honest job."""
    return bundled(tmp_path_factory.mktemp("honest"), JOB)


def bundled(
    folder: Path, table: dict[str, Any], encodings: Mapping[str, str] | None = None, kept: int = 2
) -> Path:
    """The same for any job; all have approved these encodings. `kept`: rounds whose updates stay."""

    async def rounds() -> None:
        async with federation_of(
            folder, TASK, keep_updates=kept, encodings=dict(encodings or {})
        ) as federation:
            job = JobConfig.model_validate(table)
            model = initial_model(job, load_task("toy.py", folder))
            silos = (replace(silo(federation, name), encodings=encodings or {}) for name in NAMES)
            async with agents(*silos):
                status, _, _ = await asyncio.to_thread(run_job, federation, job, model)
            assert status == "finished"

    asyncio.run(rounds())
    (folder / "coordinator.toml").write_text(
        f"""state = "server"
database = "sqlite:///{folder / "coordinator.db"}"
artifacts = "artifacts"
credentials = "coordinator"
"""
    )
    assert run(["audit", "bundle", str(folder / "coordinator.toml"), "toy", str(folder / "bundle")]) == 0
    return folder


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, bundle: str = "bundle") -> Any:
    """(exit code, what it says as JSON) of `audit verify-model`."""
    capsys.readouterr()
    ca = str(folder / "ca" / "ca.crt")
    code = run(["audit", "verify-model", str(folder / bundle), "--ca", ca, "--json", *options])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


def test_honest_rounds_are_verified_bit_for_bit(honest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    witnesses = [f"--witness={honest / 'state' / name / 'audit.jsonl'}" for name in NAMES]
    code, said = verify(honest, capsys, *witnesses)
    assert said["contradictions"] == []
    assert [(item["round"], item["verdict"], item["updates"]) for item in said["rounds"]] == [
        (1, "unproven", 3),
        (2, "verified", 3),
        (3, "verified", 3),
    ]
    # Two rounds are kept: the first one's updates are gone, and that is said.
    assert "was not kept" in said["rounds"][0]["unproven"][0]
    assert code == 3
    assert verify(honest, capsys, "--round=3")[0] == 0
    assert verify(honest, capsys, "--round=4")[0] == 2
    assert run(["audit", "verify-model", str(honest / "bundle"), f"--ca={honest / 'ca' / 'ca.crt'}"]) == 3
    assert "2 of 3 rounds verified" in capsys.readouterr().out


@pytest.mark.slow
def test_rounds_whose_models_travel_as_changes_are_verified_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published model and the exact one: both follow from the updates. Below, those in fragments."""
    folder = bundled(tmp_path, {**JOB, "transfer": {"down": "int4(block=64)"}})
    code, said = verify(folder, capsys)
    assert [item["verdict"] for item in said["rounds"]] == ["unproven", "verified", "verified"]
    assert (code, said["contradictions"]) == (3, [])


@pytest.mark.slow
def test_rounds_of_fragments_are_verified_each_with_its_own_momentum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weight and bias are fragments of the odd and the even rounds; both move as changes of 4 bits."""
    algorithm = {
        "name": "streaming",
        "fragments": 2,
        "mixing": 0.5,
        "momentum": 0.5,
        "optimizer_state": "keep",
    }
    table = {
        **JOB,
        "rounds": 5,
        "algorithm": {**JOB["algorithm"], **algorithm},
        "aggregation": {"server_optimizer": {"name": "diloco"}},
        "transfer": {"up": "int4(block=64)", "down": "int4(block=64)", "feedback": "on"},
    }
    folder = bundled(tmp_path, table, kept=4)
    code, said = verify(folder, capsys)
    assert [item["verdict"] for item in said["rounds"]] == ["unproven", *["verified"] * 4]
    assert (code, said["contradictions"]) == (3, [])
    models = [entry["detail"]["model"] for entry in Cheat(folder / "bundle").entries[-5:]]
    weight = slice(0, 12)
    for round in range(2, 6):
        before, after = (
            open_model(Cheat(folder / "bundle").path(models[n])).vector for n in (round - 2, round - 1)
        )
        moved = before != after
        assert (bool(moved[weight].any()), bool(moved[12:].any())) == (round % 2 == 1, round % 2 == 0)

    def refuted(change: Change) -> str:
        shutil.copytree(folder / "bundle", folder / "cheat")
        cheat = Cheat(folder / "cheat")
        change(cheat)
        cheat.write()
        code, said = verify(folder, capsys, "--round=5", bundle="cheat")
        shutil.rmtree(folder / "cheat")
        assert code == 1
        return str(said["rounds"][0]["refuted"])

    def move_what_is_not_due(cheat: Cheat) -> None:
        cheat.model(lambda model: model.vector + 1e-3 * torch.eye(15)[14])

    def take_the_update_for_another_fragment(cheat: Cheat) -> None:
        """Round 4's update, of the other fragment, under round 5's name."""
        older = dict(cheat.rounds[-2]["updates"][0])
        cheat.updates[0] = {**cheat.updates[0], "digest": older["digest"], "statement": None}
        cheat.last["updates"][older["client"]] = older["digest"]

    assert "makes another model of these 3 updates" in refuted(move_what_is_not_due)
    assert "is of fragment 1, and in round 5 fragment 0 is due" in refuted(
        take_the_update_for_another_fragment
    )


@pytest.mark.slow
def test_code_of_others_decodes_for_an_auditor_only_once_its_hash_is_approved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "extending.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    install(tmp_path / "site", monkeypatch, "house_steps", code, {ENTRY_POINT_GROUP: {"steps": "Steps"}})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    digest = hash_of_code("encoding", "steps", ENTRY_POINT_GROUP, None)
    transfer = {"up": "steps(levels=120)", "feedback": "on"}
    folder = bundled(tmp_path, {**JOB, "transfer": transfer}, {"steps": digest})
    get_encoding.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roundtable.core.encodings.assembly.find_codec", lambda *given: pytest.fail("it ran"))
        code_, said = verify(folder, capsys)
    assert code_ == 3
    assert all(item["verdict"] == "unproven" for item in said["rounds"])
    advice = f'[encodings] steps = "{digest}" into the file of --encodings'
    assert advice in said["rounds"][2]["unproven"][0]
    (tmp_path / "read.toml").write_text(f'[encodings]\nsteps = "{digest}"\n')
    _, said = verify(folder, capsys, "--encodings", str(tmp_path / "read.toml"))
    assert [item["verdict"] for item in said["rounds"]] == ["unproven", "verified", "verified"]
    (tmp_path / "read.toml").write_text(f'[encodings]\nsteps = "{"0" * 64}"\n')
    _, said = verify(folder, capsys, "--encodings", str(tmp_path / "read.toml"))
    assert "is not what this auditor has approved" in said["rounds"][2]["unproven"][0]


class Cheat:
    """A bundle that the coordinator itself has forged: it writes its log anew, and signs it."""

    def __init__(self, folder: Path) -> None:
        self.identity = load_silo_identity(folder.parent / "coordinator")
        self.folder = folder
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        self.entries = [line["entry"] for line in lines if "entry" in line]
        made = [each["detail"] for each in self.entries if each["action"] == "round_committed"]
        self._numbers = [detail["round"] for detail in made]
        self.rounds = [json.loads((folder / "rounds" / f"{n}.json").read_text()) for n in self._numbers]
        self.job = json.loads((folder / "job.json").read_text())

    @property
    def last(self) -> dict[str, Any]:
        """What the log says of the last round."""
        details = [entry["detail"] for entry in self.entries if entry["action"] == "round_committed"]
        return dict_of(details[-1])

    @property
    def updates(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.rounds[-1]["updates"]
        return found

    def store(self, data: bytes) -> str:
        digest = blake3(data).hexdigest()
        place = self.folder / "objects" / digest[:2] / digest
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        return digest

    def path(self, digest: str) -> Path:
        return self.folder / "objects" / digest[:2] / digest

    def model(self, change: Callable[[Model], torch.Tensor]) -> None:
        """The last round's model is another one."""
        found = open_model(self.path(self.last["model"]))
        other = Model(found.layout, change(found), found.local, found.metadata)
        self.last["model"] = self.store(b"".join(bytes(block) for block in model_blocks(other)))

    def write(self) -> None:
        lines, before = [], None
        for values in self.entries:
            before = replace(AuditEntry(**values), hash="", previous="").after(before)
            lines.append(json.dumps({"entry": asdict(before)}))
        assert before is not None
        seal = {"sequence": before.sequence, "hash": before.hash, "time": before.time}
        lines.append(json.dumps({"seal": envelope(self.identity, "seal", seal)}))
        (self.folder / "log.jsonl").write_text("\n".join(lines))
        for item in self.rounds:
            (self.folder / "rounds" / f"{item['round']}.json").write_text(json.dumps(item))
        (self.folder / "job.json").write_text(json.dumps(self.job))


def dict_of(value: Any) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value


@pytest.fixture
def cheat(honest: Path) -> Iterator[Cheat]:
    shutil.copytree(honest / "bundle", honest / "cheat")
    yield Cheat(honest / "cheat")
    shutil.rmtree(honest / "cheat")


def tamper_with_model(cheat: Cheat) -> None:
    cheat.model(lambda model: model.vector + 1e-3 * torch.eye(model.vector.numel())[0])


def use_another_rule(cheat: Cheat) -> None:
    """The model is the one that the median makes of the same updates."""
    job = JobConfig.model_validate({**JOB, "aggregation": {"rule": "median"}})
    base = open_model(cheat.path(model_before(cheat)))
    updates = [
        torch.frombuffer(bytearray(cheat.path(u["digest"]).read_bytes()), dtype=torch.float32)
        for u in cheat.updates
    ]
    rows = Rows(
        TensorMatrix(torch.stack(updates)),
        [Update(u["client"], RowReference(n), u["examples"]) for n, u in enumerate(cheat.updates)],
    )
    plan = make_plan(job, 3)
    state = initial_server_state(plan, base.layout.size)
    made = combine(plan, rows, base.vector, state, round=3, seed=job.seed)
    cheat.model(lambda model: made.vector)


def model_before(cheat: Cheat) -> str:
    models = [e["detail"]["model"] for e in cheat.entries if e["action"] == "round_committed"]
    return str(models[-2])


def tamper_with_update(cheat: Cheat) -> None:
    update = cheat.updates[0]
    update["digest"] = cheat.store(cheat.path(update["digest"]).read_bytes()[:-4] + b"\0\0\0\0")
    cheat.last["updates"][update["client"]] = update["digest"]


def count_twice(cheat: Cheat) -> None:
    cheat.updates.append(cheat.updates[0])


def count_under_another_name(cheat: Cheat) -> None:
    """Alder's update takes the place of birch's."""
    alder, birch = cheat.updates[:2]
    cheat.updates[1] = {**alder, "client": birch["client"]}
    cheat.last["updates"][birch["client"]] = alder["digest"]


def leave_out(cheat: Cheat) -> None:
    cheat.updates.pop()


def weigh_otherwise(cheat: Cheat) -> None:
    cheat.updates[0]["examples"] *= 100


def record_other_weights(cheat: Cheat) -> None:
    cheat.rounds[-1]["weights"]["alder"] *= 0.5


def invent_an_update(cheat: Cheat) -> None:
    """Of a silo that was not there, without a signature."""
    update = {**cheat.updates[0], "client": "willow", "statement": None}
    cheat.updates.append(update)
    cheat.last["updates"]["willow"] = update["digest"]


def take_an_older_update(cheat: Cheat) -> None:
    """What alder sent in the round before, with its signature of then."""
    older = dict(cheat.rounds[-2]["updates"][0])
    cheat.updates[0] = {**older, "round": 3}
    cheat.last["updates"]["alder"] = older["digest"]


def run_another_job(cheat: Cheat) -> None:
    cheat.job["config"] = cheat.job["config"].replace('"fedadam"', '"fedavg"', 1)


def damage_a_file(cheat: Cheat) -> None:
    path = cheat.path(cheat.updates[0]["digest"])
    path.write_bytes(bytes(len(path.read_bytes())))


CHEATS: dict[Change, str] = {
    tamper_with_model: "the rule mean makes another model of these 3 updates: they differ by up to 0.001",
    use_another_rule: "the rule mean makes another model of these 3 updates",
    tamper_with_update: "alder has signed its update with update",
    count_twice: "alder is counted 2 times",
    count_under_another_name: "the update of birch is signed by alder",
    leave_out: "the update of cedar is left out",
    weigh_otherwise: "alder has signed its update with examples 16, and the round took it with 1600",
    record_other_weights: "the record gives alder the weight",
    invent_an_update: "willow is counted, and was not asked",
    take_an_older_update: "alder has signed its update with round 2",
    run_another_job: "the job is not what operator has signed",
    damage_a_file: "was changed: its bytes have the digest",
}


@pytest.mark.parametrize(("change", "reason"), CHEATS.items(), ids=[change.__name__ for change in CHEATS])
def test_a_cheating_coordinator_is_caught_by_name(
    change: Change, reason: str, cheat: Cheat, honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(cheat)
    cheat.write()
    code, said = verify(honest, capsys, "--round=3", bundle="cheat")
    assert (code, said["rounds"][0]["verdict"]) == (1, "refuted")
    assert any(reason in line for line in said["rounds"][0]["refuted"]), said


def test_who_is_left_out_everywhere_shows_the_receipt(
    cheat: Cheat, honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coordinator that forgets cedar in log and bundle alike tells one story; cedar's log tells another."""
    update = cheat.updates.pop()
    del cheat.last["updates"][update["client"]]
    cheat.write()
    witness = f"--witness={honest / 'state' / 'cedar' / 'audit.jsonl'}"
    code, said = verify(honest, capsys, "--round=3", witness, bundle="cheat")
    assert code == 1
    assert any("the silo sent" in line and "holds none" in line for line in said["contradictions"])


@pytest.mark.parametrize("part", ["job.json", "rounds/3.json", "log.jsonl"])
@pytest.mark.parametrize("text", ["", "[]", '{"round": 1e999}', "\0", '{"entry": 1}'])
def test_what_is_no_bundle_is_refused_in_words(
    part: str, text: str, cheat: Cheat, honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cheat.folder / part).write_text(text)
    code, said = verify(honest, capsys, bundle="cheat")
    assert code == 1
    if part == "rounds/3.json":
        assert [item["verdict"] for item in said["rounds"]] == ["unproven", "verified", "refuted"]
        assert said["rounds"][2]["refuted"][0].startswith("3.json: ")
    else:
        assert isinstance(said, str)
        assert said


def test_a_round_that_the_bundle_forgets_or_confuses(
    cheat: Cheat, honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third = cheat.folder / "rounds" / "3.json"
    third.write_text((cheat.folder / "rounds" / "2.json").read_text())
    code, said = verify(honest, capsys, "--round=3", bundle="cheat")
    assert code == 1
    assert "tells of round 2" in said["rounds"][0]["refuted"][0]
    third.unlink()
    code, said = verify(honest, capsys, "--round=3", bundle="cheat")
    assert (code, said["rounds"][0]["unproven"]) == (3, ["the bundle holds no updates of it"])


def test_another_kind_of_processor_is_no_accusation(
    cheat: Cheat, honest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper_with_model(cheat)
    cheat.last["versions"]["processor"] = "abacus"
    cheat.write()
    code, said = verify(honest, capsys, "--round=3", bundle="cheat")
    assert (code, said["rounds"][0]["verdict"]) == (3, "unproven")
    assert "processor abacus, here" in said["rounds"][0]["unproven"][0]


def test_a_gpu_s_last_digits_are_no_accusation(
    cheat: Cheat, honest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper_with_model(cheat)
    cheat.write()

    def on_gpu(table: Any, folder: Path | None = None) -> Any:
        return replace(aggregation_config(table, folder), device="cuda")

    monkeypatch.setattr("roundtable.aggregation.AggregationConfig._check_device", lambda config: None)
    monkeypatch.setattr("roundtable.engine.validation.round_plan.aggregation_config", on_gpu)
    code, said = verify(honest, capsys, "--round=3", bundle="cheat")
    assert (code, said["rounds"][0]["verdict"]) == (3, "unproven")
    assert "a GPU's sums" in said["rounds"][0]["unproven"][0]


@pytest.mark.parametrize(
    "table",
    [
        {"rule": "mean"},
        {"rule": "median"},
        {"rule": "krum", "parameters": {"f": 1}},
        {"rule": "geometric_median"},
        {"rule": "mean", "server_optimizer": {"name": "fedadam", "learning_rate": 0.1}},
    ],
    ids=lambda table: table["rule"],
)
def test_the_bits_do_not_depend_on_the_number_of_threads(table: dict[str, Any]) -> None:
    """Enough columns for a thread each, as `column_threads` cuts them."""
    columns, job = 3 << 17, JobConfig.model_validate({**JOB, "aggregation": table})
    values = torch.randn(7, columns, generator=torch.Generator().manual_seed(1))
    rows = [Update(f"silo-{n}", RowReference(n), 10 + n) for n in range(7)]
    plan, threads = make_plan(job, 7), torch.get_num_threads()
    made = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            state = initial_server_state(plan, columns)
            received = Rows(TensorMatrix(values.clone()), rows)
            made.append(combine(plan, received, torch.zeros(columns), state, round=1, seed=1).vector)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*made)

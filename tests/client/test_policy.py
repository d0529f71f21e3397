"""What a silo allows: each rule of agent.toml against jobs that break it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from roundtable.client.agent.gatekeeper import Gatekeeper
from roundtable.client.agent.spool import Finished
from roundtable.client.door.incoming import ArtifactName, ModelWork, StepInstruction, receipt_of
from roundtable.client.door.outgoing import ProgressFigures, UpdateFigures
from roundtable.client.door.submissions import SubmissionProof
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.config import AgentConfig, load_agent_config
from roundtable.client.policy.guarantees import guarantees
from roundtable.client.policy.known_jobs import KnownJobs
from roundtable.client.policy.policy_table import PolicyTable, TaskTable
from roundtable.client.policy.privacy_rules import objections_to_sum, stated_epsilon
from roundtable.client.policy.rules import Rules
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import TrainedUpdate
from roundtable.core import parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import AuditError, ConfigError
from roundtable.core.evidence.audit_log import read_log
from roundtable.core.identity.credentials import create_ca, issue, load_silo_identity
from roundtable.core.identity.revocation import revoke
from roundtable.core.identity.signing import job_identifier, job_values, run_request, sign, vouch
from roundtable.core.observability.released import Told
from roundtable.core.plugins.code_hash import hash_of_code
from roundtable.core.task import ENTRY_POINTS
from roundtable.privacy.accounting.accountants import gaussian_epsilon
from roundtable.proto import agent_pb2, common_pb2
from roundtable.proto.receipts import receipt_values

NOON = datetime(2026, 6, 1, 12, 0)
MODEL = "a" * 64
EXAMPLE = '[privacy]\nlevel = "example"\nepsilon = 1.0\ndelta = 1e-5\nclip_norm = 1.0\n'


def job(text: str = "", rounds: int = 3) -> JobConfig:
    return parse_job(f'task = "t"\nrounds = {rounds}\n{text}')


def said(
    policy: dict[str, Any], wanted: JobConfig, submitter: str | None = None, now: datetime = NOON
) -> str:
    rules = Rules(PolicyTable(**policy), {"t": "t.py:T"})
    return "; ".join(rules.objections(wanted, submitter, now))


@pytest.mark.parametrize(
    ("policy", "text", "reason"),
    [
        ({"rounds": 2}, "", "rounds = 3, and this silo allows 2"),
        ({"epochs": 1}, "[algorithm]\nepochs = 5", "epochs = 5, and this silo allows 1"),
        ({"epochs": 1}, "[algorithm]\nsteps = 5", "counts steps"),
        ({"steps": 4}, "[algorithm]\nepochs = 10000", "counts epochs"),
        (
            {"steps": 4},
            f"[algorithm]\nsteps = 4\n{EXAMPLE}local_steps = 900",
            "steps = 900, and this silo allows 4",
        ),
        ({"batch_size": 64}, f"{EXAMPLE}batch_size = 65", "batch_size = 65, and this silo allows 64"),
        ({"steps": 4}, "[algorithm]\nsteps = 5", "steps = 5, and this silo allows 4"),
        ({"batch_size": 16}, "", "batch_size = 32, and this silo allows 16"),
        ({"secure_aggregation": True}, "", "only with secure aggregation"),
        ({"client_level_epsilon": 8.0}, "", "privacy.level is 'none'"),
        (
            {"client_level_epsilon": 8.0},
            '[privacy]\nlevel = "client_local"\nepsilon = 9.0\ndelta = 1e-5\nclip_norm = 1.0',
            "epsilon is 9, and this silo allows 8",
        ),
        (
            {"client_level_epsilon": 8.0},
            '[privacy]\nlevel = "client_local"\nnoise_multiplier = 1.0\ndelta = 1e-5\nclip_norm = 1.0',
            "states no privacy.epsilon",
        ),
        (
            {"client_level_epsilon": 8.0},
            '[privacy]\nlevel = "client"\nepsilon = 1.0\ndelta = 1e-5\nclip_norm = 1.0',
            "this silo's bare update leaves it",
        ),
        (
            {"client_level_epsilon": 8.0},
            '[privacy]\nlevel = "dp_ftrl"\nepsilon = 1.0\ndelta = 1e-5\nclip_norm = 1.0',
            "asks for 'client_local' or 'distributed'",
        ),
        (
            {"epsilon": 1.0},
            '[privacy]\nlevel = "client_local"\nepsilon = 1.0\ndelta = 0.9\nclip_norm = 1.0',
            "privacy.delta is 0.9, and this silo allows 0.001",
        ),
        ({"epsilon": 1.0}, "", "privacy.level is 'none', for which no silo can keep an account"),
        (
            {"epsilon": 1.0},
            '[privacy]\nlevel = "client"\nnoise_multiplier = 1.0\ndelta = 1e-5\nclip_norm = 1.0',
            "privacy.level is 'client', for which no silo can keep an account",
        ),
        (
            {"example_level_epsilon": 2.0},
            '[privacy]\nlevel = "client"\nepsilon = 1.0\ndelta = 1e-5\nclip_norm = 1.0',
            "asks for 'example'",
        ),
        (
            {"minimum_cohort": 5},
            "[cohort]\nsize = 4",
            "is 4 silos, and this one takes part among at least 5",
        ),
        ({"minimum_cohort": 5}, "", "names no cohort.size, and this silo takes part among at least 5"),
        ({"submitters": ["ada"]}, "", "not signed by its submitter"),
        ({"relay_sums": "refuse"}, "[regions]\nsum = true", "([policy] relay_sums)"),
        ({"hours": "20:00-06:00"}, "", "works from 20:00 to 06:00"),
    ],
)
def test_each_rule_refuses_what_breaks_it(policy: dict[str, Any], text: str, reason: str) -> None:
    assert reason in said(policy, job(text))
    assert said({}, job(text)) == ""


def test_a_region_has_models_of_its_own_only_where_a_relay_is_named() -> None:
    within = job("[regions]\nsum = true\nrounds = 4")
    assert "up to 3 rounds on end" in said({}, within)
    assert "([policy] regional_models)" in said({}, within)
    assert said({"regional_models": ["east"]}, within) == ""


def test_jobs_set_only_those_parameters_of_a_task_that_the_silo_lets_them() -> None:
    wanted = parse_job('[task]\nname = "t"\npath = "/etc/passwd"\nhidden = 8')
    references = {"t": "t.py:T"}
    bare = Rules(PolicyTable(), references).objections(wanted, None, NOON)
    assert bare == [
        "the job sets 'path', 'hidden' of the task 't', and this silo lets jobs set none of its parameters "
        "([tasks.t] parameters)"
    ]
    tables = {"t": TaskTable(use="t.py:T", parameters=["hidden"])}
    (narrow,) = Rules(PolicyTable(), references, tables).objections(wanted, None, NOON)
    assert narrow.startswith("the job sets 'path' of the task 't', and this silo lets jobs set hidden of")
    tables = {"t": TaskTable(use="t.py:T", parameters=["hidden", "path"])}
    assert Rules(PolicyTable(), references, tables).objections(wanted, None, NOON) == []


def test_what_the_rules_allow_is_allowed() -> None:
    policy = {
        "rounds": 3,
        "epochs": 1,
        "batch_size": 32,
        "client_level_epsilon": 8.0,
        "submitters": ["ada"],
        "hours": "08:00-18:00",
    }
    private = '[privacy]\nlevel = "client_local"\nepsilon = 8.0\ndelta = 1e-5\nclip_norm = 1.0'
    assert said(policy, job(private), "ada") == ""
    assert "'eve' may not submit" in said(policy, job(private), "eve")


def test_a_rule_whose_promise_needs_another_says_so() -> None:
    alone = guarantees(PolicyTable(minimum_cohort=5, epsilon=1.0))
    assert {each.key for each in alone if each.gap} == {"minimum_cohort", "epsilon"}
    whole = guarantees(PolicyTable(minimum_cohort=5, epsilon=1.0, delta=1e-5, secure_aggregation=True))
    assert len(whole) == 3
    assert not any(each.gap for each in whole)


def test_secure_aggregation_has_a_least_cohort_of_its_own() -> None:
    masked = "[cohort]\nsize = 2\n[privacy]\nlevel = 'none'\nsecure_aggregation = true\nclip_norm = 1.0"
    assert "hides only among at least 3" in said({}, job(masked))
    assert said({}, job("[cohort]\nsize = 2")) == ""


def test_every_reason_is_given_at_once() -> None:
    text = said({"rounds": 1, "batch_size": 1, "secure_aggregation": True}, job())
    assert text.count("[policy]") == 3


@given(start=st.integers(0, 1439), end=st.integers(0, 1439), now=st.integers(0, 1439))
def test_hours_of_the_day_may_pass_midnight(start: int, end: int, now: int) -> None:
    clock = [f"{minute // 60:02d}:{minute % 60:02d}" for minute in (start, end)]
    inside = (now - start) % 1440 < (end - start) % 1440
    moment = NOON.replace(hour=now // 60, minute=now % 60)
    assert (said({"hours": "-".join(clock)}, job(), now=moment) == "") == inside


def test_metrics_stay_or_leave_rounded() -> None:
    found = {"loss": (12.3456, 10), "accuracy": (7.0, 9), "odd": (float("nan"), 3), "none": (0.0, 0)}

    def leaving(**policy: Any) -> dict[str, tuple[float, int]]:
        return Rules(PolicyTable(**policy), {}).leaving(found)

    assert leaving(metrics="none") == {}
    assert leaving().keys() == found.keys()
    rounded = leaving(metrics_digits=1)
    assert rounded["loss"] == (pytest.approx(12.0), 10)
    assert rounded["accuracy"] == (pytest.approx(7.2), 9)
    assert rounded.keys() == {"loss", "accuracy"}


def test_no_loss_leaves_inside_an_update_or_a_line_of_the_log_either(tmp_path: Path) -> None:
    """The coordinator of q-FedAvg solves h = q F^(-q-1) |G|^2 + F^q / rate for F: it knows all else."""
    fair = '[algorithm]\nname = "qfedavg"\nq = 1.0\n[aggregation]\nweighting = "uniform"'
    assert said({}, job(fair)) == ""
    assert "tells the loss" in said({"metrics": "none"}, job(fair))
    assert "([policy] metrics_digits)" in said({"metrics_digits": 2}, job(fair))
    assert said({"metrics": "none"}, job()) == ""
    settings = 'coordinator = "hub:7443"\n[policy]\nmetrics = "none"\n[log_sharing]\nkinds = ["agent"]\n'
    (tmp_path / "agent.toml").write_text(settings)
    assert load_agent_config(tmp_path / "agent.toml").log_sharing.kinds == ["agent"]
    (tmp_path / "agent.toml").write_text(settings.replace('"agent"', '"figures"'))
    with pytest.raises(ConfigError, match="lines with losses"):
        load_agent_config(tmp_path / "agent.toml")


@pytest.fixture
def silo(tmp_path: Path) -> AgentConfig:
    create_ca(tmp_path / "ca")
    for name, role in (("north", "agent"), ("ada", "data-scientist"), ("vic", "viewer")):
        issue(tmp_path / "ca", name, role, tmp_path / name)  # type: ignore[arg-type]
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", ["localhost"])
    (tmp_path / "t.py").write_text("class T: ...\n")
    (tmp_path / "state").mkdir()
    return AgentConfig(
        coordinator="localhost:1",
        credentials=tmp_path / "north",
        state=tmp_path / "state",
        tasks={"t": "t.py:T"},
        folder=tmp_path,
    )


def instruction(
    wanted: JobConfig, job_id: str = "", number: int = 1, signer: Path | None = None, **changes: Any
) -> tuple[StepKey, StepInstruction]:
    """A step of a job; signed, its identifier follows from the submission unless another one is given."""
    submitter = changes.get("submitter", signer.name if signer else "")
    coordinator, time_signed = changes.get("coordinator", "hub"), changes.get("time", time.time())
    request = changes.get("request", "r1")
    follows = job_identifier(coordinator, submitter, request) if signer else "j1"
    step = StepKey(job_id or follows, number, 1, "train")
    proof = SubmissionProof("", "", b"", b"", "", 0.0, "")
    if signer is not None:
        identity = load_silo_identity(signer)
        place = {"submitter": submitter, "coordinator": coordinator, "time": time_signed}
        values = job_values(wanted.to_json(), MODEL, request, **place)
        purpose = "vouched" if submitter.startswith("token:") else "job"
        signature = (
            vouch(identity, submitter, values) if purpose == "vouched" else sign(identity, "job", values)
        )
        told = changes.get("told", submitter)
        proof = SubmissionProof(
            told, request, signature, identity.certificate, MODEL, time_signed, coordinator
        )
    work = ModelWork("train", ArtifactName(changes.get("model", MODEL), 1), "d" * 64)
    message = StepInstruction(step, 60.0, wanted.to_json(), work, proof)
    return step, message


def gatekeeper(silo: AgentConfig) -> Gatekeeper:
    """One that has met the coordinator hub."""
    gate = Gatekeeper(silo, "north")
    gate.meet((silo.folder / "hub" / "identity.crt").read_bytes())
    return gate


def admit(gate: Gatekeeper, *made: Any, wanted: JobConfig) -> str:
    return gate.admit(*made, wanted)


@pytest.mark.parametrize("activity", ["", "public_evaluation = true\n"])
def test_no_count_leaves_with_the_progress_of_private_work(silo: AgentConfig, activity: str) -> None:
    """Not with that of an evaluation on public test data either, whose counts the table withholds alike."""
    gate, seen = gatekeeper(silo), ProgressFigures(7, 9, 0.5)
    assert gate.working(job(), seen) == Told(seen)
    assert gate.working(job(EXAMPLE + activity), seen) is None
    update = TrainedUpdate("0" * 64, 4, 7, {"loss": (3.5, 7)})
    assert gate.trained(job(EXAMPLE + activity), update).value == UpdateFigures(1)
    closed = gatekeeper(replace(silo, policy=PolicyTable(metrics="none")))
    assert closed.working(job(), seen) is None


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        ('up = "lowrank(rank=2, basis=cohort)"', "which the ranks of a [cluster] do not know"),
        ('up = "topk(ratio=0.05) | int8"', ""),
        ('up = "bfloat16"\nfeedback = "on"', ""),
    ],
)
def test_a_cluster_refuses_what_its_ranks_cannot_write_before_it_trains(
    silo: AgentConfig, transfer: str, reason: str
) -> None:
    wanted = job(f"[transfer]\n{transfer}")
    found = replace(silo, cluster=ClusterTable()).rules().objections(wanted, None, NOON)
    assert [reason in objection for objection in found] == [True] * bool(reason)
    assert silo.rules().objections(wanted, None, NOON) == []


def test_a_changed_job_is_refused_under_its_old_name(silo: AgentConfig) -> None:
    gate = Gatekeeper(silo, "north")
    assert admit(gate, *instruction(job()), wanted=job()) == "t.py:T"
    other = job("[algorithm]\nepochs = 9")
    with pytest.raises(WorkFailed, match="another one than it was at first"):
        admit(gate, *instruction(other, number=2), wanted=other)
    # Also by an agent that was started again.
    with pytest.raises(WorkFailed, match="another one than it was at first"):
        admit(Gatekeeper(silo, "north"), *instruction(other, number=2), wanted=other)
    with pytest.raises(WorkFailed, match="round 4 is none of the job's"):
        admit(gate, *instruction(job(), number=4), wanted=job())


def test_a_person_approves_this_very_job(silo: AgentConfig) -> None:
    careful = replace(silo, policy=PolicyTable(approval=True))
    gate, wanted = Gatekeeper(careful, "north"), job()
    with pytest.raises(WorkFailed, match="roundtable client approve j1"):
        admit(gate, *instruction(wanted), wanted=wanted)
    known = KnownJobs(silo.state)
    with pytest.raises(ConfigError, match="not asked for such a job"):
        known.find("x")
    known.approve(known.find("j"))
    assert admit(gate, *instruction(wanted), wanted=wanted) == "t.py:T"
    # An approval is of a configuration, not of a name.
    path = silo.state / "jobs" / "approved" / "j1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "digest": "0" * 64}))
    with pytest.raises(WorkFailed, match="roundtable client approve j1"):
        admit(gate, *instruction(wanted), wanted=wanted)


def test_only_signed_jobs_of_named_submitters(silo: AgentConfig) -> None:
    strict = replace(silo, policy=PolicyTable(submitters=["ada"]))
    gate, wanted, folder = gatekeeper(strict), job(), silo.folder
    ada = folder / "ada"
    assert admit(gate, *instruction(wanted, signer=ada), wanted=wanted) == "t.py:T"
    with pytest.raises(WorkFailed, match="not signed by its submitter"):
        admit(gate, *instruction(wanted, "j2"), wanted=wanted)
    with pytest.raises(WorkFailed, match="is signed by 'ada'"):
        admit(gate, *instruction(wanted, signer=ada, submitter="eve"), wanted=wanted)
    with pytest.raises(WorkFailed, match="'vic' is viewer, and signs no jobs"):
        admit(gate, *instruction(wanted, signer=folder / "vic"), wanted=wanted)
    with pytest.raises(WorkFailed, match="'north' is agent, and signs no jobs"):
        admit(gate, *instruction(wanted, signer=folder / "north"), wanted=wanted)
    step, forged = instruction(wanted, signer=ada, request="r2")
    changed = job("[algorithm]\nepochs = 2")
    forged = replace(forged, config=changed.to_json())
    with pytest.raises(WorkFailed, match="signature of 'ada' under this job is not right"):
        gate.admit(step, forged, changed)


def test_a_signature_is_for_one_job_one_coordinator_and_a_time(silo: AgentConfig) -> None:
    gate, wanted, ada = gatekeeper(silo), job(), silo.folder / "ada"
    for changes, reason in (
        ({"job_id": "j6"}, "shows the signature of [0-9a-f]{12}: nobody has submitted it again"),
        ({"coordinator": "other"}, "is signed for the coordinator 'other'; this is 'hub'"),
        ({"time": time.time() - 31 * 86400}, "was signed 31.0 days ago"),
        ({"time": time.time() + 86400}, "was signed -1.0 days ago"),
    ):
        with pytest.raises(WorkFailed, match=reason):
            admit(gate, *instruction(wanted, signer=ada, **changes), wanted=wanted)  # type: ignore[arg-type]
    step, made = instruction(wanted, signer=ada)
    made = replace(made, submission=replace(made.submission, time=float("nan")))
    with pytest.raises(WorkFailed, match="is not right"):
        gate.admit(step, made, wanted)
    # One whose coordinator shows no identity, or somebody else's, has nothing that it could be signed for.
    for identity in (b"", (silo.folder / "north" / "identity.crt").read_bytes()):
        gate.meet(identity)
        with pytest.raises(WorkFailed, match=r"is signed for the coordinator|is not an coordinator's"):
            admit(gate, *instruction(wanted, signer=ada), wanted=wanted)


def test_one_signature_stands_for_the_runs_of_a_series_that_have_come_due(silo: AgentConfig) -> None:
    gate, ada, wanted = gatekeeper(silo), silo.folder / "ada", job('[queue]\nrepeat = "0 * * * *"')
    signed = time.time() - 40 * 86400.0
    step, first = instruction(wanted, signer=ada, request="r", time=signed)

    def run(number: int) -> str:
        request = run_request("r", number) if number else "r#0"
        job_id = job_identifier("hub", "ada", request)
        shown = replace(first, submission=replace(first.submission, request_id=request))
        return gate.admit(step._replace(job=job_id), shown, wanted)

    assert run(1) == run(2) == run(40 * 24) == "t.py:T"
    # It has just come due at the coordinator, whose clock need not be this one's.
    assert run(40 * 24 + 1) == "t.py:T"
    with pytest.raises(WorkFailed, match="run 1000 of a series that is due at"):
        run(1000)
    with pytest.raises(WorkFailed, match="is run 0 of a series"):
        run(0)
    # Under a job that is not repeated nothing else than what was signed is meant.
    wanted = job()
    step, first = instruction(wanted, signer=ada, request="s")
    shown = replace(first, submission=replace(first.submission, request_id="s#2"))
    with pytest.raises(WorkFailed, match="is not right"):
        gate.admit(step._replace(job=job_identifier("hub", "ada", "s#2")), shown, wanted)


def test_refused_jobs_push_out_nothing_that_ran(silo: AgentConfig) -> None:
    """A coordinator that has a signed job asks for a thousand others, and then for the first one anew."""
    strict = replace(silo, policy=PolicyTable(submitters=["ada"]))
    gate, wanted, ada = gatekeeper(strict), job(), silo.folder / "ada"
    step, signed = instruction(wanted, signer=ada)
    gate.admit(step, signed, wanted)
    for number in range(1005):
        with pytest.raises(WorkFailed, match="not signed by its submitter"):
            admit(gate, *instruction(wanted, f"refused{number}"), wanted=wanted)
    again = gatekeeper(strict)
    with pytest.raises(WorkFailed, match="nobody has submitted it again"):
        again.admit(step._replace(job="anew"), signed, wanted)
    other = job("[algorithm]\nepochs = 2")
    with pytest.raises(WorkFailed, match="another one than it was at first"):
        admit(again, *instruction(other, step.job, signer=ada), wanted=other)
    known = KnownJobs(silo.state)
    assert len(known.all()) == 201
    assert known.get(step.job) is not None


@pytest.mark.parametrize("name", ["../../credentials/node", "a/b", "", ".", "x" * 129, "a\0b"])
def test_an_identifier_that_leads_elsewhere_is_refused_and_touches_nothing(
    silo: AgentConfig, name: str
) -> None:
    gate, wanted = gatekeeper(silo), job()
    step, message = instruction(wanted)
    with pytest.raises(WorkFailed, match="names no job"):
        gate.admit(step._replace(job=name), message, wanted)
    assert not list((silo.state / "jobs").rglob("*.json"))


def test_whose_token_it_was_is_the_coordinators_word(silo: AgentConfig) -> None:
    hub, wanted = silo.folder / "hub", job()

    def vouched(gate: Gatekeeper, name: str, submitter: str, told: str = "") -> str:
        made = instruction(wanted, signer=hub, submitter=submitter, told=told or submitter, request=name)
        return gate.admit(*made, wanted)

    assert vouched(gatekeeper(silo), "r0", "token:alice") == "t.py:T"
    gate = gatekeeper(replace(silo, policy=PolicyTable(submitters=["token:alice", "ada"])))
    assert vouched(gate, "r1", "token:alice") == "t.py:T"
    with pytest.raises(WorkFailed, match=r"'token:bob' may not submit .* list it there under that name"):
        vouched(gate, "r2", "token:bob")
    with pytest.raises(WorkFailed, match="signature of 'hub' under this vouched is not right"):
        vouched(gate, "r3", "token:bob", told="token:alice")
    # For one with a key only that key speaks.
    with pytest.raises(WorkFailed, match="'hub' is coordinator, and signs no jobs"):
        vouched(gate, "r4", "ada")
    with pytest.raises(WorkFailed, match="not signed by its submitter"):
        admit(gate, *instruction(wanted, "j5"), wanted=wanted)


def test_a_submitter_whose_certificate_is_revoked(silo: AgentConfig) -> None:
    gate, wanted = gatekeeper(silo), job()
    listed = revoke(silo.folder / "ca", silo.folder / "ada" / "identity.crt")
    gate.revocations.learn(listed.read_bytes())
    with pytest.raises(WorkFailed, match=r"certificate of the signer of job [0-9a-f]{12} has been revoked"):
        admit(gate, *instruction(wanted, signer=silo.folder / "ada"), wanted=wanted)


def test_the_first_round_begins_with_the_model_that_was_signed(silo: AgentConfig) -> None:
    gate, wanted = gatekeeper(silo), job()
    with pytest.raises(WorkFailed, match="another model than the one that the submitter signed"):
        admit(gate, *instruction(wanted, signer=silo.folder / "ada", model="b" * 64), wanted=wanted)


def test_only_the_code_that_was_allowed_runs(silo: AgentConfig) -> None:
    toml = silo.folder / "agent.toml"
    digest = hash_of_code("task", "t.py:T", ENTRY_POINTS, silo.folder)
    assert digest == blake3(b"class T: ...\n").hexdigest()
    toml.write_text(
        f'coordinator = "localhost:1"\ncredentials = "north"\n[tasks.t]\nuse = "t.py:T"\n'
        f'blake3 = "{digest}"\ndata = {{ path = "/srv/t" }}\n'
    )
    config = load_agent_config(toml)
    assert config.task_tables["t"].data == {"path": "/srv/t"}
    gate, wanted = Gatekeeper(replace(config, state=silo.state), "north"), job()
    assert admit(gate, *instruction(wanted), wanted=wanted) == "t.py:T"
    (silo.folder / "t.py").write_text("class T: 'something else'\n")
    with pytest.raises(WorkFailed, match="is not the one that was allowed"):
        admit(gate, *instruction(wanted), wanted=wanted)


def test_a_package_is_pinned_as_a_whole(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("x = 1\n")
    before = hash_of_code("task", "pack.inner:T", ENTRY_POINTS, tmp_path)
    (package / "inner.py").write_text("x = 2\n")
    assert hash_of_code("task", "pack.inner:T", ENTRY_POINTS, tmp_path) != before


def test_the_silos_log_is_chained_signed_and_notices_every_change(silo: AgentConfig) -> None:
    gate, wanted = Gatekeeper(silo, "north"), job()
    hub = load_silo_identity(silo.folder / "hub")
    gate.meet(hub.certificate)
    for number in (1, 2, 3):
        step, message = instruction(wanted, number=number)
        gate.admit(step, message, wanted)
        finished = Finished(step, "c" * 64, 16, "d" * 64, "float32")
        header = agent_pb2.UploadHeader(step=common_pb2.Step(**step._asdict()))
        header.content.digest, header.content.size = finished.digest, finished.size
        receipt = agent_pb2.UploadReceipt(status=agent_pb2.UploadReceipt.ACCEPTED, time=5.0)
        receipt.signature = sign(hub, "receipt", receipt_values("north", header, receipt))
        gate.received(finished, receipt_of(receipt))
    receipt.signature = bytes(64)
    gate.received(finished, receipt_of(receipt))
    gate.close()
    lines = (silo.state / "audit.jsonl").read_text().splitlines()
    ca = (silo.folder / "ca" / "ca.crt").read_bytes()
    log = read_log(lines, ca, "agent")
    assert log.sealed == len(log.entries) == 7
    assert [item.detail["signed"] for item in log.entries if item.action == "receipt"] == [True] * 3 + [False]
    *entries, seal = lines
    for index, line in enumerate(entries):
        for other in ([], [line.replace("1", "2", 1)], [line, line]):
            with pytest.raises(AuditError):
                read_log([*entries[:index], *other, *entries[index + 1 :], seal], ca, "agent")
    with pytest.raises(AuditError, match="does not hold"):
        read_log([*entries, seal.replace("7", "8", 1)], ca, "agent")
    # The next process goes on where this one ended, also after a torn last line.
    with (silo.state / "audit.jsonl").open("a") as file:
        file.write('{"entry": {"seq')
    again = Gatekeeper(silo, "north")
    again.silo_log.note("north", "started")
    again.close()
    assert len(read_log((silo.state / "audit.jsonl").read_text().splitlines(), ca, "agent").entries) == 8


@pytest.mark.parametrize("text", ["lots", "0GiB", "-1GiB", "8"])
def test_a_size_of_memory_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size of memory"):
        PolicyTable(max_memory=text)
    assert PolicyTable(max_memory="1.5GiB").memory_bytes == 3 << 29


STATED = '[privacy]\nlevel = "{level}"\ndelta = 1e-5\nclip_norm = 1.0\n{spend}'


def test_what_jobs_promise_together_is_bounded_over_all_levels() -> None:
    policy = PolicyTable(stated_epsilon=8.0)
    central = job(STATED.format(level="client", spend="epsilon = 5.0"))
    noisy = job(STATED.format(level="dp_ftrl", spend="noise_multiplier = 1.5"))
    own = job(STATED.format(level="client_local", spend="epsilon = 100.0"))
    bare = job("")
    assert list(objections_to_sum(policy, central, [own])) == []
    [words] = objections_to_sum(policy, central, [central])
    assert "epsilon = 5 by the coordinator's word, earlier ones 5, and this silo allows 8" in words
    # One Gaussian release of noise multiplier 1.5, by the analytic formula.
    assert stated_epsilon(noisy) == pytest.approx(gaussian_epsilon(1.5, 1e-5))
    hidden = 'noise_multiplier = 6.0\ncohorts = "hidden"\nseparation = 2'
    turns = job(STATED.format(level="dp_ftrl", spend=hidden))
    assert stated_epsilon(turns) == pytest.approx(gaussian_epsilon(6.0 / 2**0.5, 1e-5)), "2 turns of 2 groups"
    sampled = job(STATED.format(level="client", spend="noise_multiplier = 6.0"))
    assert stated_epsilon(sampled) == pytest.approx(gaussian_epsilon(6.0 / 3**0.5, 1e-5)), "3 rounds of all"
    assert "no end to it" in next(objections_to_sum(policy, bare, []))
    assert "earlier ones inf" in next(objections_to_sum(policy, central, [bare]))
    assert list(objections_to_sum(policy, own, [bare])) == []
    assert list(objections_to_sum(PolicyTable(), bare, [bare])) == []


def test_a_silo_counts_every_job_that_it_ever_took_part_in(silo: AgentConfig) -> None:
    """Also those before the rule was set, by an agent that is started anew."""
    central = job(STATED.format(level="client", spend="epsilon = 5.0"))
    step, message = instruction(central)
    assert admit(Gatekeeper(silo, "north"), step, message, wanted=central) == "t.py:T"
    policy = silo.policy.model_copy(update={"stated_epsilon": 8.0})
    careful = Gatekeeper(replace(silo, policy=policy), "north")
    assert admit(careful, step, message, wanted=central) == "t.py:T"
    with pytest.raises(WorkFailed, match="earlier ones 5, and this silo allows 8"):
        admit(careful, step._replace(job="another"), message, wanted=central)

"""Analyses under differential privacy over real silos: what leaves, what it costs, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import NAMES, agents, federation_of
from noisy_silos import BEGAN, SURVEY, answered, offering, wait_for_silos, write

from roundtable.cli.main import run as run_command
from roundtable.client.agent.silo_log import NAME
from roundtable.client.policy.analysis_rules import AnalysesTable
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.policy.privacy_rules import privacy_objections
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import override_job
from roundtable.core.errors import ConfigError, PrivacyError, ProtocolError
from roundtable.core.evidence.audit_log import read_log
from roundtable.core.identity.credentials import CA_CERTIFICATE
from roundtable.core.initial_model import initial_model
from roundtable.core.task import load_task
from roundtable.operator import OperatorClient
from roundtable.privacy import compose, sums_charge, sums_charges
from roundtable.privacy.example_level import SiloAccount
from roundtable.simulation import simulate
from roundtable.surveys import analyse, load_survey, survey_job, survey_plan


async def test_each_silo_adds_its_noise_and_both_ledgers_are_charged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two surveys of three silos, the second one masked besides, which costs the same; a budget of the
    coordinator's stops a third before any silo is asked."""
    survey = write(tmp_path)
    plan = survey_plan(load_survey(survey))
    one = sums_charge(plan.noise_multiplier)
    by_round = sums_charges(survey_job(load_survey(survey), 3), plan.noise_multiplier)
    policy = PolicyTable(epsilon=3.0, delta=1e-6, analyses=AnalysesTable(epsilon=0.5))
    async with federation_of(tmp_path, "") as (address, folder):
        told = ["--coordinator", address, "--credentials", str(folder / "operator"), "--json"]
        silos = [offering((address, folder), name, policy) for name in NAMES]
        found = []
        with OperatorClient(address, folder / "operator") as operator:
            async with agents(*silos):
                await asyncio.to_thread(wait_for_silos, operator)
                for times in (1, 2):
                    more = ["--report", str(tmp_path / "report.json")]
                    more += ["--set", "secure_aggregation=true"] if times == 2 else []
                    code = await asyncio.to_thread(run_command, ["analyse", str(survey), *told, *more])
                    said = capsys.readouterr()
                    assert code == 0, said.err
                    found.append(json.loads(said.out))
                    reply = await asyncio.to_thread(operator.privacy)
                    accounts = {each.silo: each for each in reply.accounts}
                    spent = compose([one.repeated(times)], 1e-6)
                    assert [accounts[name].epsilon for name in NAMES] == [pytest.approx(spent)] * 3
                    assert "any one record of the silo alder" in accounts["alder"].statement
                    for config in silos:
                        path = config.state / "privacy" / "example.json"
                        kept = SiloAccount.from_json(path.read_text())
                        assert len(by_round) == 3
                        assert [entry.charge for entry in kept.entries] == by_round * times
                check = ["analyse", "--check", str(tmp_path / "report.json"), "--json"]
                assert run_command([*check, "--credentials", str(folder / "operator")]) == 0
                assert json.loads(capsys.readouterr().out) == found[-1]
                limit = compose([one.repeated(3)], 1e-6) - 0.01
                await asyncio.to_thread(operator.set_privacy_budget, "analysis", limit, 1e-6)
                assert await asyncio.to_thread(run_command, ["analyse", str(survey), *told]) == 2
                assert "above its budget" in capsys.readouterr().err
    privacy = found[0]["privacy"]
    assert privacy["epsilon"] == compose([one], 1e-6) <= 0.4
    assert [each["answers"][2]["answered"] for each in found] == [True, True]
    assert (privacy["relation"], privacy["guarantee"]) == ("add_remove", True)
    ages = [each["answers"][0]["values"]["age"]["all"] for each in found]
    assert [each["secure_aggregation"] for each in found] == [False, True]
    lines = (tmp_path / "state" / "alder" / NAME).read_text().splitlines()
    log = read_log(lines, (tmp_path / "ca" / CA_CERTIFICATE).read_bytes(), "agent").entries
    masked = [entry.detail["masked"] for entry in log if entry.action == "answered"]
    assert masked == [False] * 3 + [True] * 3
    assert ages[0]["count"] != ages[1]["count"], "new noise for each survey"
    for each in ages:
        # Six standard deviations of noise: once in 10^9 surveys outside.
        noise = plan.questions[0].noise["rows"] * 3**0.5
        assert abs(each["count"] - 603) < 6 * noise, "of the row that is none the age counts as the most"
        assert each["count_interval"][1] - each["count_interval"][0] <= 2 * 1.96 * noise + 1e-6


def test_who_asks_again_is_sent_the_same_and_pays_once(tmp_path: Path) -> None:
    """The second attempt of a round: also where rows have changed, and in whatever process."""
    survey = load_survey(write(tmp_path))
    job = survey_job(survey, 3)
    table = tmp_path / "alder.csv"
    first = answered(job, tmp_path, 1, table)
    table.write_text("\n".join(table.read_text().splitlines()[:-5]) + "\n")
    again = answered(job, tmp_path, 2, table)
    assert torch.equal(first.delta, again.delta)
    account = SiloAccount.from_json((tmp_path / "privacy" / "example.json").read_text())
    assert len(account.entries) == 1
    assert (first.examples, first.metrics, first.local) == (1, {}, BEGAN)
    # What was kept is lost: new noise, and a second charge.
    (tmp_path / "jobs" / "one-job" / "released-1.safetensors").write_bytes(b"damaged")
    third = answered(job, tmp_path, 3, table)
    assert not torch.equal(first.delta, third.delta)
    account = SiloAccount.from_json((tmp_path / "privacy" / "example.json").read_text())
    assert len(account.entries) == 2


def test_a_later_round_is_answered_once_for_each_of_its_questions(tmp_path: Path) -> None:
    """The second round: the same for who asks again, and paid anew for other public numbers, as after a
    coordinator was restored; nothing for public numbers of another round."""
    job = survey_job(load_survey(write(tmp_path)), 3)
    table = tmp_path / "alder.csv"
    layout = initial_model(job, load_task("analysis", tmp_path)).layout
    algorithm = make_algorithm(job.algorithm)
    [_, places] = algorithm.places
    survey, size = job.algorithm.survey, places.size(0)  # type: ignore[attr-defined]

    def second(seed: int) -> Any:
        public = survey.public_places.unpack(torch.zeros(size))
        noisy = np.random.default_rng(seed)
        sums = {name: noisy.normal(0, 1, shape) for name, shape in survey.sum_places.reals.items()}
        after = survey.step({**public, "silos": np.array([3.0])}, sums)
        return torch.cat([torch.zeros(layout.size - size), survey.public_places.pack(after)])

    def paid() -> list[tuple[int, int]]:
        account = SiloAccount.from_json((tmp_path / "privacy" / "example.json").read_text())
        return [(entry.round, entry.attempt) for entry in account.entries]

    first = answered(job, tmp_path, 1, table, 2, second(1))
    assert torch.equal(first.delta, answered(job, tmp_path, 2, table, 2, second(1)).delta)
    assert paid() == [(2, 1)]
    assert not torch.equal(first.delta, answered(job, tmp_path, 3, table, 2, second(2)).delta)
    assert paid() == [(2, 1), (2, 3)]
    with pytest.raises(ProtocolError, match="in order"):
        answered(job, tmp_path, 1, table, 3, torch.zeros(layout.size))
    assert paid() == [(2, 1), (2, 3)]


def test_no_row_decides_whether_a_silo_answers(tmp_path: Path) -> None:
    """Of a table without rows, with a single one, or with values that are none: each failure would tell."""
    job = survey_job(load_survey(write(tmp_path)), 3)
    for number, rows in enumerate(([], ["33,yes"], ["x,?", "-5,maybe", ",", "nan,yes", "1,2,3", "7"])):
        table = tmp_path / "few.csv"
        table.write_text("\n".join(["age,ill", *rows]) + "\n")
        folder = tmp_path / str(number)
        assert answered(job, folder, 1, table).delta.isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm.noise_multiplier": 0.001},
        {"privacy.noise_multiplier": 0.001},
        {"privacy.clip_norm": 0.001},
        {"privacy.epsilon": 0.39},
        {"rounds": 2},
        {"privacy.public_evaluation": True, "stop.metric": "open_questions", "stop.target": 0.0},
        {"transfer.up": "float16"},
    ],
    ids=str,
)
def test_noise_that_a_job_does_not_pay_for_is_refused_by_all(tmp_path: Path, change: dict[str, Any]) -> None:
    """Before round 1, and by the silo of a coordinator that does not look."""
    job = survey_job(load_survey(write(tmp_path)), 3)
    with pytest.raises((ConfigError, PrivacyError)):
        simulate(job, overrides=change, progress=False)
    if "transfer.up" not in change:
        with pytest.raises(PrivacyError):
            answered(override_job(job, change), tmp_path, 1, tmp_path / "alder.csv")


def test_exact_and_noisy_are_never_mixed_up(tmp_path: Path) -> None:
    noisy = survey_job(load_survey(write(tmp_path)), 3)
    exact = survey_job(
        load_survey(write(tmp_path, SURVEY.replace("[privacy]\nepsilon = 0.4\ndelta = 1e-6", ""))), 3
    )
    for level, algorithm in ((noisy, exact), (exact, noisy)):
        job = level.model_copy(update={"algorithm": algorithm.algorithm})
        with pytest.raises(PrivacyError, match="noise_multiplier"):
            simulate(job, progress=False)
        with pytest.raises(PrivacyError):
            answered(job, tmp_path, 1, tmp_path / "alder.csv")
    careful, more = (PolicyTable(analyses=AnalysesTable(epsilon=most)) for most in (0.4, 0.3))
    assert "under differential privacy alone" in next(privacy_objections(careful, exact))
    assert list(privacy_objections(careful, noisy)) == []
    assert "one may cost 0.3" in next(privacy_objections(more, noisy))


def test_a_plan_says_what_a_survey_costs_and_local_files_are_a_rehearsal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    survey = write(tmp_path)
    assert run_command(["analyse", str(survey), "--plan"]) == 0
    said = capsys.readouterr().out
    assert "costs epsilon = 0.3998 at delta = 1e-06" in said
    assert run_command(["analyse", str(survey), "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert all(each["epsilon"] < plan["epsilon"] for each in plan["questions"])
    assert run_command(["analyse", str(survey)]) == 0
    assert "Publish none of it" in capsys.readouterr().out
    found, again = analyse(survey), analyse(survey, overrides={"privacy.epsilon": 8.0})
    found.plot(tmp_path / "survey.svg")
    assert (tmp_path / "survey.svg").read_text().count("<path") > 40, "bars, with intervals of their own"
    assert found.privacy is not None
    assert found.privacy["guarantee"] is False
    spans = [each["ages"]["age"]["all"]["count_interval"] for each in (found, again)]
    assert spans[1][1] - spans[1][0] < spans[0][1] - spans[0][0]
    for wrong, message in (
        ({"privacy.level": "distributed"}, "it hides a whole silo by shares"),
        ({"privacy.noise": "distributed"}, "the sum of each digit"),
        ({"privacy.noise": "none"}, '"local" is what there is'),
        ({"privacy.delta": 0.5}, "delta"),
    ):
        with pytest.raises(ConfigError, match=message):
            analyse(survey, overrides=wrong)
    exact = write(tmp_path, SURVEY.replace("[privacy]\nepsilon = 0.4\ndelta = 1e-6", ""))
    assert run_command(["analyse", str(exact), "--plan"]) == 2

"""What is left of a silo's own epsilon: by its accounts and by what jobs state."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.known_jobs import KnownJob, KnownJobs
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.training.silo_account import payment
from roundtable.client.worker import own_budgets
from roundtable.client.worker.own_budgets import OwnBudget, OwnBudgets
from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.doctor.doctor_agent import _budgets
from roundtable.privacy import Charge, gaussian_charge

PRIVACY = ExampleLevel(level="example", epsilon=100.0, delta=1e-5, clip_norm=1.0, noise_multiplier=1.0)


def charge() -> Charge:
    return gaussian_charge("example", {"sampling": "none"}, 2.0, steps=1)


def config(folder: Path, **policy: float) -> AgentConfig:
    return AgentConfig("hub:1", folder, folder, policy=PolicyTable(**policy))  # type: ignore[arg-type]


def pay(folder: Path, round: int, epsilon: float | None) -> None:
    payment(folder / "privacy", "job", round, 1, epsilon, None)(PRIVACY, charge())


def of(budgets: list[OwnBudget], account: str) -> OwnBudget:
    (found,) = (budget for budget in budgets if budget.account == account)
    return found


def test_what_is_left_is_what_the_next_charge_is_measured_by(tmp_path: Path) -> None:
    """The figure is the account's own: as many charges pass as it says there is room for."""
    own = OwnBudgets(config(tmp_path, epsilon=6.0))
    assert of(own.now(), "example").left == 6.0
    warned: list[bool] = []

    def spend() -> None:
        for number in range(1, 50):
            pay(tmp_path, number, 6.0)
            warned.append(of(own.now(), "example").is_nearly_spent)

    with pytest.raises(PrivacyError):
        spend()
    budget = of(own.now(), "example")
    assert 0 < budget.left < 6.0
    assert budget.spent == pytest.approx(6.0 - budget.left)
    assert len(warned) > 2
    assert not warned[0]
    one_more = OwnBudgets(config(tmp_path, epsilon=budget.spent))
    assert of(one_more.now(), "example").is_nearly_spent
    (check,) = (c for c in _budgets(config(tmp_path, epsilon=budget.spent)) if "by example" in c.message)
    assert check.state == "warn"
    assert "0 of epsilon" in check.message
    assert {c.state for c in _budgets(config(tmp_path, epsilon=1000.0))} == {"ok"}
    assert list(_budgets(config(tmp_path))) == []


def test_without_a_limit_everything_is_left(tmp_path: Path) -> None:
    pay(tmp_path, 1, None)
    assert all(
        math.isinf(budget.left) and not budget.is_nearly_spent
        for budget in OwnBudgets(config(tmp_path)).now()
    )


def test_what_jobs_state_adds_up_and_is_counted_anew_when_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    count = own_budgets.stated_epsilon
    monkeypatch.setattr(own_budgets, "stated_epsilon", lambda job: (counted.append("once"), count(job))[1])
    own = OwnBudgets(config(tmp_path, stated_epsilon=5.0))
    for number, left in ((1, 3.0), (2, 1.0), (3, 0.0)):
        table = {"level": "client", "epsilon": 2.0, "delta": 1e-5, "clip_norm": 1.0}
        job = JobConfig.model_validate({"task": "toy", "privacy": table})
        known = KnownJob(str(number) * 12, job.digest, job.to_json(), "toy", "", "", "0" * 64, time.time())
        KnownJobs(tmp_path).remember(known)
        assert of(own.now(), "stated").left == left
        assert own.now() == own.now()
    assert len(counted) == 1 + 2 + 3


def test_an_account_that_is_damaged_is_no_account_with_much_left(tmp_path: Path) -> None:
    (tmp_path / "privacy").mkdir()
    (tmp_path / "privacy" / "example.json").write_text("{")
    with pytest.raises(PrivacyError, match="cannot be read"):
        OwnBudgets(config(tmp_path, epsilon=6.0)).now()

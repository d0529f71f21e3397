"""The table of docs/algorithms.md: each cell runs and equals the reference, or is refused before round 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import algorithm_table as table
import pytest
import torch
from algorithm_tasks import Normalised, Plain

from roundtable.core import JobConfig, Task
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.simulation import Result, simulate

ALGORITHMS = sorted(table.ROWS)
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
STATEFUL = ["ditto", "fedrep", "feddyn"]
"""One of each way in which something stays at a client."""


def run(
    name: str, column: str = "", backend: str = "sequential", task: Task | None = None, **changes: Any
) -> Result:
    document = table.document_of(name, column)
    document["seed"] = 3
    clients = 7 if column in table.ROBUST else 4  # Bulyan stands one liar among seven.
    if ("cohort" not in document and "round" not in document) or column in table.ROBUST:
        document["cohort"] = {"size": clients}
    document["algorithm"] |= {"batch_size": 8, "learning_rate": 0.05}
    workers = 2 if backend == "processes" else 1
    document["simulation"] = {"clients": clients, "backend": backend, "workers": workers}
    document |= changes
    task = task or (Normalised() if name == "fedbn" else Plain())
    result = simulate(JobConfig.model_validate(document), task)
    assert result.status == "finished"
    return result


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fast_backends_give_the_same(name: str) -> None:
    reference = run(name)
    assert reference.model.vector.isfinite().all()
    for backend in ("vectorised", "stacked"):
        found = run(name, backend=backend)
        torch.testing.assert_close(found.model.vector, reference.model.vector, rtol=2e-4, atol=2e-6)
        alone = " because " in found.backend or "one client after the other" in found.backend
        if backend == "vectorised":
            assert alone == bool(table.refusal(name, table.HOOKED))


@pytest.mark.parametrize("steps", [{}, {"personal_steps": 2}, {"personal_steps": 25}])
@pytest.mark.parametrize("step", [{}, {"momentum": 0.9, "weight_decay": 0.01, "max_gradient_norm": 0.5}])
def test_a_second_model_takes_the_same_steps_however_it_is_trained(
    steps: dict[str, int], step: dict[str, float]
) -> None:
    """Twice around the round's batches, in part of them, and as many as those; at another learning rate."""
    own = {**table.document_of("ditto")["algorithm"], **steps, **step, "batch_size": 8, "learning_rate": 0.05}
    changes = {"algorithm": {**own, "personal_learning_rate": 0.02}, "evaluation": {"every": 1}, "rounds": 3}
    one, other = (run("ditto", backend=backend, **changes) for backend in ("sequential", "vectorised"))
    assert "because" not in other.backend
    torch.testing.assert_close(other.model.vector, one.model.vector, rtol=2e-4, atol=2e-6)
    # What is evaluated are the clients' own models.
    assert other.history["loss"] == pytest.approx(one.history["loss"], rel=2e-4)


_ALL_THAT_A_STEP_SAYS = {"momentum": 0.9, "weight_decay": 0.01, "max_gradient_norm": 0.5}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("fedsam", _ALL_THAT_A_STEP_SAYS),
        ("moon", _ALL_THAT_A_STEP_SAYS),
        ("fedrep", {**_ALL_THAT_A_STEP_SAYS, "head_learning_rate": 0.1}),
        ("pfedme", {"inner_start": "local", "personal_weight_decay": 0.01, "max_gradient_norm": 0.5}),
        ("apfl", {"adaptive": True, "share_learning_rate": 3.0, "epochs": 2}),
        ("perfedavg", {"steps": 5, "max_gradient_norm": 0.5}),
    ],
)
def test_own_gradients_are_recorded_with_statistics_and_all_that_a_step_says(
    name: str, own: dict[str, float], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of clients, too: what they keep is what they are evaluated with."""
    if not kernels:
        monkeypatch.setattr("roundtable.simulation.backends.vectorised.recorded_steps.load", lambda: None)
    table_of_it = {**table.document_of(name)["algorithm"], **own, "batch_size": 8, "learning_rate": 0.05}
    document = {"algorithm": table_of_it, "evaluation": {"every": 1}, "rounds": 3}
    if name == "apfl":
        del table_of_it["steps"]
    one, other = (
        run(name, backend=backend, task=Normalised(), **document) for backend in ("sequential", "vectorised")
    )
    assert "because" not in other.backend
    torch.testing.assert_close(other.model.vector, one.model.vector, rtol=2e-4, atol=2e-6)
    assert other.history["loss"] == pytest.approx(one.history["loss"], rel=2e-4)
    assert other.history["train_loss"] == pytest.approx(one.history["train_loss"], rel=2e-4)


@pytest.mark.parametrize("name", STATEFUL)
def test_what_stays_at_a_client_goes_through_workers(name: str) -> None:
    assert torch.equal(run(name, backend="processes").model.vector, run(name).model.vector)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_sums_give_the_same_or_are_refused(name: str) -> None:
    if why := table.refusal(name, "secure sums"):
        with pytest.raises((ConfigError, PrivacyError)) as caught:
            run(name, "secure sums")
        assert str(caught.value) == why
        return
    masked, plain = run(name, "secure sums"), run(name)
    # Two rounds, each within the ring's rounding of values of up to 10.
    assert (masked.model.vector - plain.model.vector).abs().max() < 4e-3


@pytest.mark.parametrize("name", ["ditto", "pfedme", "finetuning", "fedper"])
def test_clients_evaluate_their_own_models(name: str) -> None:
    """No client sees all classes: its own model does better there than the one that all share."""
    often = {"rounds": 12, "evaluation": {"every": 12}}
    own, shared = run(name, **often), run("fedavg", **often)
    assert own.history[-1]["loss"] < shared.history[-1]["loss"]


@pytest.mark.parametrize("column", list(table.COLUMNS))
@pytest.mark.parametrize("name", ["scaffold", "scaffold, epochs", "fednova", "ditto", "fedbn"])
def test_a_cell_runs_where_the_table_says_so(name: str, column: str) -> None:
    if column == "secure sums" or table.refusal(name, column):
        pytest.skip("refused, or tried elsewhere")
    assert run(name, column).model.vector.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_cell_gives_the_same_by_each_backend(name: str) -> None:
    for column in [*table.COLUMNS, *table.ROBUST]:
        if table.refusal(name, column):
            continue
        one = run(name, column).model.vector
        for backend in ("vectorised", "stacked"):
            other = run(name, column, backend).model.vector
            off = float((other - one).abs().max())
            assert torch.allclose(other, one, rtol=2e-4, atol=2e-5), f"{column}, {backend}: off by {off:.1e}"


def test_the_page_shows_the_table() -> None:
    assert table.markdown() in PAGE.read_text(encoding="utf-8"), "run: python tools/algorithm_table.py"

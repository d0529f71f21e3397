"""Rules that need more than the round's updates, in simulated rounds with attackers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundtable.simulation import Result
from roundtable.simulation.world.attackers import Attackers

Run = Callable[..., Result]
MOST_ARE_HOSTILE = {"name": "sign_flip", "scale": 5.0, "count": 5}
SETTINGS: dict[str, Any] = {"cohort__size": 8, "rounds": 4}


def test_fltrust_stands_a_hostile_majority(run: Run) -> None:
    """The root data are the task's own: Images draws them by index, here of the one site that asks."""
    honest = run(**SETTINGS).history["accuracy"][-1]
    attacked = run(**SETTINGS, simulation__attack=MOST_ARE_HOSTILE).history["accuracy"][-1]
    trusting = run(
        **SETTINGS,
        simulation__attack=MOST_ARE_HOSTILE,
        aggregation__rule="fltrust",
        simulation__root_examples=8,
    )
    assert attacked < honest - 0.3
    assert trusting.history["accuracy"][-1] > honest - 0.25
    hostile = [f"client-{index}" for index in range(8) if index in Attackers.of(trusting.job)]
    weights = trusting.history.records[-1].weights
    assert [weights[name] for name in hostile] == [0.0] * 5


def test_root_data_are_drawn_anew_for_each_seed_only(run: Run) -> None:
    settings = {**SETTINGS, "rounds": 1, "aggregation__rule": "fltrust", "simulation__root_examples": 3}
    first, again = run(**settings), run(**settings)
    assert torch.equal(first.model.vector, again.model.vector)
    all_of_it = run(**{**settings, "simulation__root_examples": 1000})
    assert not torch.equal(first.model.vector, all_of_it.model.vector)


def test_foolsgold_goes_on_with_its_history(run: Run, tmp_path: Path) -> None:
    settings = {**SETTINGS, "cohort__size": 5, "aggregation__rule": "foolsgold"}
    whole = run(**settings)
    run(**{**settings, "rounds": 2}, _run_dir=tmp_path)
    resumed = run(**settings, _run_dir=tmp_path, _resume=True)
    assert torch.equal(resumed.model.vector, whole.model.vector)
    assert resumed.history.records == whole.history.records


def test_foolsgold_turns_from_sybils(run: Run) -> None:
    settings = {**SETTINGS, "aggregation__rule": "foolsgold"}
    sybils = run(**settings, simulation__attack={"name": "sign_flip", "scale": 1.0, "count": 3})
    weights = sybils.history.records[-1].weights
    hostile = [name for name in weights if int(name.split("-")[1]) in Attackers.of(sybils.job)]
    assert len(hostile) == 3
    assert sum(weights[name] for name in hostile) < 0.01


def test_custom_weights_are_by_name(run: Run) -> None:
    weights = {f"client-{index}": float(index == 2) for index in range(8)}
    found = run(**{**SETTINGS, "rounds": 1}, aggregation__weighting="custom", aggregation__weights=weights)
    assert found.history.records[0].weights["client-2"] == 1.0


def test_a_silo_without_a_weight_is_named(run: Run) -> None:
    job = run(**SETTINGS, aggregation__weighting="custom", aggregation__weights={"client-1": 1.0})
    assert job.status == "paused"
    assert "no custom weight for client-0, client-2" in job.reason

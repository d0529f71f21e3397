"""Any model: each architecture under each strategy equals one process, or is refused before it trains."""

from __future__ import annotations

import pytest
from architecture_matrix import PlannedCell, planned, probe_of, run_cells, tolerance
from architectures import ARCHITECTURES, Calling, GivenTable, Looking
from ranks import run_ranks
from torch import nn

from roundtable.cluster.plan.model_probe import example_batch, probe_model
from roundtable.core.errors import TaskError
from roundtable.core.task import Site


def cells(architectures: list[str], strategies: list[str]) -> tuple[list[PlannedCell], dict[str, str]]:
    """(what is to run, why the rest is refused)."""
    allowed, refused = [], {}
    for architecture in architectures:
        probe = probe_of(architecture)
        for name in strategies:
            cell = planned(architecture, probe, name)
            if isinstance(cell, str):
                refused[f"{architecture}, {name}"] = cell
            else:
                allowed.append(cell)
    return allowed, refused


def differences(allowed: list[PlannedCell], world: int) -> dict[str, float]:
    """The largest difference of each cell on so many ranks."""
    here = [cell for cell in allowed if cell.strategy.mesh.world == world]
    found = run_ranks(run_cells, world, here, timeout=900.0)[0] if here else []
    return {
        f"{cell.architecture}, {cell.name}": one["weights"] / tolerance(cell)
        for cell, one in zip(here, found, strict=True)
    }


OWN = ["tied rotary LM", "fused qkv", "nn.TransformerEncoder", "batch norm", "MLP"]


def test_models_train_as_on_one_process_or_are_refused_with_a_reason() -> None:
    allowed, refused = cells(OWN, ["ddp", "zero1", "zero3 sqrt", "tp", "tp sequence", "1f1b"])
    found = differences(allowed, 2)
    assert {name: gap for name, gap in found.items() if not gap < 1} == {}
    assert {"fused qkv, ddp", "tied rotary LM, zero3 sqrt", "MLP, 1f1b"} <= found.keys()
    assert "no repeated blocks to compute again" in refused["MLP, zero3 sqrt"]
    assert "sequence_parallel = true" in refused["fused qkv, tp sequence"]
    assert "are one parameter" in refused["tied rotary LM, 1f1b"]
    assert "does not skip parts" in refused["nn.TransformerEncoder, 1f1b"]


def test_a_split_and_zero1_are_refused_together() -> None:
    said = planned("fused qkv", probe_of("fused qkv"), "zero1 tp")
    assert isinstance(said, str)
    assert "'zero1' and tp = 2" in said
    assert "whole parameters" in said


def test_a_model_that_looks_at_values_is_traced_with_values() -> None:
    data, _ = GivenTable(Looking).data(Site("silo"))
    probe = probe_model(GivenTable(Looking), example_batch(data), device="cpu")
    assert probe.trace.kept
    assert all("without values" in reason for reason in probe.cannot_split.values())
    assert "without values" in probe.cannot_pipeline


def test_a_model_that_does_not_run_is_a_sentence() -> None:
    task = GivenTable(type("Wrong", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 5, 4)}))
    data, _ = task.data(Site("silo"))
    with pytest.raises(
        TaskError, match=r"does not run on the first training examples: RuntimeError: .*line \d+"
    ):
        probe_model(task, example_batch(data), device="cpu")


def test_a_loss_that_calls_parts_of_the_model_is_not_shared_out() -> None:
    ARCHITECTURES["calling"] = (Calling(), "")
    try:
        said = planned("calling", probe_of("calling"), "zero3")
    finally:
        del ARCHITECTURES["calling"]
    assert isinstance(said, str)
    assert "calls parts of the model and never the model" in said

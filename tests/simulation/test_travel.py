"""Frozen weights do not travel, and nothing comes out different for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import algorithm_table as table
import pytest
import torch
from adapter_task import Adapters, LanguageModel
from algorithm_tasks import Normalised
from torch import nn

import roundtable as rt
from roundtable.core import JobConfig
from roundtable.core.algorithms.known_algorithms import BUILTINS
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.seeds import derive_seed
from roundtable.simulation import Result, simulate

ADAPTERS = sum(p.numel() for p in LanguageModel().parameters() if p.requires_grad)


def run(made: Any = None, folder: Path | None = None, **tables: Any) -> Result:
    document = {
        "task": "adapters",
        "rounds": 2,
        "seed": 5,
        "algorithm": {"steps": 3, "batch_size": 4, "learning_rate": 0.2, "max_gradient_norm": 1.0},
        "simulation": {"clients": 3, "backend": "sequential", "workers": 1},
    }
    document |= tables
    result = simulate(JobConfig.model_validate(document), made or Adapters, run_dir=folder)
    assert result.status == "finished", result
    return result


def same(one: Result, other: Result) -> None:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_adapters_alone_give_what_everything_gives(tmp_path: Path) -> None:
    """To the bit, with a whole model at the end that a module takes strictly."""
    alone, everything = run(folder=tmp_path), run(model={"travel": "all"})
    assert alone.model.layout.size == ADAPTERS < everything.model.layout.size / 2
    same(alone, everything)
    assert alone.history[-1]["accuracy"] == everything.history[-1]["accuracy"]
    loaded = LanguageModel()
    loaded.load_state_dict(rt.load_model(tmp_path / "model.safetensors"))
    torch.manual_seed(derive_seed(5, "model"))
    assert torch.equal(loaded.words.weight, LanguageModel().words.weight)
    assert loaded.head.weight is loaded.words.weight
    told = (tmp_path / "events.jsonl").read_text() if (tmp_path / "events.jsonl").exists() else ""
    assert not told or f"{ADAPTERS:,} of " in told


@pytest.mark.parametrize("backend", ["processes", "vectorised", "stacked"])
def test_each_backend_fills_in_what_does_not_travel(backend: str) -> None:
    workers = 2 if backend == "processes" else 1
    found = run(simulation={"clients": 3, "backend": backend, "workers": workers})
    torch.testing.assert_close(found.model.vector, run().model.vector, rtol=2e-4, atol=2e-6)
    assert "because" not in found.backend, found.backend


class Halved(Normalised):
    """A frozen layer below what all algorithms train, and BatchNorm, whose statistics travel all the same."""

    def model(self) -> nn.Module:
        model = super().model()
        model.base[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
        return model


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_each_algorithm_gives_the_same_without_the_frozen_part(name: str) -> None:
    document = table.document_of(name)
    document["algorithm"] |= {"steps": 3, "batch_size": 8, "learning_rate": 0.05}
    document["simulation"] = {"clients": 3, "backend": "sequential", "workers": 1}
    rules = {"buffers": "local"} if name in ("eager", "feddyn", "streaming") else {}
    alone = run(Halved, **document, model=rules)
    everything = run(Halved, **document, model={"travel": "all", **rules})
    assert everything.model.layout.model.size - alone.model.layout.model.size == 48
    same(alone, everything)


def test_privacy_and_masks_concern_what_travels() -> None:
    noise = {"level": "client", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-5}
    private: dict[str, Any] = {
        "privacy": noise,
        "aggregation": {"weighting": "uniform"},
        "evaluation": {"every": 0},
    }
    alone, everything = run(**private), run(**private, model={"travel": "all"})
    assert alone.history.records[-1].charge["epsilon"] == everything.history.records[-1].charge["epsilon"]
    base = run(rounds=1).model.state_dict()["places.weight"]
    assert torch.equal(alone.model.state_dict()["places.weight"], base)
    assert not torch.equal(everything.model.state_dict()["places.weight"], base)
    masked = run(
        privacy={"level": "none", "secure_aggregation": True, "clip_norm": 10.0}, evaluation={"every": 0}
    )
    assert (masked.model.vector - run().model.vector).abs().max() < 4e-3


def test_only_some_of_what_is_trained_travels_and_that_is_said() -> None:
    job = {"only": ["*lora_b"]}
    told: list[str] = []
    result = simulate(
        JobConfig.model_validate({"task": "t", "rounds": 1, "model": job, "simulation": {"clients": 2}}),
        Adapters,
        progress=lambda progress: told.append(progress.note.message) if progress.note else None,
    )
    assert {spec.name.rpartition(".")[2] for spec in result.model.layout.averaged} == {"lora_b"}
    assert any("8 tensors are trained and stay at each silo" in line for line in told)
    with pytest.raises(ConfigError, match=r"model.only: the pattern '\*lara_\*' fits none"):
        run(model={"only": ["*lara_*"]})


@pytest.mark.parametrize("backend", ["sequential", "vectorised", "stacked"])
def test_a_task_that_changes_what_it_has_frozen_is_told(backend: str) -> None:
    simulation = {"clients": 2, "backend": backend, "workers": 1}
    document = {"task": "t", "rounds": 1, "simulation": simulation}
    with pytest.raises(TaskError, match=r"'places.weight' is frozen.*travel = \"all\""):
        simulate(JobConfig.model_validate(document), Adapters(moved=1e-6))

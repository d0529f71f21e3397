"""Any model: each architecture under each strategy equals one process, or is refused before it trains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_matrix import (
    STRATEGIES,
    PlannedCell,
    planned,
    probe_of,
    run_cells,
    table_of_page,
    tolerance,
    write_silo,
)
from architectures import (
    ARCHITECTURES,
    Calling,
    GivenTable,
    HalvingGate,
    Looking,
    Mixing,
    Perceptron,
    SharedScale,
)
from attention_calls import CALLS, attention_gaps
from cluster_models import FeedForward
from ranks import run_ranks
from real_memory import peak_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.profiler import ProfilerActivity, profile

from roundtable.cli.main import run
from roundtable.cluster.parallel.split_check import LayerSplit, between, wrong_split
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.train.pretrained_weights import pretrained_weights
from roundtable.core.errors import TaskError
from roundtable.core.task import Site


def cells(architectures: list[str], strategies: list[str]) -> tuple[list[PlannedCell], dict[str, str]]:
    """(what is to run, why the rest is refused)."""
    allowed, refused = [], {}
    for architecture in architectures:
        probe = probe_of(architecture, max(STRATEGIES[name][0] for name in strategies))
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


OWN = ["ddp", "zero1", "zero3 sqrt", "tp", "tp sequence", "1f1b"]
QUICK = {
    "tied rotary LM": OWN,
    "nn.TransformerEncoder": ["zero3 sqrt", "tp", "1f1b"],
    "fused qkv": ["ddp", "tp sequence"],
    "batch norm": ["zero1", "zero2"],
    "MLP": ["ddp", "zero3 sqrt", "1f1b"],
    "LSTM": ["zero3"],
    # Of a library: Conv1D and fused projections over a sharded sequence, a norm that all heads share, a cache
    # of keys and values, and patches. The others are among the slow ones.
    "GPT-2": ["tp sequence", "1f1b"],
    "Qwen3": ["tp sequence"],
    "Llama": ["zero3 selective"],
    "ViT": ["zero3", "tp sequence"],
}
REFUSED = {
    ("tied rotary LM", "tp sequence"): "sequence_parallel = true",
    ("tied rotary LM", "1f1b"): "are one parameter",
    ("nn.TransformerEncoder", "1f1b"): "does not skip parts",
    ("batch norm", "zero1"): "takes statistics over the whole batch",
    ("MLP", "zero3 sqrt"): "no repeated blocks to compute again",
    ("GPT-2", "1f1b"): "are one parameter",
    ("ViT", "tp sequence"): "do not divide over tp = 2",
}


def test_models_train_as_on_one_process_or_are_refused_with_a_reason() -> None:
    """All in one group of two ranks; each cell as the page has it."""
    allowed, refused = [], {}
    there = [name for name in QUICK if not (needs := ARCHITECTURES[name][1]) or find_spec(needs)]
    for architecture in there:
        some, reasons = cells([architecture], QUICK[architecture])
        allowed += some
        refused |= {
            (architecture, name.removeprefix(f"{architecture}, ")): why for name, why in reasons.items()
        }
    found = differences(allowed, 2)
    assert {name: gap for name, gap in found.items() if not gap < 1} == {}
    assert refused.keys() == {each for each in REFUSED if each[0] in there}
    assert {each: why for each, why in refused.items() if REFUSED[each] not in why} == {}
    page = table_of_page()
    for architecture in there:
        for strategy in QUICK[architecture]:
            no = (architecture, strategy) in refused
            assert page[architecture, strategy].startswith("no (") == no, (architecture, strategy)


def test_heads_that_ranks_cannot_share_out_are_named() -> None:
    cannot = probe_of("tied rotary LM").cannot_split
    assert cannot[2] == ""
    assert "model.layers.0.attention.k has 2 heads of 8 columns, which do not divide over tp = 4" in cannot[4]


def test_attention_over_ranks_gives_what_torch_gives() -> None:
    for gaps in run_ranks(attention_gaps, 2):
        assert gaps.keys() == set(CALLS)
        assert {name: gap for name, gap in gaps.items() if not gap < 1e-12} == {}


@pytest.mark.parametrize(
    ("architectures", "strategies"),
    [
        (["LSTM", "nn.TransformerEncoder"], ["tp sequence"]),
        *(pytest.param([name], list(STRATEGIES), marks=pytest.mark.slow, id=name) for name in ARCHITECTURES),
    ],
)
def test_a_silo_reads_why_its_strategy_is_refused(
    architectures: list[str], strategies: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there = [
        name for name in architectures if not ARCHITECTURES[name][1] or find_spec(ARCHITECTURES[name][1])
    ]
    if not there:
        pytest.skip(f"the libraries of {', '.join(architectures)} are not installed")
    _, refused = cells(there, strategies)
    assert refused
    for name, reason in refused.items():
        architecture, strategy = name.split(", ")
        agent, job = write_silo(tmp_path, architecture, strategy)
        capfd.readouterr()
        assert run(["client", "--config", str(agent), "plan", str(job)]) == 2, name
        said = capfd.readouterr().err
        assert reason in said, name
        assert "Traceback" not in said, name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_all_models_under_all_strategies(architecture: str) -> None:
    if needs := ARCHITECTURES[architecture][1]:
        pytest.importorskip(needs, reason=f"{needs} is not installed")
    allowed, _ = cells([architecture], list(STRATEGIES))
    found = {**differences(allowed, 2), **differences(allowed, 4)}
    assert len(found) == len(allowed)
    assert {name: gap for name, gap in found.items() if not gap < 1} == {}


@pytest.mark.parametrize(("kind", "said"), [(Mixing, "do not add up to the whole"), (HalvingGate, "")])
def test_a_split_is_tried_on_numbers_before_it_is_offered(kind: type[nn.Module], said: str) -> None:
    module = kind()
    split = LayerSplit(("up",), "down", packed={"up": (64, 64)} if module.up.out_features == 128 else {})
    assert said in wrong_split(module, split, ((torch.empty(2, 3, 32),), {}))
    if not said:
        assert "do not add up" in wrong_split(
            module, LayerSplit(("up",), "down"), ((torch.empty(2, 3, 32),), {})
        )


def test_a_split_of_large_layers_is_tried_without_their_matrices() -> None:
    """Each would take 128 MiB: made-up ones are views, halved as such, and multiplied by in parts."""
    with torch.device("meta"):
        module, arguments = FeedForward(2048, 8192), ((torch.empty(1, 512, 2048),), {})
    split = LayerSplit(("w1", "w3"), "w2")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        assert wrong_split(module, split, arguments) == ""
        assert between(module, split, arguments) == []
    assert peak_of(traced) < 80 << 20


def test_what_all_columns_share_is_found_between_the_layers() -> None:
    arguments = ((torch.empty(2, 3, 32),), {})
    split = LayerSplit(("up",), "down")
    assert wrong_split(SharedScale(), split, arguments) == ""
    assert between(SharedScale(), split, arguments) == ["scale"]


def test_a_tasks_own_plan_names_layers_that_are_there() -> None:
    task = GivenTable(Perceptron)
    task.tensor_parallel = lambda model: {"0": "column", "9": "row"}
    data, _ = task.data(Site("silo"))
    with pytest.raises(TaskError, match="'9': 'row', and '9' is not a layer of the model"):
        probe_model(task, data, device="cpu")


def test_files_of_a_library_are_read_by_the_names_that_its_model_has(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("Mixtral", "BERT"):
        task, _ = ARCHITECTURES[name]
        model: Any = task.model()
        model.save_pretrained(tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        old = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): value
            for key, value in load_file(file).items()
        }
        save_file(old, file)
        assert not model.state_dict().keys() <= old.keys()
        found = pretrained_weights(file, task)
        for key, weight in model.named_parameters():
            assert torch.equal(found[key], weight), key


def test_a_split_and_zero1_are_refused_together() -> None:
    said = planned("fused qkv", probe_of("fused qkv"), "zero1 tp")
    assert isinstance(said, str)
    assert "'zero1' and tp = 2" in said
    assert "whole parameters" in said


def test_a_model_that_looks_at_values_is_traced_with_values() -> None:
    data, _ = GivenTable(Looking).data(Site("silo"))
    probe = probe_model(GivenTable(Looking), data, device="cpu")
    assert probe.trace.kept
    assert all("without values" in reason for reason in probe.cannot_split.values())
    assert "without values" in probe.cannot_pipeline


def test_a_model_that_does_not_run_is_a_sentence() -> None:
    task = GivenTable(type("Wrong", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 5, 4)}))
    data, _ = task.data(Site("silo"))
    with pytest.raises(
        TaskError, match=r"does not run on the first training examples: RuntimeError: .*line \d+"
    ):
        probe_model(task, data, device="cpu")


def test_a_loss_that_calls_parts_of_the_model_is_not_shared_out() -> None:
    ARCHITECTURES["calling"] = (Calling(), "")
    try:
        said = planned("calling", probe_of("calling"), "zero3")
    finally:
        del ARCHITECTURES["calling"]
    assert isinstance(said, str)
    assert "calls parts of the model and never the model" in said

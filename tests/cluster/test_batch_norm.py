"""Batch normalisation over ranks: the statistics of one process, or each rank's by choice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_cases import Case, run_cases
from cluster_going_on import go_on, twice
from cluster_masks import outcomes
from cluster_models import Language, Normed, Transformer
from cluster_plans import case, plan
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.choice.planner import make_plan
from roundtable.cluster.parallel.shared_batch_norm import MicroBatch, share, share_batch_norms
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.task import Site

SHORT = {"steps": 2}
TWO = [
    case("ddp ragged", plan("ddp", 4, dp=2), {"batch_size": 7, "steps": 3}, kind=Normed),
    case("ddp sqrt", plan("ddp", 4, dp=2, checkpointing="sqrt"), algorithm=SHORT, kind=Normed),
    case("zero1", plan("zero1", 4, dp=2), algorithm=SHORT, kind=Normed),
    case(
        "zero2 selective",
        plan("zero2", 4, fsdp=2, checkpointing="selective"),
        algorithm=SHORT,
        kind=Normed,
    ),
    case("zero3", plan("zero3", 4, fsdp=2, checkpointing="every"), algorithm=SHORT, kind=Normed),
    case("tp", plan(micro=8, tp=2), algorithm=SHORT, kind=Normed),
    case("one example", plan("ddp", 1, dp=2), {"batch_size": 1}, kind=Normed),
]
FOUR = [
    case("hsdp", plan("zero3", 2, dp=2, fsdp=2), algorithm=SHORT, kind=Normed),
    case("fsdp tp", plan("zero3", 4, fsdp=2, tp=2), algorithm=SHORT, kind=Normed),
    case("few examples", plan("zero3", 1, fsdp=4), {"batch_size": 3}, kind=Normed),
]


def small(name: str, strategy: Any, dtype: torch.dtype = torch.float64) -> Case:
    return Case(name, strategy, Language(kind=Normed, dtype=dtype), {"steps": 3, "batch_size": 8})


@pytest.mark.parametrize(
    "cases",
    [TWO, pytest.param(FOUR, marks=pytest.mark.slow)],
    ids=["two ranks", "four ranks"],
)
def test_statistics_of_a_batch_are_those_of_one_process(cases: list[Case], tmp_path: Path) -> None:
    for results in run_ranks(run_cases, cases[0].strategy.mesh.world, cases, tmp_path):
        for name, result in results.items():
            assert result["weights"] < 1e-10, name
            assert max(result["file"], result["loss"]) < 1e-6, name


def test_in_bfloat16_statistics_keep_their_digits(tmp_path: Path) -> None:
    strategies = {
        "ddp": plan("ddp", 4, dp=2, precision="bfloat16"),
        "zero2": plan("zero2", 4, fsdp=2, precision="bfloat16"),
        "zero3": plan("zero3", 4, fsdp=2, precision="bfloat16", checkpointing="every"),
    }
    cases = [small(name, strategy, torch.float32) for name, strategy in strategies.items()]
    for results in run_ranks(run_cases, 2, cases, tmp_path):
        for name, result in results.items():
            assert result["loss"] < 5e-3, name
            assert result["weights"] < 0.1, name
            assert result["evaluated"] < 0.05, name


def test_statistics_of_each_rank_are_counted_once_too() -> None:
    kinds = ("none", "every", "selective", "sqrt")
    cases = [small(kind, plan("ddp", 2, dp=2, batch_norm="local", checkpointing=kind)) for kind in kinds] + [
        small("whole", plan("ddp", 4, dp=2))
    ]
    first, second = run_ranks(outcomes, 2, cases)
    # They were averaged at the end of the round.
    assert first["none"] == second["none"]
    for kind in kinds:
        assert first[kind] == first["none"], kind
    mean = "blocks.0.scale.running_mean"
    assert first["none"][1][mean] != pytest.approx(first["whole"][1][mean], rel=1e-3)


def test_a_round_goes_on_with_the_statistics_that_each_rank_had(tmp_path: Path) -> None:
    own = {"batch_norm": "local"}
    cases = [
        small("zero3", plan("zero3", 2, fsdp=2, **own)),
        small("apart", plan("ddp", 2, dp=2, local_steps=3, **own)),
        replace(small("ended", plan("ddp", 2, dp=2, **own)), algorithm={**SHORT, "batch_size": 8}),
    ]
    for found in run_ranks(twice, 2, cases, tmp_path):
        for name, (whole, parts) in found.items():
            assert whole.keys() == parts.keys()
            for buffer, values in whole.items():
                assert torch.equal(values, parts[buffer]), (name, buffer)
    # With no step left one rank has the mean of what two had.
    one = replace(cases[-1], strategy=plan("none", 8, **own))
    for buffer, values in run_ranks(go_on, 1, one, tmp_path / "ended")[0].items():
        assert torch.allclose(values, found["ended"][0][buffer], rtol=0.0, atol=1e-12), buffer


class OwnKind(nn.BatchNorm1d):
    """Normalises in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, length] → the same shape."""
        return super().forward(x) * 2


class Functional(Transformer):
    """Normalises without a module."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → logits."""
        return F.batch_norm(super().forward(x).transpose(1, 2), None, None, training=True).transpose(1, 2)


class Instances(Transformer):
    """Normalises each example by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → logits."""
        return F.instance_norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


@cache
def looked_over(kind: type[nn.Module]) -> ModelProbe:
    task = Language(kind=kind)
    return probe_model(task, task.data(Site("silo"))[0], device="cpu")


def planned(strategy: dict[str, Any], kind: type[nn.Module] = Normed, batch_size: int = 8) -> Any:
    table = ClusterTable.model_validate({"strategy": strategy})
    job = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": batch_size}})
    return make_plan(looked_over(kind), Resources(1, 4, 1 << 30, "cpu"), job, table).strategy


def test_a_plan_runs_a_batch_whole_or_says_why_it_cannot() -> None:
    assert planned({}).micro_batch == 2
    assert planned({"data_parallel": "zero3"}, batch_size=64).micro_batch == 16
    with pytest.raises(
        ConfigError, match=r"micro_batch = 1: blocks\.0\.scale takes statistics over the whole"
    ):
        planned({"micro_batch": 1})
    with pytest.raises(ConfigError, match=r"blocks\.0\.scale takes statistics over a batch, and a pipeline"):
        planned({"pp": 2})
    local = planned({"micro_batch": 1, "batch_norm": "local"})
    assert "batch statistics of each micro-batch" in str(local)
    assert planned({"micro_batch": 1}, Transformer).micro_batch == 1
    for kind in (Functional, Instances):
        assert planned({"batch_norm": "local"}, kind).mesh.data == 4
    assert planned({}, Instances).mesh.data == 4
    with pytest.raises(ConfigError, match="the model takes statistics over a batch in a way of its own"):
        planned({"data_parallel": "ddp"}, Functional)


def test_what_is_no_statistic_is_refused() -> None:
    own = nn.Sequential(OwnKind(4))
    with pytest.raises(TaskError, match=r"0 takes statistics over a batch in a way of its own"):
        share_batch_norms(own, object(), MicroBatch())  # type: ignore[arg-type]
    share_batch_norms(own, None, MicroBatch())
    assert isinstance(own[0], OwnKind)
    layer = nn.BatchNorm1d(3)
    share(layer, None, MicroBatch())
    with pytest.raises(TaskError, match="one value of each channel"):
        layer(torch.ones(1, 3))
    with pytest.raises(ValueError, match="2D or 3D"):
        layer(torch.ones(1, 3, 2, 2))


def test_a_layer_by_itself_is_torchs_own() -> None:
    theirs = nn.BatchNorm2d(3, momentum=None, dtype=torch.float64)
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
    ours = nn.Sequential(nn.BatchNorm2d(3, momentum=None, dtype=torch.float64))
    ours[0].load_state_dict(theirs.state_dict())
    share_batch_norms(ours, None, MicroBatch())
    for seed in (1, 2):
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        theirs(one).pow(3).sum().backward()
        ours(other).pow(3).sum().backward()
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours[0].weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours[0].state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))

"""Which precision a silo's devices train in; float16's loss scale, alike on all ranks."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from cluster_cases import Case
from cluster_half import lagging, overflow
from cluster_models import Language
from cluster_plans import case, plan
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.agent.cluster_trainer import figures_of
from roundtable.cluster.choice.planner import ClusterPlan, make_plan
from roundtable.cluster.parallel.strategy import Strategy, take_kernels
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.precision_choice import rounded_by_half, settled
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.stepping.agreed_step import AgreedFigures
from roundtable.cluster.stepping.loss_scaling import GROWS_AFTER, NAME, LossScale
from roundtable.cluster.train.loss_guard import CheckpointTimes
from roundtable.cluster.train.round_course import RoundCourse, StepTimes
from roundtable.cluster.train.round_reports import RoundProgress, round_metrics
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, EncodingError
from roundtable.core.task import Site, Task

HALF = {"steps": 8, "batch_size": 8, "learning_rate": 0.05, "max_gradient_norm": 0.5}
GPU = Resources(1, 2, 1 << 30)
JOB = JobConfig.model_validate({"task": "t"})
NOISE = {"level": "example", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
NOISY = JobConfig.model_validate({"task": "t", "privacy": NOISE})


def chosen(resources: Resources, job: JobConfig = JOB, precision: str = "auto") -> str:
    return settled(ClusterTable.model_validate({"precision": precision}), resources, job)[0].precision


def test_auto_is_what_the_devices_multiply_fast() -> None:
    assert chosen(GPU) == "bfloat16"
    assert chosen(replace(GPU, gpus="float16")) == "float16"
    assert chosen(replace(GPU, gpus="float32")) == "float32"
    assert chosen(replace(GPU, device="cpu")) == "float32"
    assert chosen(GPU, NOISY) == "float32"
    assert chosen(GPU, precision="float32") == "float32"
    with pytest.raises(ConfigError, match="since Ampere"):
        chosen(replace(GPU, gpus="float16"), precision="tf32")


class Tabular(Task):
    """A table whose columns have deviation 1 around `mean`."""

    def __init__(self, mean: float = 0.0) -> None:
        self.mean = mean

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def data(self, site: Site) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        shifted = x + self.mean * torch.tensor([0.0, 0.0, 1.0, 0.0])
        return (shifted, x.sum(1, keepdim=True)), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])


class Placing(nn.Linear):
    """Mixes what it computes with numbers of one precision."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, columns] → [batch, 1]."""
        return torch.lerp(torch.zeros(len(x), 1), super().forward(x), 0.5)


class Single(Tabular):
    """Runs in one precision alone."""

    def model(self) -> nn.Module:
        return nn.Sequential(Placing(4, 1))


def planned(task: Task, resources: Resources, precision: str = "auto") -> ClusterPlan:
    probe = probe_model(task, task.data(Site("silo"))[0], bfloat16=True)
    job = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 8}})
    return make_plan(probe, resources, job, ClusterTable.model_validate({"precision": precision}))


def test_two_bytes_are_not_chosen_where_they_would_round_the_examples() -> None:
    assert planned(Tabular(), GPU).strategy.precision == "bfloat16"
    years = planned(Tabular(2000.0), GPU)
    assert years.strategy.precision == "float32"
    assert "round column 3 of the model's input 1" in years.reasons[0]
    assert planned(Tabular(2000.0), GPU, "bfloat16").strategy.precision == "bfloat16"
    # What the model is given counts, and not what it is to say.
    assert not rounded_by_half(Tabular(), (torch.randn(8, 4), 2000 + torch.rand(8, 1)))


def test_a_model_that_does_not_run_in_two_bytes_is_planned_in_four() -> None:
    plan = planned(Single(), GPU)
    assert plan.strategy.precision == "tf32"
    assert "does not run in two bytes (RuntimeError: expected dtype float" in plan.reasons[0]
    assert planned(Single(), replace(GPU, gpus="float16")).strategy.precision == "float32"
    with pytest.raises(ConfigError, match="does not run in it"):
        planned(Single(), GPU, "bfloat16")


class Mixed(Tabular):
    """One of its layers has weights of two bytes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Cast(8, 8).bfloat16(), nn.Linear(8, 1))


class Cast(nn.Linear):
    """Computes in its own precision."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, in] → [batch, out]."""
        return super().forward(x.to(self.weight.dtype)).float()


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_weights_of_two_types_are_not_shared_out(kind: str) -> None:
    probe = probe_model(Mixed(), Mixed().data(Site("silo"))[0], device="cpu")
    cpus = Resources(1, 2, 1 << 30, "cpu")
    table = ClusterTable.model_validate({"strategy": {"data_parallel": kind}})
    with pytest.raises(ConfigError, match=rf"{kind}: 0\.weight has 4 bytes for each value and 1\.weight 2"):
        make_plan(probe, cpus, JOB, table)
    assert make_plan(probe, cpus, JOB, ClusterTable()).strategy.data_parallel == "ddp"


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"nesterov": True, "momentum": 0.9}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_step_of_sgd_moves_weights_of_any_type(dtype: torch.dtype, options: dict[str, Any]) -> None:
    start, gradient = torch.randn(5, 7).to(dtype), torch.randn(5, 7).to(dtype)
    weight, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    weight.grad, wide.grad = gradient.clone(), gradient.float()
    ours = torch.optim.SGD([weight], lr=0.1, **options)
    take_kernels(ours)
    ours.step()
    torch.optim.SGD([wide], lr=0.1, foreach=False, **options).step()
    assert torch.allclose(weight.float(), wide, rtol=2**-7, atol=2**-9)


@given(st.lists(st.booleans(), max_size=60), st.integers(0, GROWS_AFTER - 1))
def test_the_scale_is_a_power_of_two_within_bounds_and_outlives_rounds(steps: list[bool], good: int) -> None:
    scale = LossScale(good=good)
    for sound in steps:
        before = scale.scale
        scale.taken() if sound else scale.overflowed()
        assert scale.scale in (before, 2 * before) if sound else scale.scale in (before / 2, 1.0)
        assert torch.frexp(torch.tensor(scale.scale)).mantissa == 0.5
        assert LossScale.kept({NAME: scale.to_tensor()}) == scale


def test_a_damaged_scale_is_refused() -> None:
    for values in ([0.0, 1.0], [float("nan"), 0.0], [4.0, -1.0], [4.0]):
        with pytest.raises(EncodingError, match="loss scale"):
            LossScale.kept({NAME: torch.tensor(values, dtype=torch.float64)})


@pytest.mark.slow
def test_steps_that_overflow_are_left_out_on_all_ranks_alike() -> None:
    strategies = {
        "ddp": plan("ddp", dp=2),
        "zero1": plan("zero1", dp=2),
        "zero3": plan("zero3", micro=1, fsdp=2),
        "tp": plan(tp=2, sequence_parallel=True),
        "1f1b": plan(pp=2),
    }
    cases = [
        Case(name, replace(strategy, precision="float16"), Language(), HALF)
        for name, strategy in strategies.items()
    ]
    first, second = run_ranks(overflow, 2, cases, 2.0**24)
    for name, found in first.items():
        skipped = found["skipped"]
        assert 0 < skipped < HALF["steps"], (name, found)
        assert found["scale"] == 2.0 ** (24 - skipped), name
        assert found["good"] == HALF["steps"] - skipped, name
        assert found["reports"][-1] == skipped, name
        assert found["same"], name
        assert found["moved"], name
        assert {**second[name], "moved": True} == {**found, "moved": True}, name


def test_low_rank_factors_would_keep_what_overflowed() -> None:
    with pytest.raises(ConfigError, match="overflowed"):
        Strategy(plan("ddp", dp=2).mesh, "ddp", precision="float16", reduction="powersgd")


def test_a_skipped_steps_norm_does_not_leave() -> None:
    step = {
        **{"step": 1, "steps": 2, "learning_rate": 0.1, "norm": float("inf"), "examples": 8, "tokens": 0},
        **{"utilisation": None, "memory": 1, "seconds": 0.5, "communicating": None, "waiting": 0.0},
    }
    assert "gradient_norm" not in figures_of(step)


def test_means_of_a_round_that_went_on_from_a_checkpoint_are_of_its_own_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint brings 96 examples and three skipped steps, which took no time here and have no norm."""
    clock = [100.0]
    monkeypatch.setattr("roundtable.cluster.train.round_course.time.perf_counter", lambda: clock[0])
    done = RoundProgress(seen=96, loss_sum=48.0, skipped=3)
    course = RoundCourse(1, 16, done, lambda report: None, lambda report: report, scale=LossScale())
    course._noted = clock[0]
    for step, norm in enumerate([2.0, inf, 4.0], 13):
        found = AgreedFigures(1.0, norm, (1.0,), stop=False, due=False)
        assert course.allows(step, found) == (norm < inf)
        clock[0] += 0.5
        course.note(found, StepTimes(step, 8, 0.1, clock[0], clock[0]))
    told = round_metrics(Task(), done, private=False)
    assert told == {"loss": (72.0, 120), "gradient_norm": (6.0, 2), "examples_per_second": (16.0, 1)}
    assert done.skipped == 4


def test_a_checkpoint_before_a_step_has_the_scale_that_the_step_began_with() -> None:
    scale, kept = LossScale(1024.0, GROWS_AFTER - 1), []
    times = CheckpointTimes(ClusterTable.model_validate({"checkpoint_steps": 50}))
    course = RoundCourse(
        1,
        *(8, RoundProgress(), lambda report: None, lambda report: report),
        save=lambda step: kept.append((step, scale.scale, scale.good)),
        times=times,
        scale=scale,
    )
    assert course.allows(3, AgreedFigures(1.0, 101.0, (1.0,), stop=False, due=False))
    assert kept == [(2, 1024.0, GROWS_AFTER - 1)]
    assert (scale.scale, scale.good) == (2048.0, 0)


def test_a_step_may_be_looked_at_while_the_next_one_runs() -> None:
    late = case("zero2", plan("zero2", micro=4, fsdp=2))
    for found in run_ranks(lagging, 2, late, 2):
        assert found["same"]
        assert found["reports"]
        assert found["kept"]
        assert "the training loss is inf at step 2 of round 1 (first on rank 1)" in found["refused"]

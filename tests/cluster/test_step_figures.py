"""What is told of each training step: the model's own operations, collectives, the way to the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster_cases import fit_and_report, views_of_meshes
from cluster_models import Language
from cluster_plans import case, plan
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn

from roundtable.cli.jobs.job_view import step_row
from roundtable.client.door.outgoing import figures_message
from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.agent.failed_ranks import figures_of
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.arithmetic import count_work
from roundtable.cluster.plan.device_peaks import known_peak, peak_flops
from roundtable.cluster.plan.model_probe import example_batch
from roundtable.cluster.train.collective_sampling import covered
from roundtable.core import Task
from roundtable.core.task import Site
from roundtable.proto import operator_pb2


class Averaged(Task):
    """Its loss needs values on the way back, which fake tensors do not have."""

    def model(self) -> nn.Module:
        return nn.Linear(10, 4)

    def data(self, site: Site) -> Any:
        return (torch.ones(8, 10),), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return _Odd.apply(model(batch[0]))


class _Odd(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(context.shape) * float(gradient)


def batch_of(task: Task, examples: int) -> Any:
    data, _ = task.data(Site("silo"))
    return example_batch(data, examples)


def test_operations_are_those_of_the_papers() -> None:
    dim, hidden, layers, words, length = 32, 64, 4, 64, 16
    task = Language(dim=dim, hidden=hidden, layers=layers, vocabulary=words, length=length)
    found = count_work(task, batch_of(task, 3))
    products = layers * (4 * dim * dim + 3 * dim * hidden) + dim * words
    # PaLM (Chowdhery et al. 2022, appendix B): 6N + 12·L·H·Q·T for each token, N without the embedding.
    expected = length * (6 * products + 12 * layers * dim * length)
    assert found.method == "counted"
    assert found.tokens == length
    assert found.flops == pytest.approx(expected, rel=1e-9)


def test_six_for_each_parameter_where_it_cannot_be_counted() -> None:
    found = count_work(Averaged(), batch_of(Averaged(), 4))
    assert (found.method, found.flops, found.tokens) == ("6N", 6 * 44, 0)


def test_peaks_are_of_known_devices_or_the_operator_says() -> None:
    assert known_peak("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert known_peak("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert known_peak("NVIDIA L40S", "bfloat16") == 362e12
    assert known_peak("NVIDIA A1000", "bfloat16") == 0.0
    cpu = torch.device("cpu")
    assert peak_flops(ClusterTable(), cpu, "float32") == 0.0
    assert peak_flops(ClusterTable(peak_flops=5e10), cpu, "float32") == 5e10


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_time_in_collectives_counts_once(spans: list[tuple[int, int]]) -> None:
    points = {point for start, length in spans for point in range(start, start + length)}
    assert covered((start, start + length) for start, length in spans) == len(points)


def test_a_step_is_told_from_rank_0_to_the_operators_table() -> None:
    first, second = run_ranks(fit_and_report, 2, case("ddp", plan("ddp", dp=2)), 1e12)
    assert [report["step"] for report in first] == [1, 2, 3, 4]
    assert first[1]["communicating"] is None
    # The third step is sampled.
    assert 0 < first[3]["communicating"] < first[3]["seconds"]
    assert first[3]["utilisation"] > 0
    assert second[3]["loss"] == first[3]["loss"]
    figures = figures_of(first[3])
    assert figures["tokens_per_second"] == pytest.approx(16 * figures["examples_per_second"])
    activity = operator_pb2.ClientActivity(
        client="alder", loss=first[3]["loss"], figures=figures_message(figures)
    )
    row = step_row(activity)
    assert row[:2] == ("alder", "4/4")
    assert row[5].endswith(" tokens/s")
    assert all(row)


def test_what_is_not_known_is_not_told() -> None:
    figures = {"step": 1, "steps": 4, "seconds": 0.5, "examples_per_second": 16.0, "waiting_seconds": 0.0}
    message = figures_message(figures)
    assert not message.HasField("flops_utilisation")
    assert message.HasField("waiting_seconds")
    row = step_row(operator_pb2.ClientActivity(client="alder", loss=float("nan"), figures=message))
    assert row == ("alder", "1/4", "", "", "", "16.0 examples/s", "", "", "", "0%")


@pytest.mark.parametrize("strategy", [plan("ddp", dp=2), plan("zero3", fsdp=2)], ids=["ddp", "zero3"])
def test_steps_work_out_no_views_of_the_mesh(strategy: Strategy) -> None:
    # One takes about a millisecond, as long as a short step's collectives.
    for few, many in run_ranks(views_of_meshes, 2, case("views", strategy), [2, 6]):
        assert many == few < 5

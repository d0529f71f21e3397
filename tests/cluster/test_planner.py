"""Plans without devices: what is chosen, what it needs, what is refused and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cluster_models import Block, FeedForward, Language, Mixture, Noisy, Transformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from roundtable.client.policy.cluster_table import ClusterTable, parse_bytes
from roundtable.cluster.choice.machine_rates import rates_of
from roundtable.cluster.choice.planner import make_plan
from roundtable.cluster.choice.step_time import step_time
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.train.group_plan import lightened
from roundtable.core import JobConfig, Task
from roundtable.core.errors import ConfigError, PrivacyError, ResourceError
from roundtable.core.task import Site


class Small(Language):
    """Two million parameters under AdamW."""

    def __init__(self, **model: Any) -> None:
        sizes = {"dim": 128, "layers": 4, "heads": 4, "hidden": 512, "vocabulary": 2000, "length": 64}
        super().__init__(**{**sizes, **model})

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)


class Odd(Task):
    """Its attention adds keys of its own, and its forward calls every part."""

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        layer.self_attn = nn.MultiheadAttention(32, 4, batch_first=True, add_bias_kv=True)
        return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32), enable_nested_tensor=False)

    def data(self, site: Site) -> Any:
        return (torch.zeros(8, 4, 32),), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch[0]).square().mean()
        return out


class Paired(Transformer):
    """The first two of its blocks share a layer."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks[1].feed_forward = self.blocks[0].feed_forward


class Scaled(Transformer):
    """With a parameter that belongs to no part."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.scale = nn.Parameter(torch.ones(1))


class Late(FeedForward):
    """Drops of its whole input when its first layer, which is split, has run."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → the same shape."""
        first = self.w1(x)
        return self.w2(F.silu(first) * self.w3(F.dropout(x)))


class LateBlock(Block):
    """Draws out of order."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads, hidden)
        self.feed_forward = Late(dim, hidden)


def looked_over(task: Task) -> Any:
    data, _ = task.data(Site("silo"))
    return probe_model(task, data, device="cpu")


@cache
def small() -> Any:
    """Small, looked over once, by the first test that asks."""
    return looked_over(Small())


class Passing(IterableDataset[Any]):
    """The examples of Small, one after another."""

    def __iter__(self) -> Iterator[Any]:
        """Yields the parts of an example."""
        return zip(*Small().data(Site("silo"))[0], strict=True)


class Streamed(Small):
    """Small, with data that can only be read on."""

    def data(self, site: Site) -> Any:
        """A stream, and no test data."""
        return Passing(), None


NONE = {"level": "none"}
EXAMPLES = {"level": "example", "clip_norm": 1.0, "delta": 1e-5, "noise_multiplier": 1.0}


def planned(
    devices: int, memory: str, *, found: Any = None, privacy: Any = None, nodes: int = 1, **hand: Any
) -> Any:
    table = ClusterTable.model_validate({"strategy": hand})
    job = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 8}, "privacy": privacy or NONE})
    return make_plan(found or small(), Resources(nodes, devices, parse_bytes(memory), "cpu"), job, table)


@pytest.mark.parametrize(
    ("devices", "memory", "mesh", "kind"),
    [
        (1, "2GiB", Mesh(), "none"),
        (4, "2GiB", Mesh(dp=4), "ddp"),
        (4, "24MiB", Mesh(dp=4), "zero1"),
        (4, "15MiB", Mesh(fsdp=4), "zero3"),
    ],
)
def test_without_figures_the_plainest_that_fits_and_is_not_much_slower_is_taken(
    devices: int, memory: str, mesh: Mesh, kind: str
) -> None:
    plan = planned(devices, memory)
    assert (plan.strategy.mesh, plan.strategy.data_parallel) == (mesh, kind)
    assert plan.estimate.peak <= 0.9 * parse_bytes(memory)
    assert plan.micro_batches * plan.strategy.micro_batch * plan.strategy.mesh.data >= 8
    assert "fits" in plan.reasons[-1]


def test_the_host_s_own_work_is_in_the_time_of_a_step() -> None:
    """FSDP2's hooks for each unit, DTensor's dispatch for each split layer: on a CPU nothing hides them."""

    def host(**hand: Any) -> float:
        return float(planned(2, "2GiB", **hand).time.host)

    ddp, zero2, zero3 = (host(data_parallel=kind) for kind in ("ddp", "zero2", "zero3"))
    assert ddp < zero2 < zero3
    tensor = host(tp=2, micro_batch=8)
    assert ddp < tensor < host(tp=2, micro_batch=4)
    # A GPU's host goes ahead, and the GPU waits for it where there is little to compute.
    resources, sharded = Resources(1, 2, 1 << 34, gpu_name="H100"), Strategy(Mesh(fsdp=2), "zero3", 4)
    slow, fast = (replace(rates_of(resources, "bfloat16"), call=call) for call in (1e-5, 1e-9))
    sums = UnitSums(small())
    times = [step_time(small(), sums, sharded, 8, rates, resources).host for rates in (slow, fast)]
    assert times[0] > 0 == times[1]


def test_the_momentum_of_the_job_s_own_sgd_is_in_the_plan() -> None:
    def planned_with(found: Any, momentum: float) -> Any:
        algorithm = {"batch_size": 8, "momentum": momentum}
        job = JobConfig.model_validate({"task": "t", "algorithm": algorithm})
        return make_plan(found, Resources(1, 1, 1 << 30, "cpu"), job, ClusterTable())

    found = looked_over(Language())
    plain, moved = planned_with(found, 0.0), planned_with(found, 0.9)
    assert (plain.estimate.optimizer, moved.estimate.optimizer) == (0, plain.estimate.gradients)
    assert moved.estimate.peak - plain.estimate.peak == plain.estimate.gradients
    assert moved.time.optimizer > plain.time.optimizer
    # A task's own optimizer is as the task makes it.
    assert planned_with(small(), 0.9).estimate == planned_with(small(), 0.0).estimate


def test_streamed_data_go_through_no_pipeline() -> None:
    def stages(found: Any, **hand: Any) -> tuple[set[int], str]:
        plan = planned(4, "2GiB", found=found, **hand)
        return {row.strategy.mesh.pp > 1 for row in plan.considered}, " ".join(plan.reasons)

    streamed = looked_over(Streamed())
    piped, said = stages(streamed)
    assert piped == {False}
    assert "no pipeline: the training data are a stream" in said
    piped, said = stages(small())
    assert piped == {False, True}
    assert "a stream" not in said
    with pytest.raises(
        ConfigError, match=r"no plan is possible .* no pipeline: the training data are a stream"
    ):
        stages(streamed, pp=2)


def test_a_plan_that_ran_out_of_memory_gives_way_to_the_next() -> None:
    job = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 8}})
    there, none = Resources(1, 4, parse_bytes("2GiB"), "cpu"), Links("", 4, 0.0, {}, {})
    seen: list[Strategy] = []

    def until_nothing_is_left() -> None:
        for failures in range(40):
            _, strategy = lightened(small(), there, job, ClusterTable(), none, failures)
            seen.append(strategy)

    with pytest.raises(ResourceError, match="no other plan needs less"):
        until_nothing_is_left()
    kinds = [each.data_parallel for each in seen]
    assert kinds[:2] == ["ddp", "ddp"]
    assert [each.micro_batch for each in seen[:2]] == [2, 1]
    assert kinds.index("zero1") < kinds.index("zero3")
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("memory", ["2GiB", "60MiB"])
def test_clipped_examples_need_whole_copies_of_a_plain_model(memory: str) -> None:
    plan = planned(4, memory, privacy=EXAMPLES)
    assert (plan.strategy.mesh, plan.strategy.data_parallel) == (Mesh(dp=4), "ddp")
    assert (plan.strategy.checkpointing, plan.strategy.reduction) == ("none", "exact")
    plain = planned(4, memory).estimate
    assert plan.estimate.gradients == 2 * plain.gradients
    local = planned(4, "15MiB", privacy={**EXAMPLES, "level": "client_local"})
    assert local.strategy.data_parallel == "zero3"


def test_shards_stay_within_a_node() -> None:
    plan = planned(4, "2GiB", nodes=2, data_parallel="zero3", pp=1, tp=1)
    assert plan.strategy.mesh == Mesh(dp=2, fsdp=4)


def test_what_is_set_by_hand_is_kept() -> None:
    plan = planned(8, "2GiB", tp=2, pp=2, micro_batch=1, schedule="gpipe", checkpointing="every")
    strategy = plan.strategy
    assert (strategy.mesh.tp, strategy.mesh.pp, strategy.mesh.data) == (2, 2, 2)
    assert (strategy.micro_batch, strategy.schedule, strategy.checkpointing) == (1, "gpipe", "every")
    assert strategy.sequence_parallel


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"devices": 4, "offload_activations": True}, ConfigError, "whose memory is the host's"),
        ({"devices": 4, "offload_optimizer": True}, ConfigError, "whose memory is the host's"),
        ({"devices": 4, "cp": 2}, ConfigError, "cp = 2: context parallelism is not offered"),
        ({"devices": 1, "data_parallel": "ddp"}, ConfigError, 'no mesh over 1 .* has data_parallel = "ddp"'),
        ({"devices": 4, "pp": 4, "schedule": "interleaved"}, ConfigError, "has 7 parts for 8 stages"),
        ({"devices": 4, "tp": 8}, ConfigError, "mesh of 8 ranks; there are 4 devices"),
        ({"devices": 4, "tp": 3}, ConfigError, "4 devices do not divide by 3; use 3 of them"),
        ({"devices": 4, "nodes": 2, "tp": 8}, ConfigError, "would cross nodes of 4 devices"),
        ({"devices": 4, "tp": 2, "privacy": EXAMPLES}, PrivacyError, "per-example clipping"),
        (
            {"devices": 4, "data_parallel": "zero3", "privacy": EXAMPLES},
            PrivacyError,
            "only part",
        ),
        ({"devices": 4, "data_parallel": "zero1", "privacy": EXAMPLES}, PrivacyError, "use ddp"),
        ({"devices": 4, "dp": 2, "privacy": EXAMPLES}, PrivacyError, "other of 4 devices"),
        ({"devices": 4, "reduction": "sign", "privacy": EXAMPLES}, PrivacyError, "exact sum"),
        ({"devices": 4, "checkpointing": "every", "privacy": EXAMPLES}, PrivacyError, "norm of"),
        (
            {"devices": 4, "memory": "30MiB", "privacy": EXAMPLES},
            ResourceError,
            "needs the whole model on each device",
        ),
        ({"devices": 4, "memory": "2MiB"}, ResourceError, "more than the 1.80 MiB that may be used"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        planned(**{"memory": "2GiB", **arguments})


def test_a_model_that_cannot_be_split_says_why() -> None:
    found = looked_over(Odd())
    assert "forward does not skip parts" in found.cannot_pipeline
    assert any("adds keys of its own" in reason for reason in found.tensor_parallel.whole)
    with pytest.raises(ConfigError, match="no pipeline: its forward"):
        planned(2, "2GiB", found=found, pp=2)


def test_what_is_one_tensor_stays_on_one_stage() -> None:
    assert "are one parameter" in looked_over(Small(tied=True)).cannot_pipeline
    halves = looked_over(Small(kind=Paired))
    assert (halves.cannot_pipeline, planned(2, "2GiB", found=halves, pp=2).strategy.mesh.pp) == ("", 2)
    with pytest.raises(ConfigError, match=r"no pipeline: blocks\.0\..* and blocks\.1\..* are one parameter"):
        planned(4, "2GiB", found=halves, pp=4)
    assert "scale lies in none of the model's parts" in looked_over(Small(kind=Scaled)).cannot_pipeline


def test_head_counts_decide_how_far_layers_split() -> None:
    found = looked_over(Small())
    assert found.cannot_split[2] == found.cannot_split[4] == ""
    assert "wq has 4 heads of 32 columns, which do not divide over tp = 8" in found.cannot_split[8]


def test_draws_that_ranks_could_not_agree_on_forbid_to_split() -> None:
    assert looked_over(Small(kind=Noisy)).cannot_split[2] == ""
    said = looked_over(Small(block=LateBlock)).cannot_split[2]
    assert "feed_forward draws random numbers for a tensor that is whole there" in said


def test_experts_are_found() -> None:
    found = looked_over(Small(block=Mixture))
    assert len(found.experts) == 4


@pytest.mark.slow
def test_a_plan_for_billions_needs_no_memory() -> None:
    found = looked_over(Small(dim=4096, hidden=11008, layers=32, heads=32, vocabulary=32000, length=128))
    assert found.anatomy.elements > 6.5e9
    with pytest.raises(ResourceError, match="fits in no plan"):
        planned(2, "1GiB", found=found)


def test_strategies_survive_the_wire() -> None:
    strategy = Strategy(Mesh(pp=2, fsdp=2), "zero2", 4, "interleaved", 2)
    assert Strategy.from_plain(strategy.to_plain()) == strategy
    assert strategy.halved().micro_batch == 2


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel": "ddp", "mesh": Mesh(fsdp=2)},
        {"data_parallel": "ddp", "mesh": Mesh(dp=2, tp=2)},
        {"data_parallel": "none", "mesh": Mesh(dp=2)},
        {"data_parallel": "zero3", "mesh": Mesh(fsdp=2), "reduction": "sign"},
        {"schedule": "interleaved"},
    ],
)
def test_contradictions_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Strategy(**options)

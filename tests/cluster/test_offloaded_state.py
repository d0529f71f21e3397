"""An optimizer's state in the host's memory: the same steps, and refused where it gains nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cluster_cases import adam
from cluster_plans import plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from tracked import fake_group

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.choice.planner import make_plan
from roundtable.cluster.choice.search import HEADROOM
from roundtable.cluster.plan.memory_estimate import ModelProbe, estimate
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.stepping import offloaded_state
from roundtable.cluster.stepping.local_parameters import state_of
from roundtable.cluster.stepping.offloaded_state import offload_state
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, ResourceError
from roundtable.core.task import Site

JOB = JobConfig.model_validate({"task": "t", "algorithm": {"batch_size": 4}})


@cache
def looked_over() -> ModelProbe:
    task = adam(dim=512, layers=12, heads=4, hidden=2048, length=16)
    return probe_model(task, task.data(Site("silo"))[0], device="cuda")


def planned(probe: ModelProbe, memory: int, host: int, **hand: Any) -> Any:
    table = ClusterTable.model_validate({"precision": "float32", "strategy": hand})
    return make_plan(probe, Resources(1, 1, memory, "cuda", host_memory=host), JOB, table)


def test_it_is_counted_in_the_hosts_memory_and_tried_before_weights_wait_there() -> None:
    probe, plain = looked_over(), plan("ddp", micro=4, dp=2)
    needed, less = (estimate(probe, replace(plain, offload_optimizer=on), 1) for on in (False, True))
    assert (needed.host, less.host) == (0, needed.optimizer)
    assert 0.3 * needed.optimizer < needed.peak - less.peak < 2 * needed.optimizer
    whole = planned(probe, 1 << 36, 1 << 36)
    assert not whole.strategy.offload_optimizer
    saved = next(each for each in whole.savings if each.optimisation == "the optimizer in CPU memory")
    assert min(saved.saves, saved.costs) > 0
    few = [replace(plan(micro=1, checkpointing="sqrt"), offload_optimizer=on) for on in (True, False)]
    least, most = (estimate(probe, each, 4).peak for each in few)
    memory = int((least + most) / 2 / HEADROOM)
    chosen = planned(probe, memory, 1 << 36)
    assert chosen.strategy.offload_optimizer
    assert chosen.time.offload == pytest.approx(2 * chosen.estimate.host / chosen.rates.host)
    with pytest.raises(ResourceError, match="host memory"):
        planned(probe, memory, needed.optimizer // 2, offload_optimizer=True)


def test_what_cannot_wait_is_refused() -> None:
    probe = looked_over()
    for odd, said in [
        (replace(probe, by_entry=False), "in portions"),
        (replace(probe, state_factor=0.0), "keeps no state"),
    ]:
        with pytest.raises(ConfigError, match=said):
            planned(odd, 1 << 36, 1 << 36, offload_optimizer=True)
    with pytest.raises(ConfigError, match="takes the optimizer along"):
        plan("zero3", fsdp=2, offload=True, offload_optimizer=True)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True, "amsgrad": True}])
def test_it_changes_no_step(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_state, "PORTION", 5000)
    torch.manual_seed(1)
    start = [torch.randn(shape) for shape in [(40, 30), (20, 50), (7,), (2000,), ()]]
    found = []
    for away in (False, True):
        generator = torch.Generator().manual_seed(2)
        parameters = [nn.Parameter(value.clone()) for value in start]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, **options)
        if away:
            offload_state(optimizer)
        places: dict[Any, int] = {}
        for number in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            # One gets no gradient at first, and one step is called off.
            parameters[1].grad = None if number == 0 else parameters[1].grad
            if "fused" in options:
                optimizer.found_inf = torch.tensor(float(number == 2))  # type: ignore[attr-defined]
            optimizer.step()
            seen = {(p, key): value for p, each in optimizer.state.items() for key, value in each.items()}
            # It is put back where it was.
            moved = {key: value.data_ptr() for key, value in seen.items() if value.dim()}
            assert places.items() <= moved.items()
            places = moved
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
        state = [
            optimizer.state[parameter][key] for parameter in parameters for key in ("step", "exp_avg_sq")
        ]
        found.append([*parameters, *state])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_checkpoint_reads_into_the_state_where_it_waits() -> None:
    with fake_group(1):
        mesh = DeviceMesh("meta", [0])
        whole = DTensor.from_local(torch.zeros(4, 3, device="meta"), mesh, [Shard(0)])
        part = nn.Parameter(torch.zeros(4, 3, device="meta"))
        part.whole = whole  # type: ignore[attr-defined]
        waiting = torch.zeros(4, 3)
        seen = state_of(part, waiting)
        assert isinstance(seen, DTensor)
        assert seen.placements == whole.placements
        assert seen.to_local().data_ptr() == waiting.data_ptr()

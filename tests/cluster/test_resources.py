"""The devices that ranks may use and see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.cluster.agent.launcher import _members
from roundtable.cluster.plan.resources import Resources, allowed_resources


def test_a_cluster_uses_no_more_than_the_policy_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    # What a process of its own says of the memory; nothing of CUDA is begun in this one.
    answer = SimpleNamespace(returncode=0, stdout=f"{80 << 30} 7\n", stderr="")
    monkeypatch.setattr("subprocess.run", lambda *asked, **options: answer)
    allowed = allowed_resources(ClusterTable(), PolicyTable(max_gpus=2, max_gpu_memory="20GiB"))
    assert allowed == Resources(1, 2, 20 << 30, "cuda", "float16", allowed.host_memory)
    four = Resources(1, 4, 80 << 30, "cuda", "float16", 1 << 40)
    assert allowed_resources(ClusterTable(devices=4, host_memory=1 << 40), PolicyTable()) == four
    table = ClusterTable(devices=4, memory=1 << 30)
    assert allowed_resources(table, PolicyTable(max_gpus=0)).device == "cpu"
    # The bounds are of GPUs: ranks on the CPU are as many as [cluster] says.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    there = allowed_resources(table, PolicyTable(max_gpus=2))
    assert (there.devices, there.memory, there.device) == (4, 1 << 30, "cpu")


def test_ranks_see_the_devices_that_are_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = Resources(1, 2, 1 << 30, "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    first, second = _members(resources, [0, 2], 4444, {})
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _members(resources, [0, 2], 4444, {})[0]["CUDA_VISIBLE_DEVICES"] == "0,2"

"""The policy's bounds on GPUs, as far as a machine without any can show them; one test wants a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from roundtable.client.policy.config import AgentConfig, load_agent_config
from roundtable.client.policy.gpus import bound_gpu_memory, memory_fraction, shown_gpus
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.worker.worker_trainer import WorkerTrainer
from roundtable.core.errors import ConfigError


@pytest.mark.parametrize(
    ("most", "device", "listed", "shown", "called"),
    [
        (0, "auto", None, "", "auto"),
        (0, "cpu", "0,1", "", "cpu"),
        (2, "auto", None, "0,1", "auto"),
        (1, "cuda", "GPU-5c,GPU-7a", "GPU-5c", "cuda"),
        (1, "cuda:1", "GPU-5c,GPU-7a", "GPU-7a", "cuda:0"),
        (2, "cuda:3", None, "3,4", "cuda:0"),
        (2, "cuda:1", "6, 7", "7", "cuda:0"),
        (2, "auto", "", "", "auto"),
    ],
)
def test_how_many_gpus_the_training_process_sees(
    most: int, device: str, listed: str | None, shown: str, called: str
) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert shown_gpus(most, device, environment) == ({"CUDA_VISIBLE_DEVICES": shown}, called)
    assert shown_gpus(None, device, environment) == ({}, device)


async def test_the_training_process_has_that_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process itself says so: Linux shows what it was started with."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    policy = PolicyTable(max_gpus=2)
    config = AgentConfig("c:1", tmp_path, tmp_path, device="cpu", folder=tmp_path, policy=policy)
    trainer = WorkerTrainer(config, "north", tmp_path / "jobs")
    await trainer.start()
    try:
        assert trainer._child is not None
        pid = trainer._child._process.pid
        started = (await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)).split(b"\0")
    finally:
        await trainer.close()
    assert b"CUDA_VISIBLE_DEVICES=3,4" in started


def test_a_bound_on_memory_is_a_part_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_fraction(20 << 30, 80 << 30) == 0.25
    assert memory_fraction(100 << 30, 80 << 30) == 1.0
    said: list[tuple[float, int]] = []
    stated = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: stated)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: said.append((part, device))
    )
    bound_gpu_memory(None, torch.device("cuda"))
    bound_gpu_memory(20 << 30, torch.device("cpu"))
    assert said == []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device in ("cuda:1", "cuda"):
        bound_gpu_memory(PolicyTable(max_gpu_memory="20GiB").gpu_memory_bytes, torch.device(device))
    # By number: torch refuses "cuda" alone, which [limits] device = "auto" becomes.
    assert said == [(0.25, 1), (0.25, 3)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_gpus = -1", "greater than or equal to 0"),
        ('max_gpu_memory = "lots"', "not a size of memory"),
        ('max_gpus = 0\n[limits]\ndevice = "cuda:1"', "allows no GPU, and .limits. device is 'cuda:1'"),
        ('max_gpus = 0\n[cluster]\nbackend = "nccl"', "allows no GPU, and .cluster. backend"),
    ],
)
def test_bounds_that_cannot_be_meant(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'coordinator = "c:1"\n[policy]\n{text}\n')
    with pytest.raises(ConfigError, match=said):
        load_agent_config(path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_gives_no_more_than_it_may(name: str) -> None:
    device = torch.device(name)
    bound_gpu_memory(1 << 30, device)
    try:
        torch.empty(256 << 20, dtype=torch.uint8, device=device)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)

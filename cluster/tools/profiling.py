"""A few steps of a job under torch's profiler, on one device of the silo."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from roundtable.client.policy.config import load_agent_config
from roundtable.client.training.batches import training_batches
from roundtable.client.training.local_training import split_data
from roundtable.client.worker.executor import choose_device
from roundtable.core.config import load_job
from roundtable.core.errors import ConfigError
from roundtable.core.seeds import torch_generator
from roundtable.core.task import ArrayTask, Site, initial_state, load_task

_WARM_UP = 2


@dataclass(frozen=True)
class Profile:
    """Where the trace is, how fast the steps were, and the operators that took most of the time."""

    trace: Path
    device: str
    steps: int
    examples_per_second: float
    table: str


def profile_job(
    agent: Path, job_file: Path, overrides: Mapping[str, Any], steps: int, output: Path
) -> Profile:
    """Profiles `steps` steps after two to warm up, and writes a Chrome trace to `output`.

    Raises ConfigError for a task that has no module or too little data, ResourceError for a missing device.
    """
    job = load_job(job_file, dict(overrides))
    folder, options, name, wanted = job_file.resolve().parent, dict(job.simulation.data), job.task, "auto"
    if agent.exists():
        config = load_agent_config(agent)
        folder, options, wanted = config.folder, dict(config.data), config.device
        name = config.reference_of(job.task) or job.task
    task = load_task(name, folder)
    if isinstance(task, ArrayTask):
        raise ConfigError(f"task {name!r} is an ArrayTask, which has no steps to profile")
    device = choose_device(wanted)
    model = initial_state(task, job.seed)
    assert isinstance(model, torch.nn.Module)
    model.to(device).train()
    make = getattr(task, "optimizer", None)
    optimizer = (make(model.parameters()) if make is not None else None) or torch.optim.SGD(
        model.parameters(), lr=job.algorithm.learning_rate
    )
    data, _ = split_data(task, Site("profile", options=options))
    batches = training_batches(
        data,
        batch_size=job.algorithm.batch_size,
        generator=torch_generator(job.seed, 1, "profile", "batches"),
        steps=steps + _WARM_UP,
        device=device,
    )

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for batch in islice(batches, _WARM_UP):
        step(batch.data)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    seen, began = 0, time.perf_counter()
    with profile(activities=kinds, profile_memory=True, with_flops=True) as found:
        for batch in batches:
            step(batch.data)
            seen += batch.size
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - began
    found.export_chrome_trace(str(output))
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=40)
    return Profile(output, str(device), steps, seen / elapsed, table)

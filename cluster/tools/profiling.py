"""Runs a few steps of a job under torch's profiler, on one device of the silo."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.readers import make_reader
from roundtable.client.training.batches import Batch, count_examples, training_batches
from roundtable.client.training.loaders import collate_of
from roundtable.client.training.stream_batches import streamed
from roundtable.client.worker.torch_devices import choose_device
from roundtable.cluster.plan.arithmetic import ExampleCost, count_work
from roundtable.cluster.plan.device_peaks import peak_flops
from roundtable.cluster.plan.model_probe import does_not_run, example_batch
from roundtable.cluster.tools.silo_job import load_silo_job, open_data, tell_steps
from roundtable.cluster.train.round_reports import RoundFigures, StepReport, most_memory
from roundtable.core.config import JobConfig
from roundtable.core.errors import TaskError
from roundtable.core.seeds import torch_generator
from roundtable.core.task import initial_state

_WARM_UP = 2


@dataclass(frozen=True)
class Profile:
    """The path of the trace, the speed of the steps, and a table of the operators that took most time.

    `report` is as of a round on a cluster, of this one device.
    """

    trace: Path
    device: str
    steps: int
    examples_per_second: float
    table: str
    report: dict[str, Any]


def profile_job(
    agent: Path, job_file: Path, overrides: Mapping[str, Any], steps: int, output: Path
) -> Profile:
    """Profiles `steps` steps after two that warm up, and writes a Chrome trace to `output`.

    Raises ConfigError for a task that has no module or too little data, TaskError for one whose loss does not
    run, ResourceError for a missing device.
    """
    loaded = load_silo_job(agent, job_file, overrides)
    job, task = loaded.job, loaded.task
    device = choose_device(loaded.device)
    model = initial_state(task, job.seed)
    assert isinstance(model, torch.nn.Module)
    model.to(device).train()
    make = getattr(task, "optimizer", None)
    optimizer = (make(model.parameters()) if make is not None else None) or torch.optim.SGD(
        model.parameters(), lr=job.algorithm.learning_rate
    )
    data, _ = open_data(task, "profile", loaded.options)
    tell_steps(task, job, data)
    batches = _batches(data, job, steps + _WARM_UP, device)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        try:
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            raise TaskError(does_not_run(task, error)) from error
        optimizer.step()

    for batch in islice(batches, _WARM_UP):
        step(batch.data)
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    figures, work = RoundFigures(), count_work(task, example_batch(data))
    peak = peak_flops(loaded.table, device, "float32")
    with profile(activities=kinds, profile_memory=True, with_flops=True) as profiler:
        ended = began = time.perf_counter()
        for number, batch in enumerate(batches, 1):
            arrived = time.perf_counter()
            step(batch.data)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            figures.add(_report(number, steps, batch.size, now - ended, arrived - ended, device, work, peak))
            ended = now
        elapsed = time.perf_counter() - began
    profiler.export_chrome_trace(str(output))
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=40)
    report = {**figures.alone(_memory_of(device)), "plan": "one device", "strategy": {}}
    return Profile(output, str(device), steps, figures.examples / elapsed, table, report)


def _report(
    step: int,
    steps: int,
    examples: int,
    seconds: float,
    waiting: float,
    device: torch.device,
    work: ExampleCost,
    peak: float,
) -> StepReport:
    able = peak * max(seconds, 1e-9)
    return StepReport(
        step=step,
        steps=steps,
        examples=examples,
        loss=math.nan,
        norm=math.nan,
        learning_rate=math.nan,
        seconds=seconds,
        waiting=waiting,
        memory=most_memory(device),
        tokens=work.tokens * examples,
        utilisation=work.flops * examples / able if able and work.flops else None,
    )


def _memory_of(device: torch.device) -> float:
    """A GPU's memory in bytes; 0 for a CPU, whose memory is not this job's alone."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0.0


def _batches(data: Any, job: JobConfig, steps: int, device: torch.device) -> Iterator[Batch]:
    size = job.algorithm.batch_size
    if count_examples(data) is None:
        reader = make_reader(data, StreamSeed(job.seed, "profile"), None)
        return streamed(reader, collate_of(data), size, steps, device)
    generator = torch_generator(job.seed, 1, "profile", "batches")
    return training_batches(data, batch_size=size, generator=generator, steps=steps, device=device)

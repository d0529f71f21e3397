"""A whole federation that is watched: agents' pages over HTTP, and a round as one trace across all."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation import NAMES, federation_of, run_job, silo
from prometheus_client.parser import text_string_to_metric_families

from roundtable.client.agent.agent import Agent
from roundtable.client.agent.agent_observer import _readable
from roundtable.core import load_task, parse_job
from roundtable.core.initial_model import initial_model
from roundtable.core.observability.tracing import Tracer
from roundtable.server import Coordinator

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Linear(6, 3)
    def data(self, site):
        g = torch.Generator().manual_seed(site.options["seed"])
        x = torch.randn(24, 6, generator=g)
        y = x[:, :3].argmax(1)
        return (x[:16], y[:16]), (x[16:], y[16:])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""


def fetch(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return str(answer.read().decode())


async def test_a_round_is_one_trace_and_the_agent_tells_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporters = {name: memory.InMemorySpanExporter() for name in ("coordinator", *NAMES)}
    tracers = {name: Tracer(name, exporter) for name, exporter in exporters.items()}
    plain = Coordinator.__init__
    monkeypatch.setattr(
        Coordinator,
        "__init__",
        lambda self, config, **given: plain(self, config, **given, tracer=tracers["coordinator"]),
    )
    async with federation_of(tmp_path, TASK) as federation:
        configs = [replace(silo(federation, name), metrics="127.0.0.1:0") for name in NAMES]
        agents = [Agent(config, tracer=tracers[config.credentials.name]) for config in configs]
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        task = load_task("toy.py:Toy", tmp_path)
        job = parse_job('task = "toy"\nrounds = 2\nseed = 1\n[cohort]\nsize = 3\nminimum = 3')
        status, _, _ = await asyncio.to_thread(run_job, federation, job, initial_model(job, task))
        text = await asyncio.to_thread(fetch, agents[0].metrics_port, "/metrics")
        ready = await asyncio.to_thread(fetch, agents[0].metrics_port, "/readyz")
        for agent in agents:
            agent.stop()
        await asyncio.gather(*tasks)
    assert status == "finished"
    assert ready == "connected\n"
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["roundtable_agent_connected",] == 1
    assert found["roundtable_agent_connections_total",] == 1
    assert found["roundtable_agent_updates_total", "accepted"] == 2
    assert found["roundtable_agent_steps_total", "accepted", "train"] == 2
    assert found["roundtable_agent_steps_total", "done", "evaluate"] == 2
    assert found["roundtable_agent_activity_seconds_count", "training"] == 2
    assert found["roundtable_transfer_bytes_total", "out"] > 0
    assert found["roundtable_disk_free_bytes", "state"] > 0
    _check_trace([span for exporter in exporters.values() for span in exporter.get_finished_spans()])


def _check_trace(spans: list[Any]) -> None:
    """Both rounds: one root each, the phases below it, every silo below training, its work below that."""
    by_id = {span.context.span_id: span for span in spans}
    roots = [span for span in spans if span.parent is None]
    assert sorted(span.name for span in roots) == ["round 1", "round 2"]
    assert len({span.context.trace_id for span in spans}) == 2
    for name in NAMES:
        trained = [span for span in spans if span.name == name and by_id[span.parent.span_id].name == "train"]
        assert len(trained) == 2
        for span in trained:
            assert span.resource.attributes["service.name"] == name
            below = {s.name for s in spans if s.parent and s.parent.span_id == span.context.span_id}
            # What was downloaded to be evaluated in round 1 is not downloaded again to train round 2.
            first = {"downloading"} if span.attributes["round"] == 1 else set()
            assert below == first | {"training", "uploading"}


def test_what_the_gpus_driver_says() -> None:
    # Captured from `nvidia-smi --query-gpu=index,utilization.gpu,memory.used,memory.total,temperature.gpu`.
    text = "0, 97, 40321, 81559, 54\n1, [N/A], 0, 81559, 30\n"
    assert list(_readable(text)) == [("0", [97.0, 40321.0, 81559.0, 54.0])]

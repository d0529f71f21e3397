"""The probe of a cluster's links: measured by its ranks, kept, and only for the same hardware."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster_cases import probe_twice
from pretended_gpu import PretendedGpu
from ranks import run_ranks
from torch.profiler import ProfilerActivity

from roundtable.cluster.choice.machine_rates import _measured
from roundtable.cluster.plan import device_rates
from roundtable.cluster.plan.links import FILE, Links, read_links, reduction_for
from roundtable.cluster.train import collective_sampling
from roundtable.cluster.train.collective_sampling import CollectiveSampler


def test_links_are_measured_within_and_between_nodes_and_kept(tmp_path: Path) -> None:
    found = run_ranks(probe_twice, 4, tmp_path, 2)
    first, second = found[0]
    assert sorted(first.within) == sorted(first.between) == [1 << 16, 1 << 20, 1 << 24]
    rates = (*first.within.values(), *first.between.values(), *first.products.values())
    assert all(rate > 0 for rate in rates)
    assert sorted(first.products) == ["bfloat16", "float32"]
    # The second time it is read, and every rank had the same figures the first time.
    assert second == first == read_links(tmp_path)
    assert all(asdict(each[0])["within"] == first.within for each in found)


@pytest.mark.slow
def test_other_hardware_is_measured_anew(tmp_path: Path) -> None:
    [(first, _), _] = run_ranks(probe_twice, 2, tmp_path, 2)
    assert first.between == {}
    assert read_links(tmp_path, first.key) == first
    assert read_links(tmp_path, "another") is None
    assert read_links(tmp_path / "elsewhere") is None


def test_what_another_version_kept_is_measured_anew(tmp_path: Path) -> None:
    for kept in ('{"key": "k", "later": 1}', "[]", "{"):
        (tmp_path / FILE).write_text(kept)
        assert read_links(tmp_path) is None


def test_slow_links_between_nodes_decide_how_gradients_travel() -> None:
    def links(between: float) -> Links:
        return Links("k", 4, 0.0, {1 << 24: 1e11}, {1 << 24: between})

    assert reduction_for(None)[0] == reduction_for(Links("k", 2, 0.0, {1 << 20: 1e9}, {}))[0] == "exact"
    assert [reduction_for(links(rate))[0] for rate in (5e10, 5e9, 5e8)] == ["exact", "bfloat16", "powersgd"]
    assert "was measured" in reduction_for(links(5e9))[1]


def test_people_read_the_age() -> None:
    links = Links("k", 4, 1000.0, {1 << 20: 2e9}, {}, {"float32": 6e13})
    said = links.lines(1000.0 + 3 * 86400)
    assert said[0].startswith("measured 3 days ago on 4 ranks")
    assert said[1] == "within a node: 2 GB/s at 1 MiB"
    assert said[2] == "between nodes: not measured, there is only one"
    assert said[3] == "matrix products of a device: Tflop/s 60 in float32"


def test_products_are_timed_in_what_a_gpu_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in bfloat16 before Ampere; who trains in one type of two bytes takes the other's rate."""
    monkeypatch.setitem(device_rates._SIDE, "cuda", 4)
    monkeypatch.setattr(device_rates, "seconds_of", lambda work, *given: 1.0 if work() is None else 0.0)
    for major, expected in ((7, ["float16", "float32"]), (8, ["bfloat16", "float32", "tf32"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        with PretendedGpu():
            found = device_rates._products(torch.device("cuda"), time.perf_counter)
        assert sorted(found) == expected
    rates = {"float32": 1.0, "float16": 4.0}
    assert [_measured(rates, each) for each in ("float16", "bfloat16", "tf32")] == [4.0, 4.0, 4.0]
    assert _measured({"float32": 1.0, "tf32": 3.0, "bfloat16": 2.0}, "float16") == 2.0


def test_a_profiler_that_recorded_nothing_is_no_share_without_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CUPTI leaves it for a user who may not read a GPU's counters."""
    asked: list[Any] = []
    nothing = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=list)))

    @contextmanager
    def profile(activities: list[ProfilerActivity]) -> Iterator[Any]:
        asked.extend(activities)
        yield nothing

    monkeypatch.setattr(collective_sampling, "profile", profile)
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    sampler = CollectiveSampler(device := torch.device("cuda", 1))
    for _ in range(4):
        with sampler.step():
            torch.ones(2).sum()
    assert (asked, waited) == ([ProfilerActivity.CUDA], [device])
    assert sampler.share is None

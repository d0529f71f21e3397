"""The probe of a cluster's links: measured by its ranks, kept, and only for the same hardware."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from cluster_cases import probe_twice
from ranks import run_ranks

from roundtable.cluster.plan.links import Links, read_links, reduction_for


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


def test_other_hardware_is_measured_anew(tmp_path: Path) -> None:
    [(first, _), _] = run_ranks(probe_twice, 2, tmp_path, 2)
    assert first.between == {}
    assert read_links(tmp_path, first.key) == first
    assert read_links(tmp_path, "another") is None
    assert read_links(tmp_path / "elsewhere") is None


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

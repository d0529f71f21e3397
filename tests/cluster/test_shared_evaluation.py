"""Ranks that share an evaluation read each its own test data, and count what one process counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from cluster_cases import Case, adam
from cluster_models import Mixture
from cluster_plans import STEPS, case, plan
from evaluated_cases import evaluate_cases
from ranks import run_ranks
from tar_files import write_shards

TWO = [
    case("ddp", plan("ddp", dp=2)),
    case("zero3", plan("zero3", fsdp=2)),
    case("local sgd", plan("zero3", dp=2, local_steps=1), {"max_gradient_norm": None}),
    case("tp sequence", plan(tp=2, sequence_parallel=True)),
    case("1f1b", plan(pp=2)),
]
OTHERS = [
    case("zero1", plan("zero1", dp=2)),
    case("zero2", plan("zero2", fsdp=2)),
    case("tp", plan(tp=2)),
    case("interleaved", plan(pp=2, schedule="interleaved", virtual_stages=2)),
]
FOUR = [
    case("hsdp", plan("zero3", dp=2, fsdp=2)),
    case("zero3 tp", plan("zero3", fsdp=2, tp=2)),
    case("dp pp", plan("zero2", dp=2, pp=2)),
    # More ranks than the shards have lanes.
    case("zero3 of four", plan("zero3", fsdp=4)),
    Case("ep", plan("zero3", fsdp=4, ep=2), adam(block=Mixture), STEPS),
]


SLOW = [pytest.param(some, marks=pytest.mark.slow) for some in (OTHERS, FOUR)]


@pytest.mark.parametrize("cases", [TWO, *SLOW], ids=["two ranks", "others of two", "four ranks"])
def test_each_rank_reads_its_part_and_all_count_as_one(cases: list[Case], tmp_path: Path) -> None:
    urls = [str(path) for path in write_shards(tmp_path, [9, 2, 5, 12])]
    for ranks in zip(*run_ranks(evaluate_cases, cases[0].strategy.mesh.world, cases, urls), strict=True):
        found, where = ranks[0], (ranks[0]["case"], ranks[0]["data"])
        assert all(each["gap"] < 1e-6 for each in ranks), where
        parts = defaultdict(list)
        for each in ranks:
            parts[each["part"]].append(each["here"])
        # Those that split layers, or are stages, compute on the same examples.
        assert all(here == same[0] for same in parts.values() for here in same), where
        if found["data"] == "rows":
            # Who has no batch of its own runs the first example, and does not count it.
            once = found["alone"], [*found["alone"], found["alone"][0]]
            assert all(same[0] in once for same in parts.values()), where
            continue
        fillers = sum(not (set(same[0]) - {found["alone"][0]}) for same in parts.values())
        read = Counter(number for same in parts.values() for number in same[0])
        assert read.keys() == set(found["alone"]), where
        assert read.total() <= len(found["alone"]) + fillers, where

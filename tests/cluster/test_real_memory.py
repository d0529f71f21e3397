"""The estimate against every block that ranks really allocate, over strategies, on CPU."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_plans import plan
from ranks import run_ranks
from real_memory import measure

from roundtable.cluster.parallel.strategy import Strategy

# Name: model, strategy, micro-batches in a step.
Case = tuple[str, Strategy, int]


def two(kind: str, **options: Any) -> Strategy:
    name = "fsdp" if kind in ("zero2", "zero3") else "dp"
    return plan(kind, 4, **({} if kind == "none" else {name: 2}), **options)


HALF = {"precision": "bfloat16"}
TWO: dict[str, Case] = {
    "ddp": ("deep", two("ddp"), 1),
    "ddp sign": ("deep", two("ddp", reduction="sign"), 1),
    "ddp powersgd": ("deep", two("ddp", reduction="powersgd"), 1),
    "zero3 int8": ("deep", two("zero3", reduction="int8"), 1),
    "ddp accumulated": ("deep", two("ddp"), 2),
    "zero1": ("deep", two("zero1"), 1),
    "zero2": ("deep", two("zero2"), 1),
    "zero3": ("deep", two("zero3"), 1),
    "zero3 accumulated": ("deep", two("zero3"), 2),
    "ddp bfloat16": ("deep", two("ddp", **HALF), 1),
    "zero2 bfloat16": ("deep", two("zero2", **HALF), 1),
    "zero3 bfloat16": ("deep", two("zero3", **HALF), 1),
    "every": ("deep", two("zero3", checkpointing="every"), 1),
    "every second": ("deep", two("ddp", checkpointing="every", checkpoint_every=2), 1),
    "sqrt": ("deep", two("ddp", checkpointing="sqrt"), 1),
    "zero3 sqrt": ("deep", two("zero3", checkpointing="sqrt"), 1),
    "selective": ("deep", two("ddp", checkpointing="selective"), 1),
    "zero3 selective": ("deep", two("zero3", checkpointing="selective"), 1),
    "tp": ("deep", two("none", tp=2), 1),
    "tp sequence": ("deep", two("none", tp=2, sequence_parallel=True), 1),
    "tp bfloat16": ("deep", two("none", tp=2, **HALF), 1),
    "gpipe": ("deep", plan("none", 2, pp=2, schedule="gpipe"), 4),
    "1f1b": ("deep", plan("none", 2, pp=2), 4),
    "interleaved": ("deep", plan("none", 2, pp=2, schedule="interleaved", virtual_stages=2), 4),
    "looped bfs": ("deep", plan("none", 2, pp=2, schedule="looped_bfs", virtual_stages=2), 4),
    "1f1b bfloat16": ("deep", plan("none", 2, pp=2, **HALF), 4),
    "experts": ("experts", two("ddp"), 1),
    "ep": ("experts", two("zero3", ep=2), 1),
    "words ddp": ("many words", two("ddp"), 1),
    "words zero1": ("many words", two("zero1"), 1),
    "words zero3": ("many words", two("zero3"), 1),
    "words bfloat16": ("many words", two("ddp", **HALF), 1),
    "words zero3 bfloat16": ("many words", two("zero3", **HALF), 1),
    "words 1f1b": ("many words", plan("none", 2, pp=2), 4),
    "words tp": ("many words", two("none", tp=2), 1),
    # Blocks of 16 MiB: what collectives hold and copy is most of it.
    "large ddp": ("large", two("ddp"), 1),
    "large zero1": ("large", two("zero1"), 1),
    "large zero2": ("large", two("zero2"), 1),
    "large zero3": ("large", two("zero3"), 1),
    "large zero3 accumulated": ("large", two("zero3"), 2),
    "large zero3 bfloat16": ("large", two("zero3", **HALF), 1),
    "large zero2 bfloat16": ("large", two("zero2", **HALF), 1),
    "large every": ("large", two("zero3", checkpointing="every"), 1),
    "large selective": ("large", two("zero3", checkpointing="selective"), 1),
    "coded ddp": ("coded", plan("ddp", 1, dp=2, optimizer_bits=8), 1),
    "coded zero3": ("coded", plan("zero3", 1, fsdp=2, optimizer_bits=8), 1),
    "four large zero2": ("four large", two("zero2"), 1),
    "four large zero3": ("four large", two("zero3"), 1),
    "four large zero3 bfloat16": ("four large", two("zero3", **HALF), 1),
    "four large every": ("four large", two("zero3", checkpointing="every"), 1),
}
FOUR: dict[str, Case] = {
    "hsdp": ("deep", plan("zero3", 4, dp=2, fsdp=2), 1),
    "fsdp tp": ("deep", plan("zero3", 4, fsdp=2, tp=2, sequence_parallel=True), 1),
    "pp fsdp": ("deep", plan("zero2", 2, pp=2, fsdp=2), 4),
    "pp tp": ("deep", plan("none", 2, pp=2, tp=2, sequence_parallel=True), 4),
    "ep of four": ("experts", plan("zero3", 4, fsdp=4, ep=2), 1),
    "large zero2": ("large", plan("zero2", 1, fsdp=4), 1),
    "large zero3": ("large", plan("zero3", 1, fsdp=4), 1),
    "large hsdp": ("large", plan("zero3", 1, dp=2, fsdp=2), 1),
    "large every": ("large", plan("zero3", 1, fsdp=4, checkpointing="every"), 1),
    "large selective": ("large", plan("zero3", 1, fsdp=4, checkpointing="selective"), 1),
    "four large zero3": ("four large", plan("zero3", 1, fsdp=4), 1),
}


def ratios(world: int, cases: dict[str, Case]) -> dict[str, float]:
    """Estimate over the most that any rank allocated."""
    found = run_ranks(measure, world, [(name, *case) for name, case in cases.items()], timeout=900.0)
    return {name: found[0][name].estimated / max(each[name].allocated for each in found) for name in cases}


def check(found: dict[str, float]) -> None:
    off = {name: ratio for name, ratio in found.items() if not 0.85 < ratio < 1.15}
    assert not off, found


def test_a_few_strategies_need_what_is_estimated() -> None:
    check(ratios(2, {name: TWO[name] for name in ("ddp sign", "zero3 bfloat16")}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_strategies_of_two_ranks_need_what_is_estimated() -> None:
    check(ratios(2, TWO))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_strategies_of_four_ranks_need_what_is_estimated() -> None:
    check(ratios(4, FOUR))

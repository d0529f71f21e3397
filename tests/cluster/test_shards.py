"""Parts of a model between files and ranks: memory, offsets, checkpoints at other world sizes."""

from __future__ import annotations

from pathlib import Path

import torch
from cluster_cases import Case, job_of, peak_memory, resume, save_and_stop, save_midway, wide
from cluster_plans import case, plan
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from roundtable.cluster.parallel.shards import runs_of
from roundtable.core import save_model
from roundtable.core.initial_model import initial_model

MODEL_BYTES = 24 * 2 * 1024 * 1025 * 4


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    each = Case("wide", plan("zero3", fsdp=4, micro=1), wide(), {"steps": 2, "batch_size": 4})
    save_model(tmp_path / "model.safetensors", initial_model(job_of(each), each.task))
    found = run_ranks(peak_memory, 4, each, tmp_path / "model.safetensors", tmp_path)
    for rank, peaks in enumerate(found):
        # A quarter is the rank's own; training adds a quarter of gradients, a few gathered layers and what
        # the allocator keeps of them: 0.9 models on a quiet machine, 1.3 where ranks wait for each other, and
        # more layers are under way. Unsharded weights and gradients are two models.
        assert peaks["load"] < 0.3 * MODEL_BYTES, (rank, peaks)
        assert peaks["fit"] < 1.6 * MODEL_BYTES, (rank, peaks)
        assert peaks["write"] < 1.4 * MODEL_BYTES, (rank, peaks)


def test_a_checkpoint_of_four_ranks_goes_on_with_two(tmp_path: Path) -> None:
    run_ranks(save_midway, 4, case("fsdp tp", plan("zero3", fsdp=2, tp=2, offload_optimizer=True)), tmp_path)
    others = [
        case("fsdp", plan("zero3", fsdp=2, offload_optimizer=True)),
        case("tp", plan(tp=2, sequence_parallel=True)),
        case("pp", plan(pp=2)),
        case("ddp", plan("ddp", dp=2)),
    ]
    # The first place is damaged: its copy serves.
    damaged = next((tmp_path / "first").glob("*/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    for found in run_ranks(resume, 2, others, tmp_path):
        assert max(found.values()) < 1e-10, found


def test_a_checkpoint_counts_as_soon_as_it_is_written(tmp_path: Path) -> None:
    each = case("zero3", plan("zero3", fsdp=2))
    assert run_ranks(save_and_stop, 2, each, tmp_path) == [True, True]
    for place in ("first", "second"):
        assert [path.parent.name for path in (tmp_path / place).glob("*/state.json")] == [
            "round-000001-step-00000002"
        ]
    for found in run_ranks(resume, 2, [each], tmp_path):
        assert found["zero3"] < 1e-10


@settings(deadline=None)
@given(st.data())
def test_runs_put_every_part_in_its_place(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    starts = [data.draw(st.integers(0, size)) for size in shape]
    ends = [data.draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True)]
    region = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    out = torch.full((whole.numel(),), -1.0)
    for offset, run in runs_of(whole[region], shape, region):
        out[offset : offset + run.numel()] = run
    expected = torch.full(shape, -1.0)
    expected[region] = whole[region]
    assert torch.equal(out.view(shape), expected)

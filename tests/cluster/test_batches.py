"""Batches shared out over ranks are those of one process, at any world size and after any restart."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_files import record_id, write_shards
from torch.utils.data import IterableDataset

from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.readers import make_reader
from roundtable.client.streams.shard_reader import _owner, merged
from roundtable.client.streams.shares import largest_share
from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.training.batches import training_batches
from roundtable.cluster.plan.model_probe import example_batch
from roundtable.cluster.train.shared_batches import Share, SharedBatches, Sharing
from roundtable.cluster.train.streams import StreamedBatches, why_shared
from roundtable.core.errors import TaskError
from roundtable.core.seeds import torch_generator


@settings(deadline=None)
@given(
    examples=st.integers(1, 40),
    batch=st.integers(1, 17),
    ranks=st.integers(1, 5),
    micro=st.integers(1, 4),
    pipeline=st.sampled_from([1, 2, 3]),
    interleaved=st.booleans(),
    skip=st.integers(0, 3),
)
def test_every_example_is_taken_once(
    examples: int, batch: int, ranks: int, micro: int, pipeline: int, interleaved: bool, skip: int
) -> None:
    data = (torch.arange(examples),)
    generator = torch_generator(5, 1, "silo", "batches")
    whole = list(training_batches(data, batch_size=batch, generator=generator, epochs=2))
    made = []
    for rank in range(ranks):
        sharing = Sharing(rank, ranks, micro, pipeline, interleaved)
        batches = SharedBatches(data, sharing, batch_size=batch, stream=(5, 1, "silo"), epochs=2)
        assert batches.steps == len(whole)
        batches.load_state_dict({"position": min(skip, len(whole))})
        made.append(list(batches))
    for step, expected in enumerate(whole[skip:]):
        shares = [each[step] for each in made]
        taken = [
            part[0] for share in shares for part, size in zip(share.batches, share.sizes, strict=True) if size
        ]
        assert torch.cat(taken).tolist() == expected.data[0].tolist()
        assert all(share.total == share.together == expected.size for share in shares)
        counts = {len(share.batches) for share in shares}
        # Ranks meet in each: of shards, and of experts in a pipeline too.
        assert len(counts) == 1
        assert all(size <= micro for share in shares for size in share.sizes)
        if pipeline > 1:
            assert min(counts) >= pipeline
            assert not interleaved or all(count % pipeline == 0 for count in counts)
            assert all(len({len(part[0]) for part in share.batches}) == 1 for share in shares)


class Sentences(IterableDataset[dict[str, Any]]):
    """Dicts, without a place of its own."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from ({"id": number, "text": "word"} for number in torch.randperm(11).tolist())


def number(sample: dict[str, bytes]) -> dict[str, Any]:
    return {"id": record_id(sample), "text": "word"}


def own_examples(share: Share) -> list[int]:
    parts = zip(share.batches, share.sizes, strict=True)
    return [int(value) for part, size in parts for value in part["id"][:size]]


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["shards", "iterable"]),
    batch=st.integers(1, 9),
    micro=st.integers(1, 3),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=4),
    apart=st.booleans(),
)
def test_a_stream_is_shared_out_and_gone_on_with_at_any_world_size(
    kind: str, batch: int, micro: int, worlds: list[tuple[int, int]], apart: bool
) -> None:
    """One round, broken off again and again, and taken up by other numbers of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), [4, 3, 5])
        dataset: Any = TarShards(paths, number, lanes=3, shuffle=6) if kind == "shards" else Sentences()
        seed, total = StreamSeed(5, "silo"), sum(steps for _, steps in worlds)
        alone = make_reader(dataset, seed, None)
        done, place = 0, None
        for ranks, steps in worlds:
            each = []
            for rank in range(ranks):
                sharing = Sharing(rank, ranks, micro, apart=ranks if apart else 1)
                batches = StreamedBatches(dataset, sharing, batch_size=batch, steps=total, seed=seed)
                batches.load_state_dict({"position": done, "stream": place})
                each.append((batches, list(islice(batches, steps))))
            for shares in zip(*(made for _, made in each), strict=True):
                whole = [example["id"] for example in alone.take(batch)]
                assert sorted(chain(*map(own_examples, shares))) == sorted(whole)
                assert len({len(share.batches) for share in shares}) == 1
                assert {share.total for share in shares} == {batch}
                assert all(len(part["text"]) for share in shares for part in share.batches)
                near = [sum(share.sizes) if apart else batch for share in shares]
                assert [share.together for share in shares] == near
            done += steps
            place = merged(batches.own_place(done) for batches, _ in each)


@given(examples=st.integers(1, 30), ranks=st.integers(1, 9), lanes=st.integers(0, 7))
def test_the_largest_share_of_a_batch_is_that_of_some_step(examples: int, ranks: int, lanes: int) -> None:
    most = 0
    for taken in range(lanes * ranks * 2 or 1):
        counts = [0] * ranks
        for number in range(taken, taken + examples):
            counts[_owner(number, lanes, ranks) if lanes else number % ranks] += 1
        most = max(most, *counts)
    assert largest_share(examples, ranks, lanes) == most


def test_what_a_stream_needs(tmp_path: Path) -> None:
    dataset, seed = TarShards(write_shards(tmp_path, [4]), number), StreamSeed(5, "silo")
    with pytest.raises(TaskError, match="set \\[algorithm\\] steps"):
        StreamedBatches(dataset, Sharing(0, 1, 1), batch_size=2, steps=None, seed=seed)
    with pytest.raises(TaskError, match="no pipeline: the training data are a stream"):
        StreamedBatches(dataset, Sharing(0, 1, 1, pipeline=2), batch_size=2, steps=1, seed=seed)


def test_a_stream_without_examples_is_told_before_a_plan(tmp_path: Path) -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    for nothing in (Nothing(), TarShards(write_shards(tmp_path, [0, 0]), number)):
        with pytest.raises(TaskError, match="the silo has no training examples"):
            example_batch(nothing)


def test_ranks_that_share_shards_are_told_why(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [1, 1, 1])
    assert "make at least 4 shards" in why_shared(TarShards(paths, number), 4)
    assert "3 ranks share 2 lanes" in (said := why_shared(TarShards(paths, number, lanes=2), 3))
    assert "set lanes = 3 of TarShards" in said
    assert why_shared(TarShards(paths, number), 3) == why_shared(Sentences(), 9) == ""

"""Batches shared out over ranks are those of one process, at any world size and after any restart."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.client.training.batches import training_batches
from roundtable.cluster.train.shared_batches import SharedBatches, Sharing
from roundtable.cluster.train.streams import StreamedBatches, TarShards
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
        if pipeline == 1:
            assert len(counts) == 1
            assert all(size <= micro for share in shares for size in share.sizes)
        else:
            assert min(counts) >= pipeline
            assert not interleaved or all(count % pipeline == 0 for count in counts)
            assert all(len({len(part[0]) for part in share.batches}) == 1 for share in shares)


def shards(folder: Path) -> list[Path]:
    paths = []
    for shard in range(3):
        path = folder / f"{shard}.tar"
        with tarfile.open(path, "w") as archive:
            for index in range(4):
                for extension, content in (("x", bytes([shard * 4 + index])), ("y.txt", b"label")):
                    member = tarfile.TarInfo(f"part/{index:03d}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        paths.append(path)
    return paths


def number(sample: dict[str, bytes]) -> torch.Tensor:
    assert sample["y.txt"] == b"label"
    return torch.tensor(sample["x"][0])


def test_tar_shards_are_streamed_and_shared(tmp_path: Path) -> None:
    dataset: Any = TarShards(shards(tmp_path), number)
    assert [int(example) for example in dataset] == list(range(12))
    made = [list(StreamedBatches(dataset, Sharing(rank, 2, 2), batch_size=5, steps=4)) for rank in range(2)]
    for step in range(4):
        taken = [
            int(value)
            for each in made
            for part, size in zip(each[step].batches, each[step].sizes, strict=True)
            for value in part[:size]
        ]
        assert taken == [(step * 5 + i) % 12 for i in range(5)]
    later = StreamedBatches(dataset, Sharing(0, 1, 5), batch_size=5, steps=4)
    later.load_state_dict({"position": 3})
    assert [share.batches[0].tolist() for share in later] == [[3, 4, 5, 6, 7]]


def test_a_stream_needs_a_number_of_steps(tmp_path: Path) -> None:
    dataset = TarShards(shards(tmp_path), number)
    with pytest.raises(TaskError, match="set \\[algorithm\\] steps"):
        StreamedBatches(dataset, Sharing(0, 1, 1), batch_size=2, steps=None)

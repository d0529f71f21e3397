"""Streams: the order of shards and records, going on from a position, and what damaged data lead to."""

from __future__ import annotations

import json
import os
import random
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_files import record_id, write_shards, write_tar
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from roundtable.client.failures import diagnose
from roundtable.client.streams.kept_position import NAME, kept_position, position_tensor
from roundtable.client.streams.lanes import StreamSeed
from roundtable.client.streams.readers import make_reader
from roundtable.client.streams.shard_lists import shard_list
from roundtable.client.streams.shard_marks import ShardMark
from roundtable.client.streams.shard_reader import merged
from roundtable.client.streams.shares import ReadingShare
from roundtable.client.streams.tar_shards import TarShards
from roundtable.client.training.tuning import tuner
from roundtable.core import JobConfig, Task
from roundtable.core.errors import EncodingError, NoExamples, TaskError
from roundtable.core.seeds import torch_generator

SEED = StreamSeed(7, "hospital")


def expected(sizes: Sequence[int], lanes: int, shuffle: int) -> Iterator[tuple[int, int]]:
    """The order as docs/data.md tells it, from lists in memory: (epoch from 0, record)."""
    starts = [sum(sizes[:shard]) for shard in range(len(sizes))]
    lanes = min(lanes, len(sizes))
    block = max(1, -(-shuffle // lanes))

    def lane(number: int) -> Iterator[tuple[int, int]]:
        place = number
        while True:
            epoch, inside = divmod(place, len(sizes))
            generator = torch_generator(7, "hospital", "stream", "shards", epoch)
            shard = int(torch.randperm(len(sizes), generator=generator)[inside])
            yield from ((epoch, starts[shard] + record) for record in range(sizes[shard]))
            place += lanes

    def mixed(number: int) -> Iterator[tuple[int, int]]:
        records, buffer = lane(number), 0
        while True:
            held = list(islice(records, block))
            generator = torch_generator(7, "hospital", "stream", "records", number, buffer)
            yield from (held[i] for i in torch.randperm(block, generator=generator).tolist())
            buffer += 1

    each = [mixed(number) for number in range(lanes)]
    while True:
        yield from (next(one) for one in each)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any),
    lanes=st.integers(1, 5),
    shuffle=st.integers(0, 12),
    batch=st.integers(1, 6),
    ranks=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    steps=st.lists(st.integers(1, 5), min_size=5, max_size=5),
    suffix=st.sampled_from(["tar", "tar.gz"]),
)
def test_any_cuts_and_any_ranks_take_the_one_order(
    sizes: list[int],
    lanes: int,
    shuffle: int,
    batch: int,
    ranks: list[int],
    steps: list[int],
    suffix: str,
) -> None:
    """Rounds of different lengths, each on another number of ranks, against lists in memory."""
    order = expected(sizes, lanes, shuffle)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_shards(Path(folder), sizes, suffix)
        position = None
        for world, count in zip(ranks, steps, strict=False):
            decoded: list[int] = []

            def decode(sample: Any, decoded: list[int] = decoded) -> int:
                decoded.append(record_id(sample))
                return decoded[-1]

            source = TarShards(paths, decode, shuffle=shuffle, lanes=lanes)
            readers = [make_reader(source, SEED, position, ReadingShare(r, world)) for r in range(world)]
            for _ in range(count):
                counts = readers[0].counts(batch)
                taken = [reader.take(batch) for reader in readers]
                assert [len(own) for own in taken] == counts
                assert sorted(chain(*taken)) == sorted(record for _, record in islice(order, batch))
            assert len(decoded) == count * batch  # Nobody decodes what another one uses.
            kept = position_tensor(merged(reader.position() for reader in readers))
            position = kept_position({NAME: kept})
            for reader in readers:
                reader.close()


def test_who_has_no_example_in_a_step_reads_one_for_all_of_them(tmp_path: Path) -> None:
    """Three share one lane, a step has two examples: none reads one for each step without any of its own."""
    decoded: list[int] = []

    def decode(sample: Any) -> int:
        decoded.append(record_id(sample))
        return int(torch.randint(1 << 30, ()))

    source = TarShards(write_shards(tmp_path, [9]), decode, shuffle=0)
    readers = [make_reader(source, SEED, None, ReadingShare(rank, 3)) for rank in range(3)]
    before = torch.get_rng_state()
    for _ in range(4):
        for reader in readers:
            if not reader.take(2):
                reader.filler()
    # The third had none in the first step.
    assert sorted(decoded) == sorted([*range(8), 0])
    assert torch.equal(torch.get_rng_state(), before)
    nothing = TarShards(write_shards(tmp_path / "nothing", [0]), decode)
    with pytest.raises(NoExamples, match="hold no record"):
        make_reader(nothing, SEED, None, ReadingShare(1, 2)).filler()


def test_every_record_of_an_epoch_comes_once(tmp_path: Path) -> None:
    sizes = [5, 0, 9, 2, 7, 7]
    order = list(islice(expected(sizes, 3, 8), 30 * 40))
    for epoch in range(20):
        assert sorted(record for its, record in order if its == epoch) == list(range(30))
    reader = make_reader(TarShards(write_shards(tmp_path, sizes), record_id, shuffle=8, lanes=3), SEED, None)
    assert reader.take(len(order)) == [record for _, record in order]
    assert {len(set(reader.take(5))) for _ in range(3)} == {5}


def test_orders_differ_by_client_seed_and_epoch(tmp_path: Path) -> None:
    source = TarShards(write_shards(tmp_path, [10, 10, 10]), record_id, lanes=1, shuffle=10)
    seeds = [StreamSeed(1, "a"), StreamSeed(1, "b"), StreamSeed(2, "a")]
    taken = [tuple(make_reader(source, seed, None).take(60)) for seed in seeds]
    assert len({own[:30] for own in taken} | {own[30:] for own in taken}) == 6
    assert all(sorted(own[:30]) == list(range(30)) for own in taken)


def test_going_on_reads_no_byte_of_what_was_taken(tmp_path: Path) -> None:
    """Of a half-used buffer only the records that are left are read again, whatever their order."""
    paths = write_shards(tmp_path, [40])
    source = TarShards(paths, record_id, lanes=1, shuffle=16)
    first = make_reader(source, SEED, None)
    taken = first.take(27)
    read: list[str] = []

    class Watched(TarShards):
        def records(self, shard: int, start: int, wanted: Any, meet: Any = None) -> Any:
            for record in super().records(shard, start, wanted, meet):
                read.extend([record.name] if record.sample is not None else [])
                yield record

    watched = Watched(paths, record_id, lanes=1, shuffle=16)
    later = make_reader(watched, SEED, first.position()).take(5)
    assert later == first.take(5)
    assert sorted(read) == sorted(f"part/r{number:05d}" for number in later)
    assert not set(later) & set(taken)


def test_shards_behind_an_address(tmp_path: Path) -> None:
    """fsspec's memory stands for a bucket; where data move, the position holds."""
    memory = fsspec.filesystem("memory")
    for path in write_shards(tmp_path, [6, 6, 6]):
        memory.pipe_file(f"/scans/{path.name}", path.read_bytes())
    bucket = TarShards("memory://scans/s{000..002}.tar", record_id, shuffle=5)
    here = TarShards(sorted(tmp_path.glob("*.tar")), record_id, shuffle=5)
    reader = make_reader(bucket, SEED, None)
    taken = reader.take(7)
    assert taken + make_reader(here, SEED, reader.position()).take(20) == make_reader(here, SEED, None).take(
        27
    )


def test_decode_draws_the_same_wherever_it_runs(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [6, 6])

    def drawn(sample: Any) -> tuple[int, float, float, float]:
        return record_id(sample), torch.rand(()).item(), float(np.random.rand()), random.random()

    source = TarShards(paths, drawn, shuffle=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    whole = make_reader(source, SEED, None).take(24)
    assert torch.equal(torch.get_rng_state(), before)
    halves = [make_reader(source, SEED, None, ReadingShare(rank, 2)).take(24) for rank in range(2)]
    assert sorted(halves[0] + halves[1]) == sorted(whole)
    assert len(set(whole)) == 24


class Numbers(IterableDataset[int]):
    """0 to 9, in an order of the data set's own chance."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(10).tolist()


class Resumable(IterableDataset[int]):
    """0 to 9, with a place of its own; counts what it reads."""

    def __init__(self) -> None:
        self.place = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            self.read += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Split(IterableDataset[int]):
    """Numbers that torch's workers share out as torch's documentation says."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        yield from range(worker.id, 11, worker.num_workers)


def drawing(sample: Any) -> tuple[int, float, int]:
    return record_id(sample), torch.rand(()).item(), os.getpid()


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_neither_order_nor_draws(tmp_path: Path, ranks: int, workers: int) -> None:
    """Nor does another number of them when the reading goes on."""
    source = TarShards(write_shards(tmp_path, [7, 5, 9, 6, 8]), drawing, lanes=4, shuffle=9)
    shares = [ReadingShare(rank, ranks) for rank in range(ranks)]
    alone = [make_reader(source, SEED, None, share) for share in shares]
    position = None
    for count, number in ((13, workers), (22, 2), (8, workers)):
        loader = DataLoader(source, num_workers=number, prefetch_factor=3)
        readers = [make_reader(loader, SEED, position, share) for share in shares]
        for plain, reader in zip(alone, readers, strict=True):
            taken = reader.take(count)
            assert [each[:2] for each in taken] == [each[:2] for each in plain.take(count)]
            assert os.getpid() not in {each[2] for each in taken}
            reader.close()
        position = merged(reader.position() for reader in readers)
        assert position == merged(reader.position() for reader in alone)


def test_an_iterable_read_by_workers_goes_on(tmp_path: Path) -> None:
    loader = DataLoader(Split(), num_workers=2)
    whole = make_reader(loader, SEED, None).take(25)
    assert sorted(whole[:11]) == sorted(whole[11:22]) == list(range(11))
    first = make_reader(loader, SEED, None)
    taken = first.take(14)
    assert taken + make_reader(loader, SEED, first.position()).take(11) == whole
    with pytest.raises(TaskError, match="position is kept"):
        make_reader(DataLoader(Split(), num_workers=3), SEED, first.position())
    with pytest.raises(TaskError, match="set num_workers = 0"):
        make_reader(DataLoader(Resumable(), num_workers=1), SEED, None)


def test_what_a_worker_meets_with_is_told_without_names(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "jane.tar", [("Jane_Doe.jpg", b"1")])

    def failing(sample: Any) -> Any:
        raise ValueError(f"no age of {sample['__key__']}")

    for data, message in (
        (TarShards(path, lambda sample: sample["cls"]), "a record has no member 'cls'"),
        (TarShards(path, failing), r"raised ValueError in test_streams.py, line \d+, in failing\(\)"),
        (TarShards(tmp_path / "none_of_jane.tar", failing), "shard 1 of 1 of the training data is not there"),
    ):
        with pytest.raises(TaskError, match=message) as caught:
            make_reader(DataLoader(data, num_workers=1), SEED, None).take(1)
        said = diagnose(caught.value)
        assert "ane" not in said.detail.replace("another", "")
        assert "ane" in said.trace


@pytest.mark.parametrize("kind", [Numbers, Resumable])
def test_any_iterable_goes_on_where_it_stopped(kind: Any) -> None:
    whole = make_reader(kind(), SEED, None).take(37)
    assert [sorted(whole[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    position, dataset, taken = None, kind(), []
    for count in (4, 9, 7, 10, 7):
        for _ in range(2):  # An attempt that does not count, and the one that does.
            reader = make_reader(dataset, SEED, position)
            torch.rand(3)  # A model's own chance.
            own = reader.take(count)
        taken += own
        position = json.loads(json.dumps(reader.position()))
    assert taken == whole
    shared = [make_reader(kind(), SEED, None, ReadingShare(rank, 3)).take(7) for rank in range(3)]
    assert list(chain(*shared)) == whole[:7]


def test_a_data_set_with_a_state_is_not_read_twice() -> None:
    dataset = Resumable()
    reader = make_reader(dataset, SEED, None)
    reader.take(8)
    again = Resumable()
    assert make_reader(again, SEED, reader.position()).take(2) == [8, 9]
    assert again.read == 2


def test_states_that_json_changes_are_refused() -> None:
    class Rich(Resumable):
        def state_dict(self) -> dict[str, Any]:
            return {"place": (1, 2)}

    reader = make_reader(Rich(), SEED, None)
    with pytest.raises(TaskError, match="do not come back from JSON"):
        reader.position()


@pytest.mark.parametrize(
    ("pattern", "shards"),
    [
        ("a-{000..002}.tar", ["a-000.tar", "a-001.tar", "a-002.tar"]),
        ("{x,y}/{9..10}.tar", ["x/9.tar", "x/10.tar", "y/9.tar", "y/10.tar"]),
        (Path("{odd}.tar"), ["{odd}.tar"]),
    ],
)
def test_braces(pattern: str | Path, shards: list[str]) -> None:
    assert list(shard_list(pattern)) == shards


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{3..1}.tar", "counts down"),
        ("{a}.tar", "braces are a range"),
        ("{a,{b,c}}.tar", "braces are a range"),
        ("a}.tar", "braces are a range"),
        ("{0..99999999}.tar", "more than 1,048,576 shards"),
        ("{0..2000}{0..2000}", "more than 1,048,576 shards"),
        ([], "the list of shards is empty"),
        (["a.tar", "a.tar"], "shard 2 of 2 is named twice"),
    ],
)
def test_braces_that_name_nothing(pattern: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        shard_list(pattern)


def test_names_as_webdataset_takes_them(tmp_path: Path) -> None:
    members = [
        ("__meta__/info.json", b"{}"),
        ("a.b/x.1.seg.PNG", b"1"),
        ("a.b/x.cls", b"2"),
        ("README", b"no key"),
        ("../../etc/passwd.txt", b"3"),
    ]
    path = write_tar(tmp_path / "s.tar", members)
    samples = list(TarShards(path, dict))
    assert samples == [
        {"__key__": "a.b/x", "1.seg.png": b"1", "cls": b"2"},
        {"__key__": "../../etc/passwd", "txt": b"3"},
    ]
    assert [
        sample["__key__"] for sample in DataLoader(TarShards(path, dict), batch_size=None, num_workers=2)
    ] == [
        "a.b/x",
        "../../etc/passwd",
    ]


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    changed = {
        "cut within a member": data[: 2560 - 100],
        "cut between two members": data[: 4 * 1024],
        "a damaged header": data[:1024] + b"\xff" * 512 + data[1536:],
        "no tar file": b"patient Jane Doe" * 100,
        "empty": b"",
    }
    path.write_bytes(changed[how])


@pytest.mark.parametrize(
    "how", ["cut within a member", "cut between two members", "a damaged header", "no tar file", "empty"]
)
@pytest.mark.parametrize("suffix", ["tar", "tgz"])
def test_damaged_shards_end_the_round(tmp_path: Path, how: str, suffix: str) -> None:
    """tarfile itself takes most of these for the archive's end, and would train on what is left."""
    (path,) = write_shards(tmp_path, [6], "tar")
    damaged(path, how)
    if suffix == "tgz":
        import gzip

        compressed = tmp_path / "s.tgz"
        compressed.write_bytes(gzip.compress(path.read_bytes()))
        path = compressed
    with pytest.raises(TaskError, match="shard 1 of 1 of the training data is damaged") as caught:
        make_reader(TarShards(path, record_id), SEED, None).take(6)
    said = diagnose(caught.value)
    assert str(tmp_path) in said.trace
    assert path.name not in said.detail
    assert "Jane" not in said.detail


def test_a_compressed_shard_that_is_cut_off(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [6], "tar.gz")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TaskError, match="is damaged"):
        make_reader(TarShards(path, record_id), SEED, None).take(6)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("missing.tar", "shard 1 of 1 of the training data is not there; bring it back"),
        ("nosuch://bucket/a.tar", "an address that fsspec does not read \\('nosuch'\\)"),
        ("gs://bucket/a.tar", r"gs:// needs the library 'gcsfs', which .* install 'roundtable-fl\[gcs\]'"),
    ],
)
def test_shards_that_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_reader(TarShards(url, record_id), SEED, None).take(1)


def test_records_that_are_too_large_or_named_twice(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [("a.x", b"1" * 600), ("a.y", b"1" * 600)])
    with pytest.raises(TaskError, match="a record has more than the 1,000 bytes that are allowed"):
        make_reader(TarShards(path, dict, most_bytes=1000), SEED, None).take(1)
    write_tar(path, [("a.x", b"1"), ("a.X", b"2")])
    with pytest.raises(TaskError, match="two members of one key"):
        make_reader(TarShards(path, dict), SEED, None).take(1)


def test_what_decode_misses_is_told_without_names(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [("Jane_Doe.jpg", b"1")])
    with pytest.raises(TaskError, match="a record has no member 'cls' that decode") as caught:
        make_reader(TarShards(path, lambda sample: sample["cls"]), SEED, None).take(1)
    said = diagnose(caught.value)
    assert "Jane" not in said.detail
    assert "Jane_Doe" in said.trace
    assert "jpg" in "".join(traceback.format_exception(caught.value))


def test_empty_shards_give_no_examples(tmp_path: Path) -> None:
    with pytest.raises(NoExamples, match="the 2 shards of the training data hold no record"):
        make_reader(TarShards(write_shards(tmp_path, [0, 0]), record_id), SEED, None).take(1)


def test_positions_of_other_data_are_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [4, 4])
    source = TarShards(paths, record_id)
    reader = make_reader(source, SEED, None)
    reader.take(3)
    position = reader.position()
    moved = [
        path.rename(path.parent / "elsewhere" / path.name)
        for path in paths
        if not (tmp_path / "elsewhere").mkdir(exist_ok=True)
    ]
    assert make_reader(TarShards(moved, record_id), SEED, position).take(5) == reader.take(5)
    for other in (TarShards(moved, record_id, shuffle=3), TarShards(moved[:1], record_id), Numbers()):
        with pytest.raises(TaskError, match="position is kept"):
            make_reader(other, SEED, position)
    odd = [{"0": [0, 0, mark], "1": [1, 0]} for mark in ([1, "a"], [-1, "a", "b"], ["1", "a", "b"], "abc")]
    for wrong in (
        {"taken": -1},
        {"lanes": {}},
        {"lanes": {"0": [0, 0], "1": [0, 0]}},
        {"taken": True},
        *({"lanes": lanes} for lanes in odd),
    ):
        with pytest.raises(EncodingError, match="position in the training data is damaged"):
            make_reader(source, SEED, {**position, **wrong})
    for tensor in (torch.zeros(3), torch.tensor([1], dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(EncodingError, match="position in the training data is damaged"):
            kept_position({NAME: tensor})


def test_shards_that_shrink_under_a_job_are_noticed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [20])
    reader = make_reader(TarShards(paths, record_id, shuffle=4), SEED, None)
    reader.take(16)
    write_shards(tmp_path, [3])
    with pytest.raises(TaskError, match=r"is damaged|has changed"):
        make_reader(TarShards(paths, record_id, shuffle=4), SEED, reader.position()).take(1)


def test_a_shard_that_is_another_file_by_now_is_refused_or_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the same bounds of records nothing else would notice: in a shard's middle, and at its beginning
    while records of it are held; not where nothing of it was read, nor where the same file lies elsewhere."""
    members = [(f"r{number}.id", b"%d" % number) for number in range(20)]
    members = [each for name, body in members for each in ((name, body), (name[:-2] + "y.txt", b"label"))]
    for taken, shuffle in ((14, 4), (2, 8)):
        path = write_tar(tmp_path / "s.tar", members)
        source = TarShards([path], record_id, shuffle=shuffle)
        reader = make_reader(source, SEED, None)
        before = make_reader(source, SEED, reader.position())
        reader.take(taken)
        position = json.loads(json.dumps(reader.position()))
        # As it is, or with another time of its own at another place.
        (tmp_path / "moved").mkdir()
        moved = write_tar(tmp_path / "moved" / "s.tar", members)
        os.utime(moved, (1, 1))
        expected = make_reader(source, SEED, position).take(5)
        assert make_reader(TarShards([moved], record_id, shuffle=shuffle), SEED, position).take(5) == expected
        assert not caplog.records
        # Other contents in the same bounds.
        write_tar(path, [(name, b"9" * len(body) if name.endswith("id") else body) for name, body in members])
        os.utime(path, (2, 2))
        before.take(1)
        assert not caplog.records, "nothing of it had been read"
        changed = make_reader(source, SEED, position)
        assert set(changed.take(2)) <= {9, 99}
        assert [str(path) in record.getMessage() for record in caplog.records] == [True]
        again = make_reader(source, SEED, changed.position())
        again.take(1)
        assert len(caplog.records) == 1, "once"
        caplog.clear()
        # More behind the end.
        write_tar(path, [*members, ("more.id", b"1"), ("more.y.txt", b"label" * 4000)])
        with pytest.raises(
            TaskError, match="shard 1 of 1 of the training data has changed: it has"
        ) as caught:
            make_reader(source, SEED, position).take(1)
        assert str(tmp_path) not in str(caught.value)
        moved.unlink()
        moved.parent.rmdir()


def test_what_file_systems_say_of_a_shard_is_what_it_is_known_by() -> None:
    def mark(url: str, **told: Any) -> ShardMark:
        file = SimpleNamespace(details=told)
        return ShardMark.of(url, SimpleNamespace(fobjects=[file]))

    one = mark("https://host/a.tar?signed=monday", size=5, ETag="x")
    assert one == mark("https://host/a.tar?signed=friday", size=5, ETag="x", LastModified="later")
    assert one.written_again(mark("https://host/a.tar", size=5, ETag="y"))
    assert not one.written_again(mark("s3://bucket/a.tar", size=5, ETag="y"))
    assert one.other_size(mark("s3://bucket/a.tar", size=6))
    silent = mark("https://host/a.tar", size=None)
    assert not any((silent.other_size(one), one.other_size(silent), silent.written_again(one)))


@pytest.mark.parametrize("wrong", [{"shuffle": -1}, {"lanes": 0}, {"lanes": True}, {"most_bytes": "9"}])
def test_values_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(TaskError, match=f"TarShards: {next(iter(wrong))} is"):
        TarShards("a.tar", record_id, **wrong)


def test_no_tuning_on_a_stream() -> None:
    table = {"name": "finetuning", "tuning_steps": 1}
    work: Any = SimpleNamespace(job=JobConfig.model_validate({"task": "t", "algorithm": table}))
    tune = tuner(Task(), TarShards("shard.tar", decode=dict), work, torch.device("cpu"))
    with pytest.raises(TaskError, match=r"'finetuning' tunes .* the TarShards of data\(\) has no length"):
        tune(torch.nn.Linear(1, 1), 1, 0.1)

"""What stays on the silo's disk: finished updates, local state, the lock's neighbour files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundtable.client.agent.delivery import header_of
from roundtable.client.agent.spool import Finished, Spool
from roundtable.client.door.incoming import step_of
from roundtable.client.door.outgoing import UpdateFigures
from roundtable.client.durable_files import replace_synced, write_file
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import write_update
from roundtable.client.worker.silo_state import SiloState
from roundtable.core.encodings import get_encoding
from roundtable.core.errors import EncodingError, ProtocolError, ResourceError
from roundtable.core.observability.released import public
from roundtable.proto import common_pb2

STEP = StepKey("job-1", 3, 1, "train")


def finish(spool: Spool, step: StepKey = STEP, content: bytes = b"update") -> Finished:
    digest, size = write_file(spool.bytes_of(step), [content])
    finished = Finished(step, digest, size, "f" * 64, "float32", public(UpdateFigures(7, {"loss": (3.5, 7)})))
    spool.describe(finished)
    spool.sync(finished.step)
    return finished


def test_a_committed_update_comes_back_and_an_unfinished_one_does_not(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    second = finish(spool, StepKey("job-1", 4, 1, "train"))
    first = finish(spool)
    write_file(spool.bytes_of(StepKey("job-1", 5, 1, "train")), [b"half"])
    assert Spool(tmp_path).recover() == [first, second]
    assert len(list(tmp_path.iterdir())) == 4
    spool.remove(first.step)
    spool.remove(first.step)
    assert Spool(tmp_path).recover() == [second]


@pytest.mark.parametrize("damage", ["bytes", "description", "field", "missing"])
def test_a_damaged_update_is_dropped(tmp_path: Path, damage: str) -> None:
    spool = Spool(tmp_path)
    finish(spool)
    (description,) = tmp_path.glob("*.json")
    if damage == "bytes":
        spool.bytes_of(STEP).write_bytes(b"updatE")
    elif damage == "missing":
        spool.bytes_of(STEP).unlink()
    elif damage == "description":
        description.write_bytes(description.read_bytes()[:-5])
    else:
        description.write_text(json.dumps({"step": ["job-1", 3, 1, "train"], "size": 6}))
    assert Spool(tmp_path).recover() == []
    assert list(tmp_path.iterdir()) == []


def test_the_header_repeats_what_was_finished(tmp_path: Path) -> None:
    finished = finish(Spool(tmp_path))
    header = header_of(Spool(tmp_path).recover()[0], offset=2)
    assert step_of(header.step) == STEP
    assert (header.content.digest, header.content.size) == (finished.digest, 6)
    assert [(m.name, m.sum, m.count) for m in header.metrics] == [("loss", 3.5, 7)]
    assert (header.examples, header.encoding, header.offset) == (7, "float32", 2)


@pytest.mark.parametrize("word", ["../up", "", "a/b", ".hidden", "x" * 200, "a\0b", "a b"])
def test_identifiers_that_could_leave_a_folder_are_refused(word: str) -> None:
    with pytest.raises(ProtocolError, match="identifier"):
        step_of(common_pb2.Step(job=word, round=1, attempt=1, phase="train"))
    with pytest.raises(ProtocolError, match="identifier"):
        step_of(common_pb2.Step(job="job", round=1, attempt=1, phase=word))


@given(st.text(max_size=40))
def test_a_step_is_refused_or_its_name_is_one_plain_file(word: str) -> None:
    try:
        step = step_of(common_pb2.Step(job=word, round=1, attempt=1, phase="train"))
    except (ProtocolError, UnicodeEncodeError):
        return
    assert Path(step.slug).name == step.slug


def test_an_update_is_written_in_the_jobs_encoding(tmp_path: Path) -> None:
    delta = torch.randn(3_000_000, generator=torch.Generator().manual_seed(1))
    _, size = write_update(tmp_path / "u", delta, "bfloat16")
    assert size == 6_000_000
    out = torch.empty_like(delta)
    get_encoding("bfloat16").decode((tmp_path / "u").read_bytes(), out)
    assert torch.equal(out, delta.bfloat16().float())


def test_silo_state_is_what_the_counted_step_left(tmp_path: Path) -> None:
    state = SiloState(tmp_path)
    assert state.load("job", None) is None
    counted = None
    for round in (1, 2, 3):
        tensors = {"count": torch.tensor(round), "half": torch.ones(2).bfloat16()}
        state.save("job", (round, 1), tensors, counted)
        counted = (round, 1) if round < 3 else counted
    state.save("job", (3, 2), {"count": torch.tensor(33)}, counted)
    assert state.load("job", (2, 1))["count"] == 2  # type: ignore[index]
    assert state.load("job", (3, 2)) == {"count": torch.tensor(33)}
    assert state.load("job", (3, 1)) is None, "another attempt was begun from what counts"
    assert state.load("job", (1, 1)) is None
    assert state.load("other", (2, 1)) is None
    state.save("empty", (1, 1), {}, None)
    assert state.load("empty", (1, 1)) == {}, "nothing was left, which is not the same as lost"


def test_a_damaged_silo_state_says_which_file(tmp_path: Path) -> None:
    state = SiloState(tmp_path)
    state.save("job", (1, 1), {"count": torch.tensor(1)}, None)
    (tmp_path / "job" / "round-1.1.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(EncodingError, match=r"round-1\.1\.safetensors"):
        state.load("job", (1, 1))


def test_a_file_that_two_processes_replace_at_once_is_one_of_theirs(tmp_path: Path) -> None:
    other = (
        "import sys; from pathlib import Path; from roundtable.client.durable_files import replace_synced\n"
    )
    other += "replace_synced(Path(sys.argv[1]), [b'other'], many=True)"

    def blocks() -> Iterator[bytes]:
        yield b"ou"
        subprocess.run([sys.executable, "-c", other, str(tmp_path / "file")], check=True)
        assert (tmp_path / "file").read_bytes() == b"other"
        yield b"rs"

    replace_synced(tmp_path / "file", blocks(), many=True)
    assert (tmp_path / "file").read_bytes() == b"ours"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    replace_synced(tmp_path / "file", [b"old"])
    with pytest.raises(ResourceError, match="could not be written"):
        replace_synced(tmp_path / "absent" / "file", [b"new"])

    def failing():  # type: ignore[no-untyped-def]
        yield b"ne"
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceError, match="disk is full"):
        replace_synced(tmp_path / "file", failing())
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

"""Checkpoints of many files: what is written comes back, what an index says is checked, then followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roundtable.cluster.train.pretrained_weights import pretrained_weights
from roundtable.core import Task
from roundtable.core.errors import EncodingError, LayoutError
from roundtable.core.foundation.checkpoint_files import (
    INDEX,
    CheckpointTensors,
    name_digests,
    write_checkpoint,
)
from roundtable.loading import load_model

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor(3, dtype=torch.int64),
    "c": torch.linspace(-1, 1, 50, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
}


def written(folder: Path, most: int = 32, tensors: dict[str, Tensor] = TENSORS) -> list[str]:
    folder.mkdir(exist_ok=True)
    return write_checkpoint(tensors, folder, most)


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


def change_index(folder: Path, **changes: Any) -> None:
    (folder / INDEX).write_text(json.dumps({**index_of(folder), **changes}))


def same(found: Any, tensors: dict[str, Tensor] = TENSORS) -> bool:
    return found.keys() == tensors.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value)
        for name, value in tensors.items()
    )


def test_what_is_written_in_many_files_comes_back(tmp_path: Path) -> None:
    files = written(tmp_path / "c")
    assert files == ["model-00001-of-00003.safetensors", *files[1:]]
    assert sorted(f.name for f in (tmp_path / "c").iterdir()) == [*files, INDEX]
    index = index_of(tmp_path / "c")
    assert index["metadata"]["total_size"] == 24 + 8 + 100
    held = {name: file for file in files for name in load_file(tmp_path / "c" / file)}
    assert held == index["weight_map"]
    for place in (tmp_path / "c", tmp_path / "c" / INDEX):
        found = CheckpointTensors(place)
        found.verify()
        assert same(found)
        assert found.files == files
        assert found.sizes() == {name: list(value.shape) for name, value in TENSORS.items()}
    assert same(load_model(tmp_path / "c"))


def test_one_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        assert same(CheckpointTensors(place))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EncodingError, match=r"model\.safetensors is not there"):
        CheckpointTensors(tmp_path)


def test_a_shard_with_another_byte_is_named(tmp_path: Path) -> None:
    files = written(tmp_path)
    data = bytearray((tmp_path / files[1]).read_bytes())
    data[-1] ^= 1
    (tmp_path / files[1]).write_bytes(data)
    with pytest.raises(EncodingError, match=rf"{files[1]} is damaged"):
        CheckpointTensors(tmp_path).verify()
    with pytest.raises(EncodingError, match="is damaged"):
        load_model(tmp_path)
    # The index of somebody else tells no digests, until they are added.
    change_index(tmp_path, metadata={"total_size": 1})
    CheckpointTensors(tmp_path).verify()
    name_digests(tmp_path)
    (tmp_path / files[1]).write_bytes(bytes(data[:-1]) + b"\0")
    with pytest.raises(EncodingError, match="is damaged"):
        CheckpointTensors(tmp_path).verify()


@pytest.mark.parametrize(
    "file",
    [
        "../other/model-00001-of-00003.safetensors",
        "other/model-00001-of-00003.safetensors",
        "/etc/model.safetensors",
        "..\\model.safetensors",
        "c:model.safetensors",
        ".hidden.safetensors",
        "..",
        "config.json",
        "a\nb.safetensors",
        7,
        ["model.safetensors"],
        None,
    ],
    ids=str,
)
def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path, file: object) -> None:
    """Even where the file that it means is there, and is one."""
    written(tmp_path / "other")
    written(tmp_path / "c")
    change_index(tmp_path / "c", weight_map={**index_of(tmp_path / "c")["weight_map"], "a": file})
    with pytest.raises(EncodingError, match=r"an index names \.safetensors files of its own folder"):
        CheckpointTensors(tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_map": []}, "is no index"),
        ({"weight_map": {}}, "is no index"),
        ({"weight_map": {"a": "missing.safetensors"}}, "missing.safetensors is not there"),
        ({"metadata": {"blake3": {"x.safetensors": "0" * 64}}}, "digests of other files"),
        ({"metadata": {"blake3": [1]}}, "digests of other files"),
    ],
    ids=str,
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    written(tmp_path)
    change_index(tmp_path, **changes)
    with pytest.raises(EncodingError, match=said):
        CheckpointTensors(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, "\udcff"], ids=["list", "cut", "deep", "bytes"])
def test_an_index_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    written(tmp_path)
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(EncodingError, match=r"is no (JSON|index)"):
        CheckpointTensors(tmp_path)


def test_a_digest_that_is_none_is_refused(tmp_path: Path) -> None:
    files = written(tmp_path)
    change_index(tmp_path, metadata={"blake3": dict.fromkeys(files, "../x")})
    with pytest.raises(EncodingError, match="digests that are none"):
        CheckpointTensors(tmp_path)


def test_index_and_files_name_the_same_tensors(tmp_path: Path) -> None:
    files = written(tmp_path)
    known = index_of(tmp_path)["weight_map"]
    change_index(tmp_path, weight_map={**known, "more": files[0]})
    with pytest.raises(EncodingError, match="'more' is in the index and not in the file"):
        CheckpointTensors(tmp_path)["a"]
    change_index(tmp_path, weight_map={name: file for name, file in known.items() if name != "b"})
    with pytest.raises(EncodingError, match="'b' is in the file alone"):
        dict(CheckpointTensors(tmp_path))


def test_a_writing_that_was_killed_leaves_no_checkpoint_and_nothing_in_the_way(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    class Stops(dict[str, Tensor]):
        def items(self) -> Any:
            yield from super().items()
            raise Killed

    with pytest.raises(Killed):
        write_checkpoint(Stops(TENSORS), tmp_path, 32)
    (tmp_path / ".writing" / "model-00009-of-00009.safetensors").write_bytes(b"half")
    assert not (tmp_path / INDEX).exists()
    written(tmp_path)
    assert same(CheckpointTensors(tmp_path))
    assert not (tmp_path / ".writing").exists()


class Plain(Task):
    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(())


def test_ranks_read_their_weights_out_of_many_files(tmp_path: Path) -> None:
    """A silo's shared folder is read where a tensor is asked for, and no further."""
    weights = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    files = written(tmp_path, 8, weights)
    assert len(files) == 2
    found = pretrained_weights(tmp_path, Plain())
    (tmp_path / index_of(tmp_path)["weight_map"]["bias"]).unlink()
    assert torch.equal(found["weight"], weights["weight"])
    with pytest.raises(EncodingError, match="cannot be read"):
        found["bias"]
    with pytest.raises(LayoutError, match=r"the task's pretrained weights: .* is not there"):
        pretrained_weights(tmp_path, Plain())

"""Tensors of a checkpoint as others publish it: a safetensors file, or a folder with an index of many.

    model.safetensors                  the whole, or
    model.safetensors.index.json       {"metadata": {"total_size": BYTES}, "weight_map": {TENSOR: FILE}}
    model-00001-of-00002.safetensors   ...

An index is somebody else's words: its files are plain names in the index's own folder, its tensors those
that the files hold. Checkpoints that are written here name the BLAKE3 digest of each file in the index
("metadata", "blake3"), and readers check what is named.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor
from typing_extensions import override

from roundtable.core.bounds import is_digest
from roundtable.core.errors import EncodingError
from roundtable.core.machine.file_access import sync_folder
from roundtable.core.models import tensors_file

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DIGESTS = "blake3"
_MOST_INDEX_BYTES = 64 << 20
_SCRATCH = ".writing"


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, or of a folder's, each read when it is asked for.

    `path` is a file, a folder or its index. A file is opened when the first of its tensors is wanted. Raises
    EncodingError, naming the file, for what is no checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.folder, self._files, self._digests = _found(path)
        self._open: dict[str, Any] = {}

    @property
    def files(self) -> list[str]:
        """The names of its files, in order."""
        return sorted(set(self._files.values()))

    def verify(self) -> None:
        """Hashes each file of which the index names the digest. EncodingError for the first with another."""
        for name, digest in sorted(self._digests.items()):
            found = blake3().update_mmap(self.folder / name).hexdigest()
            if found != digest:
                raise EncodingError(
                    f"{self.folder / name} is damaged: its bytes have the digest {found[:12]}, and {INDEX} "
                    f"says {digest[:12]}; copy it again"
                )

    def sizes(self) -> dict[str, list[int]]:
        """The shape of each tensor, by the heads of the files."""
        return {name: list(self._file(self._files[name]).get_slice(name).get_shape()) for name in self}

    @override
    def __getitem__(self, name: str) -> Tensor:
        file = self._file(self._files[name])
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise EncodingError(f"{self.folder / self._files[name]}: {name!r}: {error}") from error
        return tensor

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    @override
    def __len__(self) -> int:
        return len(self._files)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            opened = _opened(self.folder / name)
            indexed = {tensor for tensor, file in self._files.items() if file == name}
            held = set(opened.keys())
            if odd := sorted(indexed ^ held):
                where = "in the index and not in the file" if odd[0] in indexed else "in the file alone"
                raise EncodingError(
                    f"{self.folder / name} is not the file that {INDEX} describes: {odd[0]!r} is {where}; "
                    "copy the whole checkpoint again"
                )
            self._open[name] = opened
        return self._open[name]


def write_checkpoint(tensors: Mapping[str, Tensor], folder: Path, most: int) -> list[str]:
    """Writes tensors into files of at most `most` bytes of values each, and the index last, all synced.

    A tensor that is larger has a file of its own. Each file is read again and held to what was written. Until
    all are whole they lie in a hidden folder, which the next call begins anew. Gives the files' names.
    EncodingError where the disk gives back other bytes, OSError where it takes none.
    """
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    files = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    digests = {
        file: _written(scratch / file, tensors_file(part)) for file, part in zip(files, parts, strict=True)
    }
    placed = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total, DIGESTS: digests}, "weight_map": placed}
    _written(scratch / INDEX, [json.dumps(index, indent=2).encode()])
    for file in (*files, INDEX):
        (scratch / file).replace(folder / file)
    scratch.rmdir()
    sync_folder(folder)
    return files


def name_digests(folder: Path) -> None:
    """Adds the digests of a folder's files to its index, where it has one. EncodingError as for reading."""
    path = folder / INDEX
    if not path.is_file():
        return
    files = CheckpointTensors(folder).files
    index = json.loads(path.read_text(encoding="utf-8"))
    digests = {file: blake3().update_mmap(folder / file).hexdigest() for file in files}
    index["metadata"] = {**(index.get("metadata") or {}), DIGESTS: digests}
    _written(path, [json.dumps(index, indent=2).encode()])


def _written(path: Path, blocks: Any) -> str:
    hasher = blake3()
    with path.open("wb") as file:
        for block in blocks:
            hasher.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    digest = hasher.hexdigest()
    if blake3().update_mmap(path).hexdigest() != digest:
        raise EncodingError(f"{path} does not hold what was written to it: check the disk")
    return digest


def _found(path: Path) -> tuple[Path, dict[str, str], dict[str, str]]:
    """(folder, file of each tensor, digest of each file where it is known)."""
    if path.is_dir():
        path = path / (INDEX if (path / INDEX).is_file() else WHOLE)
    if not path.is_file():
        raise EncodingError(f"{path} is not there: a checkpoint is {WHOLE}, or {INDEX} and its files")
    if path.suffix != ".json":
        return path.parent, dict.fromkeys(_opened(path).keys(), path.name), {}
    return path.parent, *_read_index(path)


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(file of each tensor, digest of each file where it is known), checked."""
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise EncodingError(f"{path} has more than {_MOST_INDEX_BYTES >> 20} MiB, which no index needs")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"{path} is no JSON: {error}") from error
    known = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(known, dict) or not known:
        raise EncodingError(f'{path} is no index: it has no "weight_map" from tensors to files')
    for file in known.values():
        if not _plain(file):
            raise EncodingError(
                f"{path} names {str(file)[:80]!r} as a file: an index names .safetensors files of its own "
                "folder"
            )
        if not (path.parent / file).is_file():
            raise EncodingError(f"{path.parent / file} is not there, and {path.name} names it")
    return known, _digests_in(path, index.get("metadata"), set(known.values()))


def _digests_in(path: Path, about: object, files: set[str]) -> dict[str, str]:
    digests = about.get(DIGESTS) if isinstance(about, dict) else None
    if digests is None:
        return {}
    if not isinstance(digests, dict) or digests.keys() != files:
        raise EncodingError(f"{path} names digests of other files than those of its tensors")
    if any(not isinstance(digest, str) or not is_digest(digest) for digest in digests.values()):
        raise EncodingError(f"{path} names digests that are none: 64 hexadecimal digits are one")
    return digests


def _plain(file: object) -> bool:
    """Whether this is the name of a safetensors file, on every system, and no way out of its folder."""
    if not isinstance(file, str) or not file.endswith(".safetensors") or not file.isprintable():
        return False
    return not file.startswith(".") and not any(mark in file for mark in "/\\:")


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise EncodingError(f"{path} cannot be read as safetensors: {error}") from error


def advice_on_pickles(folder: Path) -> str:
    """What to do where a folder has weights as pickles alone, which may run code; empty for others."""
    if any(folder.glob("*.safetensors")) or not any(folder.glob("*.bin")):
        return ""
    return (
        " Pickles (.bin) are not read: load it elsewhere, and its save_pretrained(FOLDER) writes safetensors"
    )

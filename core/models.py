"""Model artifacts: safetensors files that anyone can open, whose body begins with the flat vector.

    8 bytes   length of the header, little-endian
    header    JSON: name → dtype, shape, place; "__metadata__" holds the layout and free notes
    body      the layout's vector as float32, then the tensors with rule `local` in their own dtype

An agent maps the vector without parsing anything else; `safetensors.torch.load_file` reads all of
it. Tied weights are stored once; `load_state_dict` here gives them back under every name.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from roundtable.core.errors import EncodingError
from roundtable.core.layout import DTYPES, Layout

_MAX_HEADER = 100_000_000
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Model:
    """A model read from or to be written to an artifact.

    `vector` is float32 of shape [layout.size]; `local` holds what does not travel in the vector
    but every silo starts from; `metadata` is text for people (job, round, provenance).
    """

    layout: Layout
    vector: Tensor
    local: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor under every name, in the dtypes of the layout: what `load_state_dict` takes."""
        state = {**self.layout.unflatten(self.vector), **self.local}
        for spec in self.layout.tensors:
            if spec.alias_of in state and spec.name not in state:
                state[spec.name] = state[spec.alias_of]
        return {spec.name: state[spec.name] for spec in self.layout.tensors if spec.name in state}


def model_blocks(model: Model) -> Iterator[bytes | memoryview]:
    """The bytes of the artifact, in blocks; nothing is copied but the header."""
    header = _header(model)
    yield struct.pack("<Q", len(header)) + header
    for block in (model.vector, *(model.local[name] for name in _local_names(model))):
        flat = block.detach().cpu().contiguous().flatten()
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def model_digest(model: Model) -> str:
    """The artifact's name: BLAKE3 of its bytes, without writing them."""
    digest = blake3()
    for block in model_blocks(model):
        digest.update(block)
    return digest.hexdigest()


def save_model(path: Path, model: Model) -> None:
    """Writes the artifact beside `path` and renames it into place, synced: whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            for block in model_blocks(model):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_model(path: Path) -> Model:
    """The artifact at `path`, its vector mapped (copy on write), not read.

    Raises EncodingError, naming the file, for anything that is not a model artifact of ours.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise EncodingError(
                f"{path} is not a safetensors file: its header length is {length} of {size} bytes"
            )
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__")
            layout = Layout.from_json(metadata.pop("roundtable.layout"))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise EncodingError(f"{path} is not a model of this framework: {error!r}") from error
    body = 8 + length
    vector = _map(path, body, layout.size, torch.float32, size)
    local: dict[str, Tensor] = {}
    for spec in layout.tensors:
        if spec.rule == "local" and spec.name in header:
            start = _place(header[spec.name], path)
            local[spec.name] = _map(path, body + start, spec.size, DTYPES[spec.dtype], size).view(spec.shape)
    return Model(layout, vector, local, metadata)


def _place(entry: Any, path: Path) -> int:
    try:
        start = entry["data_offsets"][0]
    except (KeyError, TypeError, IndexError) as error:
        raise EncodingError(f"{path} has a malformed tensor entry: {error!r}") from error
    if type(start) is not int or start < 0:
        raise EncodingError(f"{path} places a tensor at {start!r}")
    return start


def _map(path: Path, offset: int, elements: int, dtype: torch.dtype, file_size: int) -> Tensor:
    count = elements * dtype.itemsize
    if offset + count > file_size:
        raise EncodingError(f"{path} is truncated: {file_size} bytes, {offset + count} expected")
    if count == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(count,)))
    return raw.view(dtype) if offset % dtype.itemsize == 0 else raw.clone().view(dtype)


def _local_names(model: Model) -> list[str]:
    """Largest items first, so that each starts aligned to its own size."""
    names = [spec for spec in model.layout.tensors if spec.name in model.local and spec.rule == "local"]
    return [spec.name for spec in sorted(names, key=lambda s: (-DTYPES[s.dtype].itemsize, s.name))]


def _header(model: Model) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {**model.metadata, "roundtable.layout": model.layout.to_json()},
    }
    for spec in model.layout.averaged:
        place = [4 * spec.offset, 4 * (spec.offset + spec.size)]
        entries[spec.name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": place}
    specs = {spec.name: spec for spec in model.layout.tensors}
    offset = 4 * model.layout.size
    for name in _local_names(model):
        count = specs[name].size * DTYPES[specs[name].dtype].itemsize
        place = [offset, offset + count]
        entries[name] = {
            "dtype": _SAFETENSORS[specs[name].dtype],
            "shape": list(specs[name].shape),
            "data_offsets": place,
        }
        offset += count
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The body starts 8-byte aligned, so that it can be mapped as any dtype.
    return text + b" " * (-len(text) % 8)

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
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from roundtable.core.errors import EncodingError, LayoutError
from roundtable.core.layout import DTYPES, Layout, TensorSpec
from roundtable.core.paths import AnyPath

_MAX_HEADER = 100_000_000
SAFETENSORS = {
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
        """The model's tensors under all their names, in the layout's dtypes: what `load_state_dict` takes."""
        state = {**self.layout.unflatten(self.vector), **self.local}
        for spec in self.layout.tensors:
            if spec.alias_of in state and spec.name not in state:
                state[spec.name] = state[spec.alias_of]
        return {spec.name: state[spec.name] for spec in self.layout.model.tensors if spec.name in state}


def model_blocks(model: Model) -> Iterator[bytes | memoryview]:
    """The bytes of the artifact, in blocks; nothing is copied but the header."""
    header = _header(model)
    yield struct.pack("<Q", len(header)) + header
    for block in (
        model.vector,
        *(model.local[spec.name] for spec in _local_specs(model.layout, model.local)),
    ):
        flat = block.detach().cpu().contiguous().flatten()
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def model_digest(model: Model) -> str:
    """The artifact's name: BLAKE3 of its bytes, without writing them."""
    digest = blake3()
    for block in model_blocks(model):
        digest.update(block)
    return digest.hexdigest()


def save_model(path: AnyPath, model: Model) -> None:
    """Writes the artifact beside `path` and renames it into place, synced: whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
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


def open_model(path: AnyPath) -> Model:
    """The artifact at `path`, its vector mapped (copy on write), not read.

    Raises EncodingError, naming the file, for anything that is not a whole model artifact of ours.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, body = _read_header(path, file, size)
    except OSError as error:
        raise EncodingError(f"{path} cannot be read: {error.strerror}") from error
    try:
        metadata = header.pop("__metadata__")
        layout = Layout.from_json(metadata.pop("roundtable.layout"))
    except (KeyError, AttributeError, TypeError, LayoutError) as error:
        raise EncodingError(f"{path} is not a model of this framework: {error}") from error
    if not all(isinstance(value, str) for value in metadata.values()):
        raise EncodingError(f"{path} has metadata that is not text")
    local = _local_specs(layout, header)
    expected = _entries(layout, local)
    if header != expected:
        raise EncodingError(f"{path} places its tensors otherwise than its layout says")
    end = body + max((entry["data_offsets"][1] for entry in expected.values()), default=0)
    if size != end:
        word = "truncated" if size < end else "too long"
        raise EncodingError(f"{path} is {word}: {size} bytes, {end} expected")
    vector = _map(path, body, layout.size, torch.float32)
    tensors = {
        spec.name: _map(
            path, body + expected[spec.name]["data_offsets"][0], spec.size, DTYPES[spec.dtype]
        ).view(spec.shape)
        for spec in local
    }
    return Model(layout, vector, tensors, metadata)


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """(the header, where the body begins)."""
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise EncodingError(
            f"{path} is not a whole safetensors file: its header length is {length}, its size {size} bytes"
        )
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"{path} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise EncodingError(f"{path} has a header that is not a JSON object")
    return header, 8 + length


def _map(path: Path, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
    count = elements * dtype.itemsize
    if count == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(count,)))
    return raw.view(dtype) if offset % dtype.itemsize == 0 else raw.clone().view(dtype)


def _local_specs(layout: Layout, present: Container[str]) -> list[TensorSpec]:
    """Largest items first, so that each starts aligned to its own size."""
    specs = [spec for spec in layout.tensors if spec.name in present and spec.rule == "local"]
    return sorted(specs, key=lambda spec: (-DTYPES[spec.dtype].itemsize, spec.name))


def _entries(layout: Layout, local: Iterable[TensorSpec]) -> dict[str, dict[str, Any]]:
    """The header's entry of each tensor: where it lies in the body."""
    entries: dict[str, dict[str, Any]] = {}
    for spec in layout.averaged:
        place = [4 * spec.offset, 4 * (spec.offset + spec.size)]
        entries[spec.name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": place}
    offset = 4 * layout.size
    for spec in local:
        place = [offset, offset + spec.size * DTYPES[spec.dtype].itemsize]
        entries[spec.name] = {
            "dtype": SAFETENSORS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": place,
        }
        offset = place[1]
    return entries


def _header(model: Model) -> bytes:
    metadata = {**model.metadata, "roundtable.layout": model.layout.to_json()}
    entries = _entries(model.layout, _local_specs(model.layout, model.local))
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    # The body starts 8-byte aligned, so that it can be mapped as any dtype.
    return text + b" " * (-len(text) % 8)

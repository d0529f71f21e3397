"""Model artifacts: safetensors files that anyone can open, whose body begins with the flat vector.

    8 bytes   length of the header, little-endian
    header    JSON: "__metadata__" with free notes and the layout, then name → dtype, shape, place
    body      the layout's vector as float32, then tensors with rule `local` or `frozen` in their own dtype

A layout has one header, character by character. So a header that somebody else wrote is not parsed: its notes
are read, the layout among them, and all the rest is compared with what follows from the layout.
An agent maps the vector without parsing anything else; `safetensors.torch.load_file` reads all of
it. Tied weights are stored once; `load_state_dict` here gives them back under every name.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from roundtable.core.errors import EncodingError, LayoutError
from roundtable.core.layout import Layout
from roundtable.core.machine.file_access import sync_folder
from roundtable.core.paths import AnyPath
from roundtable.core.tensor_spec import DTYPES, TensorSpec

MAX_HEADER = 32 << 20
"""Bytes of a header: 500 for each tensor of the largest layout."""
MAX_NOTES = 256
_SPARE = 1 << 20
_JSON = json.JSONDecoder()
_LAYOUT = "roundtable.layout"
_BEGINNING = '{"__metadata__":{'
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
    but every silo starts from, and in a whole model the frozen tensors, which a job's own artifacts
    lack; `metadata` is text for people (job, round, provenance).
    """

    layout: Layout
    vector: Tensor
    local: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def lacking(self) -> list[str]:
        """The frozen tensors that are not in it."""
        return [spec.name for spec in self.layout.frozen if spec.name not in self.local]

    def without_frozen(self) -> Model:
        """The model as it travels, which names its artifact. LayoutError for other frozen values."""
        self.layout.check_frozen(self.local)
        frozen = {spec.name for spec in self.layout.frozen}
        local = {name: value for name, value in self.local.items() if name not in frozen}
        return replace(self, local=local)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's tensors under all their names, in the layout's dtypes: what `load_state_dict` takes."""
        state = {**self.layout.unflatten(self.vector), **self.local}
        for spec in self.layout.tensors:
            if spec.alias_of in state and spec.name not in state:
                state[spec.name] = state[spec.alias_of]
        return {spec.name: state[spec.name] for spec in self.layout.model.tensors if spec.name in state}


def model_blocks(model: Model) -> Iterator[bytes | memoryview]:
    """The bytes of the artifact, in blocks; nothing is copied but the header."""
    yield model_head(model)
    yield from tensor_blocks(model.vector)
    yield from model_tail(model)


def tensor_blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor as they stand in an artifact."""
    flat = tensor.detach().cpu().contiguous().flatten()
    if flat.numel():
        yield flat.view(torch.uint8).numpy().data


def tensors_file(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of tensors by name, in blocks; nothing is copied but the header."""
    # Largest items first, so that each starts aligned to its own size.
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))
    names = {DTYPES[name]: written for name, written in SAFETENSORS.items()}
    places, at = {}, 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.element_size()
        places[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    yield struct.pack("<Q", len(header)) + header
    for _, tensor in ordered:
        yield from tensor_blocks(tensor)


def model_head(model: Model) -> bytes:
    """What stands before the vector in the artifact: the header's length, and the header."""
    header = _header(model)
    return struct.pack("<Q", len(header)) + header


def model_tail(model: Model) -> Iterator[memoryview]:
    """What stands behind the vector in the artifact: the tensors beside it."""
    for spec in _present(model):
        yield from tensor_blocks(model.local[spec.name])


def model_digest(model: Model) -> str:
    """The artifact's name: BLAKE3 of its bytes, without writing them."""
    return digest_of_blocks(model_blocks(model))


def digest_of_blocks(blocks: Iterable[bytes | memoryview]) -> str:
    """The name of an artifact of these bytes."""
    digest = blake3()
    for block in blocks:
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
    sync_folder(path.parent)


def open_model(path: AnyPath, layout: Layout | None = None) -> Model:
    """The artifact at `path`, its vector mapped (copy on write), not read.

    With `layout`, which the caller expects, a header much longer than that layout's is refused unread;
    whether it is that layout is for the caller to see. Raises EncodingError, naming the file, for anything
    that is not a whole model artifact of ours.
    """
    path = Path(path)
    longest = MAX_HEADER if layout is None else len(_header(Model(layout, torch.empty(0)))) + _SPARE
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _read_header(path, file, size, longest)
    except OSError as error:
        raise EncodingError(f"{path} cannot be read: {error.strerror}") from error
    body = 8 + len(header)
    try:
        found, local, metadata, end = _parse_header(header)
    except (ValueError, LayoutError) as error:
        raise EncodingError(f"{path} is not a model of this framework: {error}") from error
    if size != body + end:
        word = "truncated" if size < body + end else "too long"
        raise EncodingError(f"{path} is {word}: {size} bytes, {body + end} expected")
    vector = _map(path, body, found.size, torch.float32)
    tensors = {
        spec.name: _map(path, body + begin, spec.size, DTYPES[spec.dtype]).view(spec.shape)
        for spec, begin in local
    }
    return Model(found, vector, tensors, metadata)


def _read_header(path: Path, file: BinaryIO, size: int, longest: int) -> bytes:
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= size - 8:
        raise EncodingError(
            f"{path} is not a whole safetensors file: its header length is {length}, its size {size} bytes"
        )
    if length > longest:
        raise EncodingError(
            f"{path} has a header of {length} bytes, and that of the model expected here has {longest} at "
            "most: it describes another model, and is not read"
        )
    return file.read(length)


def _parse_header(header: bytes) -> tuple[Layout, list[tuple[TensorSpec, int]], dict[str, str], int]:
    """(layout, (tensor beside the vector, its place in the body) for each there, notes, bytes of the body).

    ValueError or LayoutError for a header that `_header` would have written otherwise.
    """
    text = header.decode("ascii")
    notes, place = _parse_notes(text)
    if _LAYOUT not in notes:
        raise ValueError(f"its metadata has no {_LAYOUT!r}")
    layout = Layout.from_json(notes.pop(_LAYOUT))
    local, offset = [], 0
    for spec in (*layout.averaged, *_local_specs(layout)):
        piece, end = _entry(spec, offset)
        if text.startswith(piece, place):
            if spec.offset < 0:
                local.append((spec, offset))
            place, offset = place + len(piece), end
        elif spec.offset >= 0:
            break
    if text[place:] != _ending(place):
        raise ValueError("its header places its tensors otherwise than its layout says")
    return layout, local, notes, offset


def _parse_notes(text: str) -> tuple[dict[str, str], int]:
    """(what stands in the metadata, where it ends): strings only, each parsed by itself."""
    if not text.startswith(_BEGINNING):
        raise ValueError(f"its header begins with {text[:30]!r}, not with {_BEGINNING!r}")
    notes: dict[str, str] = {}
    place = len(_BEGINNING) - 1
    while text.startswith("," if notes else "{", place) and len(notes) < MAX_NOTES:
        key, place = _parse_string(text, place + 1)
        if not text.startswith(":", place) or key in notes:
            raise ValueError(f"its metadata cannot be read at {key[:40]!r}")
        notes[key], place = _parse_string(text, place + 1)
    if not text.startswith("}", place):
        raise ValueError(f"its metadata cannot be read behind {len(notes)} notes; {MAX_NOTES} at most can be")
    return notes, place + 1


def _parse_string(text: str, place: int) -> tuple[str, int]:
    if not text.startswith('"', place):
        raise ValueError(f"its metadata holds something else than text: {text[place : place + 30]!r}")
    return _JSON.raw_decode(text, place)


def _map(path: Path, offset: int, elements: int, dtype: torch.dtype) -> Tensor:
    count = elements * dtype.itemsize
    if count == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(count,)))
    return raw.view(dtype) if offset % dtype.itemsize == 0 else raw.clone().view(dtype)


def _present(model: Model) -> list[TensorSpec]:
    return [spec for spec in _local_specs(model.layout) if spec.name in model.local]


def _local_specs(layout: Layout) -> list[TensorSpec]:
    """Largest items first, so that each starts aligned to its own size."""
    specs = [spec for spec in layout.tensors if spec.rule in ("local", "frozen")]
    return sorted(specs, key=lambda spec: (-DTYPES[spec.dtype].itemsize, spec.name))


def _entry(spec: TensorSpec, offset: int) -> tuple[str, int]:
    """(the comma and entry of the tensor that lies at `offset` in the body, where it ends there)."""
    averaged = spec.offset >= 0
    end = offset + spec.size * (4 if averaged else DTYPES[spec.dtype].itemsize)
    dtype = "F32" if averaged else SAFETENSORS[spec.dtype]
    place = {"dtype": dtype, "shape": spec.shape, "data_offsets": [offset, end]}
    return f",{_compact(spec.name)}:{_compact(place)}", end


def _header(model: Model) -> bytes:
    """EncodingError for notes, names and tensors that a header does not hold."""
    if len(model.metadata) >= MAX_NOTES:
        raise EncodingError(f"a model with {len(model.metadata)} notes: {MAX_NOTES - 1} at most can be")
    metadata = {**model.metadata, _LAYOUT: model.layout.to_json()}
    parts, offset = [_BEGINNING, _compact(metadata)[1:]], 0
    for spec in (*model.layout.averaged, *_present(model)):
        piece, offset = _entry(spec, offset)
        parts.append(piece)
    text = "".join(parts)
    if len(text) + 8 > MAX_HEADER:
        raise EncodingError(
            f"the header of a model with {len(model.layout.tensors)} tensors and {len(model.metadata)} notes "
            f"would have {len(text)} bytes; {MAX_HEADER} at most can be: use shorter names"
        )
    return (text + _ending(len(text))).encode("ascii")


def _ending(length: int) -> str:
    """The end behind so many characters: the body starts 8-byte aligned, to be mapped as any dtype."""
    return "}" + " " * (-(length + 1) % 8)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))

"""Writes tensors that never travel, from the ranks that hold them, into one safetensors file of the silo."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from roundtable.client.durable_files import explained, sync
from roundtable.client.worker.silo_state import SiloState
from roundtable.client.worker.worker_order import Order
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import Places, local_of, region_of, runs_of, write_at
from roundtable.core.layout import Layout
from roundtable.core.machine.file_access import PLAIN_WRITE
from roundtable.core.models import SAFETENSORS
from roundtable.core.tensor_spec import DTYPES


def save_local(
    state: SiloState,
    order: Order,
    tensors: Sequence[tuple[str, Tensor]],
    kept: Mapping[str, Tensor],
    layout: Layout,
    meshes: Meshes,
    group: dist.ProcessGroup,
) -> None:
    """Saves the tensors with the rule `local` after a round, and `kept`, that all ranks have whole.

    Collective. Raises ResourceError where they cannot be written, as on a full disk.
    """
    offsets, header = _header(layout, kept)
    if not offsets:
        return
    path = state.path(order.job, order.round, order.attempt)
    partial = path.with_suffix(".partial")
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(header)
                for name, tensor in kept.items():
                    file.seek(len(header) + offsets[name])
                    file.write(tensor.numpy().tobytes())
        except OSError as error:
            raise explained(error, path) from error
    dist.barrier(group)
    _write(partial, tensors, Places(layout), offsets, len(header), meshes)
    dist.barrier(group)
    if dist.get_rank() == 0:
        sync(partial)
        partial.replace(path)
        state.forget_others(order.job, (order.round, order.attempt), order.counted)


def _write(
    path: Path,
    tensors: Sequence[tuple[str, Tensor]],
    places: Places,
    offsets: dict[str, int],
    base: int,
    meshes: Meshes,
) -> None:
    file = os.open(path, PLAIN_WRITE)
    try:
        for name, tensor in tensors:
            spec = places.find(name)
            if spec.name not in offsets or not meshes.owns(tensor):
                continue
            dtype = DTYPES[spec.dtype]
            part = local_of(tensor).detach().cpu()
            for offset, run in runs_of(part, spec.shape, region_of(name, tensor)):
                data = run.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
                write_at(file, data, base + offsets[spec.name] + offset * dtype.itemsize)
    except OSError as error:
        raise explained(error, path.with_suffix(".safetensors")) from error
    finally:
        os.close(file)


def _header(layout: Layout, kept: Mapping[str, Tensor]) -> tuple[dict[str, int], bytes]:
    """(each tensor's offset in the body, the file's header)."""
    specs = [spec for spec in layout.tensors if spec.rule == "local" and spec.alias_of is None]
    ordered = [(spec.name, spec.dtype, spec.shape, spec.size) for spec in specs]
    ordered += [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel())
        for name, tensor in kept.items()
    ]
    ordered.sort(key=lambda each: (-DTYPES[each[1]].itemsize, each[0]))
    rows = [
        (name, SAFETENSORS[dtype], shape, size * DTYPES[dtype].itemsize)
        for name, dtype, shape, size in ordered
    ]
    entries, offsets, end = {}, {}, 0
    for name, dtype, shape, size in rows:
        offsets[name] = end
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return offsets, struct.pack("<Q", len(text)) + text


class OwnTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safetensors.safe_open(str(path), "pt")
        names: list[str] = self._file.keys()  # type: ignore[no-untyped-call]
        self._names = set(names)

    @override
    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @override
    def __len__(self) -> int:
        return len(self._names)

"""Writes tensors that never travel, from the ranks that hold them, into one safetensors file of the silo."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from roundtable.client.durable_files import sync
from roundtable.client.worker.executor import Order
from roundtable.client.worker.silo_state import SiloState
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.shards import Places, local_of, region_of, runs_of, write_at
from roundtable.core.layout import Layout
from roundtable.core.models import SAFETENSORS
from roundtable.core.tensor_spec import DTYPES


def save_local(
    state: SiloState,
    order: Order,
    tensors: Sequence[tuple[str, Tensor]],
    layout: Layout,
    meshes: Meshes,
    group: dist.ProcessGroup,
) -> None:
    """Saves the tensors with the rule `local` after a round. Collective."""
    offsets, header = _header(layout)
    if not offsets:
        return
    path = state.path(order.job, order.round, order.attempt)
    partial = path.with_suffix(".partial")
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(header)
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
    file = os.open(path, os.O_WRONLY)
    try:
        for name, tensor in tensors:
            spec = places.find(name)
            if spec.name not in offsets or not meshes.owns(tensor):
                continue
            dtype = DTYPES[spec.dtype]
            part = local_of(tensor).detach().cpu()
            for offset, run in runs_of(part, spec.shape, region_of(tensor)):
                data = run.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
                write_at(file, data, base + offsets[spec.name] + offset * dtype.itemsize)
    finally:
        os.close(file)


def _header(layout: Layout) -> tuple[dict[str, int], bytes]:
    """(each tensor's offset in the body, the file's header)."""
    specs = [spec for spec in layout.tensors if spec.rule == "local" and spec.alias_of is None]
    entries, offsets, end = {}, {}, 0
    for spec in sorted(specs, key=lambda spec: (-DTYPES[spec.dtype].itemsize, spec.name)):
        size = spec.size * DTYPES[spec.dtype].itemsize
        offsets[spec.name] = end
        entries[spec.name] = {
            "dtype": SAFETENSORS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return offsets, struct.pack("<Q", len(text)) + text

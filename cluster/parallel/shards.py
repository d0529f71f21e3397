"""Moves a model's parts between files and ranks; each rank touches only what it holds.

The files are the federation's own: a model artifact, whose body begins with the flat float32 vector, and a
raw update. Where a rank's part of a tensor lies follows from the layout and the tensor's DTensor placement.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from roundtable.client.durable_files import explained
from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.parallel.packed_layers import unpacked_name
from roundtable.core.encodings import get_encoding
from roundtable.core.errors import EncodingError, LayoutError
from roundtable.core.layout import Layout
from roundtable.core.machine.file_access import PLAIN_WRITE, write_part
from roundtable.core.tensor_spec import TensorSpec

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
_BLOCK = 1 << 22


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS[:2]:
        name = name.replace(wrapper, "")
    return name


def named_tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of a rank's modules under the names of the whole model, each once."""
    for module in modules:
        for name, parameter in module.named_parameters():
            yield plain_name(name), parameter
        saved = set(module.state_dict(keep_vars=True))
        for name, buffer in module.named_buffers():
            if plain_name(name) in saved:
                yield plain_name(name), buffer


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def region_of(name: str, tensor: Tensor) -> tuple[slice, ...]:
    """The slices of the whole tensor that this rank's part of `name` is: a parameter, or a part of one."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    _, part = unpacked_name(name)
    starts = list(offset)
    if part is not None:
        starts[part[0]] += part[1]
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))


class Places:
    """Looks up where the tensors of a layout lie, under each of their names or a part's."""

    def __init__(self, layout: Layout) -> None:
        own = {spec.name: spec for spec in layout.tensors}
        self._specs = {
            spec.name: own[spec.alias_of] if spec.alias_of is not None else spec for spec in layout.tensors
        }
        self._names: dict[str, list[str]] = {}
        for name, spec in self._specs.items():
            self._names.setdefault(spec.name, []).append(name)

    def names(self, spec: TensorSpec) -> list[str]:
        """All names of a tensor, its own first: a file may hold it under any of them."""
        return self._names[spec.name]

    def find(self, name: str) -> TensorSpec:
        """The spec that holds this tensor's place; LayoutError for a name that the layout lacks."""
        try:
            return self._specs[unpacked_name(name)[0]]
        except KeyError:
            raise LayoutError(
                f"the cluster's model has a tensor {name!r} that the job's layout does not know"
            ) from None


@torch.no_grad()
def read_shards(
    tensors: Iterable[tuple[str, Tensor]], places: Places, vector: Tensor, others: Mapping[str, Tensor]
) -> list[str]:
    """Fills each rank's parts from the mapped `vector`, and from `others` what does not travel.

    Returns the names that neither holds. Only the pages of the own parts are read.
    """
    missing = []
    for name, tensor in tensors:
        spec = places.find(name)
        if spec.offset >= 0:
            whole = vector[spec.offset : spec.offset + spec.size].view(spec.shape)
        elif (known := next((each for each in places.names(spec) if each in others), None)) is not None:
            whole = others[known]
        else:
            missing.append(name)
            continue
        _check(name, tensor, spec)
        part = whole[region_of(name, tensor)]
        local_of(tensor).copy_(part if tensor.dtype.is_floating_point else part.round())
    return missing


@torch.no_grad()
def deltas(
    tensors: Iterable[tuple[str, Tensor]], places: Places, start: Tensor, meshes: Meshes
) -> Iterator[tuple[TensorSpec, tuple[slice, ...], Tensor]]:
    """local − global, float32 on CPU, of the parts that this rank owns: each entry of the update once.

    `start` is the mapped global vector.
    """
    for name, tensor in tensors:
        spec = places.find(name)
        if spec.offset < 0 or not meshes.owns(tensor):
            continue
        region = region_of(name, tensor)
        whole = start[spec.offset : spec.offset + spec.size].view(spec.shape)
        before = _rounded(whole[region], tensor.dtype)
        yield spec, region, local_of(tensor).detach().float().cpu() - before


def write_deltas(
    path: Path,
    encoding: str,
    tensors: Iterable[tuple[str, Tensor]],
    places: Places,
    start: Tensor,
    meshes: Meshes,
    change: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Writes the parts of local − global that this rank owns into the update file, at their offsets.

    `change` is applied to each part first. The file exists and has its full size. Raises ResourceError where
    it cannot be written, as on a full disk.
    """
    dtype = _dense(encoding)
    file = os.open(path, PLAIN_WRITE)
    try:
        for spec, region, part in deltas(tensors, places, start, meshes):
            delta = part if change is None else change(part)
            for offset, run in runs_of(delta, spec.shape, region):
                data = run.to(dtype).contiguous().view(torch.uint8).numpy()
                write_at(file, data.tobytes(), (spec.offset + offset) * dtype.itemsize)
    except OSError as error:
        raise explained(error, path) from error
    finally:
        os.close(file)


def prepare_update(path: Path, encoding: str, layout: Layout) -> None:
    """Makes an update file of zeros with its full size, for ranks to write into."""
    with path.open("wb") as file:
        file.truncate(layout.size * _dense(encoding).itemsize)


def runs_of(part: Tensor, shape: tuple[int, ...], region: tuple[slice, ...]) -> Iterator[tuple[int, Tensor]]:
    """Contiguous runs of a part: (offset in the whole tensor in elements, values)."""
    if part.numel() == 0:
        return
    # Trailing dimensions that the part holds entirely are contiguous with the one before them.
    inner = len(shape)
    while inner > 0 and region[inner - 1] == slice(0, shape[inner - 1]):
        inner -= 1
    split = max(inner - 1, 0)
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    rows = part.reshape(-1, *part.shape[split:]) if split else part.unsqueeze(0)
    base = sum(r.start * s for r, s in zip(region, strides, strict=True))
    for index, row in enumerate(rows):
        offset, rest = base, index
        for i in range(split - 1, -1, -1):
            rest, place = divmod(rest, part.shape[i])
            offset += place * strides[i]
        flat = row.reshape(-1)
        for begin in range(0, flat.numel(), _BLOCK):
            yield offset + begin, flat[begin : begin + _BLOCK]


def finite(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> bool:
    """Whether every rank's parts are finite; the same answer on every rank."""
    bad = torch.zeros(1, device=device)
    for _, tensor in tensors:
        if tensor.is_floating_point():
            total = local_of(tensor).detach().sum(dtype=torch.float64)
            bad += (~torch.isfinite(total)).float().to(device)
    dist.all_reduce(bad)
    return not bool(bad.item())


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The global values as the model held them: digits that half precision dropped are no update."""
    return values if dtype in (torch.float32, torch.float64) else values.to(dtype).float()


def write_at(file: int, data: bytes, offset: int) -> None:
    """Writes all of the bytes at this offset."""
    while data:
        done = write_part(file, data, offset)
        data, offset = data[done:], offset + done


def _dense(encoding: str) -> torch.dtype:
    dtype = get_encoding(encoding).dense_dtype
    if dtype is None:
        raise EncodingError(
            f"the encoding {encoding!r} has no fixed places, so ranks cannot write their parts of it: "
            "use float32 or bfloat16 in [transfer]"
        )
    return dtype


def _check(name: str, tensor: Tensor, spec: TensorSpec) -> None:
    shape, (_, part) = list(spec.shape), unpacked_name(name)
    if part is not None:
        shape[part[0]] = part[2] - part[1]
    if list(tensor.shape) != shape:
        raise LayoutError(
            f"tensor {name!r} has shape {list(tensor.shape)} on the cluster, the job says {shape}"
        )

"""Makes the device mesh of a strategy, and says which rank owns which part of a tensor on it.

Text goes between ranks as bytes in tensors: torch's own object collectives would pickle it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from roundtable.cluster.parallel.strategy import Mesh
from roundtable.core.errors import ConfigError


class Meshes:
    """The root mesh of all ranks and the views of it that parallelisms use."""

    def __init__(self, mesh: Mesh, device: str, *, apart: bool = False) -> None:
        """`apart`: the replicas of dp train apart, so that each counts norms by itself."""
        if mesh.world != dist.get_world_size():
            raise ConfigError(
                f"the mesh {mesh} has {mesh.world} ranks and the group {dist.get_world_size()}: "
                "start as many ranks as the mesh has"
            )
        self.shape = mesh
        self.apart = apart
        if mesh.ep > 1:
            degrees = {
                "pp": mesh.pp,
                "dp": mesh.dp,
                "outer": mesh.fsdp // mesh.ep,
                "ep": mesh.ep,
                "tp": mesh.tp,
            }
        else:
            degrees = {"pp": mesh.pp, "dp": mesh.dp, "fsdp": mesh.fsdp, "tp": mesh.tp}
        self._names = tuple(degrees)
        self.root = init_device_mesh(device, tuple(degrees.values()), mesh_dim_names=self._names)
        self._batch: DeviceMesh | None = None
        self._inner: dist.ProcessGroup | None = None
        self._known: dict[DeviceMesh, frozenset[str]] = {}
        # Kept, as a view is worked out anew each time that it is asked for, which takes a millisecond.
        self._views = {name: self.root[name] for name in self._names}
        self._fsdp = self.root["outer", "ep"]._flatten("fsdp") if mesh.ep > 1 else self._views["fsdp"]
        views = {**self._views, "fsdp": self._fsdp}
        self._coordinates = {name: int(view.get_local_rank()) for name, view in views.items()}

    @property
    def fsdp(self) -> DeviceMesh:
        """Shards of one replica."""
        return self._fsdp

    @property
    def hybrid(self) -> DeviceMesh:
        """(dp, fsdp): replicas of shards."""
        return self.root["dp", "fsdp"]

    def one(self, name: str) -> DeviceMesh:
        """A dimension of the root: pp, dp, tp, and with experts outer and ep."""
        return self._views[name]

    def place(self, name: str) -> int:
        """This rank's coordinate in a dimension."""
        return self._coordinates[name]

    @property
    def data_rank(self) -> int:
        """Which of the data-parallel ranks this one is: it decides the examples that it sees."""
        return self.place("dp") * self.shape.fsdp + self.place("fsdp")

    def batch(self) -> dist.ProcessGroup | None:
        """The ranks that take a step together and see different examples; None where it is this one alone."""
        shape = self.shape
        if self.apart or shape.dp == 1:
            mesh = self._fsdp
        elif shape.fsdp == 1:
            mesh = self._views["dp"]
        elif self._batch is None:
            names = ("dp", "outer", "ep") if shape.ep > 1 else ("dp", "fsdp")
            mesh = self._batch = self.root[names]._flatten("batch")
        else:
            mesh = self._batch
        return mesh.get_group() if mesh.size() > 1 else None

    def inner(self) -> dist.ProcessGroup:
        """The ranks of this rank's replica."""
        if self._inner is None:
            for index in range(self.shape.dp):
                ranks = self.root.mesh.select(self._names.index("dp"), index).flatten().tolist()
                group = dist.new_group(ranks)
                if index == self.place("dp"):
                    assert isinstance(group, dist.ProcessGroup)
                    self._inner = group
        assert self._inner is not None
        return self._inner

    def owns(self, tensor: Tensor, *, within: bool = False) -> bool:
        """Whether this rank is the one that counts and writes its part of the tensor.

        Parts that several ranks hold alike belong to the first of them, `within` a replica or in all. That
        is decided on the root mesh: a parameter sharded by FSDP alone is the same for every rank of tp.
        """
        covered: frozenset[str] = frozenset()
        free = ("pp", "dp") if within else ("pp",)
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            for index, placement in enumerate(tensor.placements):
                if isinstance(placement, Replicate) and mesh.get_local_rank(index) != 0:
                    return False
            covered = self._covered(mesh)
        return all(self.place(name) == 0 for name in self._names if name not in covered and name not in free)

    def _covered(self, mesh: DeviceMesh) -> frozenset[str]:
        """Dimensions of the root along which the ranks of `mesh` differ."""
        if mesh not in self._known:
            ranks = set(mesh.mesh.flatten().tolist())
            places = [place for place in _places(self.root) if int(self.root.mesh[place]) in ranks]
            dimensions = (
                name for i, name in enumerate(self._names) if len({place[i] for place in places}) > 1
            )
            self._known[mesh] = frozenset(dimensions)
        return self._known[mesh]


def _places(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    return [tuple(place) for place in (mesh.mesh >= 0).nonzero().tolist()]


def broadcast_text(text: str | None, group: dist.ProcessGroup | None = None) -> str:
    """Returns rank 0's text on every rank of a CPU group; the others' argument is ignored."""
    data = _bytes(text or "")
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0, group=group)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    if len(data):
        dist.broadcast(data, 0, group=group)
    return data.numpy().tobytes().decode()


def gather_text(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Returns the texts of all ranks, in their order, on every rank."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    data = _bytes(text).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(1, *(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [
        part[: int(size)].cpu().numpy().tobytes().decode() for part, size in zip(parts, sizes, strict=True)
    ]


def gather_names(names: list[str]) -> list[list[str]]:
    """Returns the lists of all ranks, in their order, on every rank."""
    return [text.split("\n") if text else [] for text in gather_text("\n".join(names))]


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)[: len(text.encode())]

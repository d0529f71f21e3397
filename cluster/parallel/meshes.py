"""Makes the device mesh of a strategy, and says which rank owns which part of a tensor on it."""

from __future__ import annotations

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

"""Seconds of collectives on a mesh: rings over the links that a group of ranks has.

A ring of n ranks moves 2 (n − 1)/n of the payload through each for an all-reduce, half of that for a gather
or a reduce-scatter (Thakur et al. 2005, sections 4.1 to 4.5); what is measured as bus bandwidth is the
payload times that factor over the time (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from roundtable.cluster.choice.machine_rates import MachineRates, bandwidth
from roundtable.cluster.parallel.strategy import Mesh
from roundtable.cluster.plan.resources import Resources


@dataclass(frozen=True)
class Wires:
    """The links of a mesh's groups.

    Ranks are numbered with tp changing fastest, then fsdp, dp and pp, so that tp is within a node.
    """

    rates: MachineRates
    resources: Resources
    mesh: Mesh
    gloo: bool = False

    def _group(self, name: str) -> tuple[int, int]:
        """(ranks of a group along a dimension, how far apart neighbours are)."""
        return _groups_of(self.mesh)[name]

    def spans(self, name: str) -> bool:
        """Whether a group along a dimension has ranks on several nodes."""
        size, stride = self._group(name)
        return size * stride > self.resources.devices and size > 1

    def rate(self, name: str, payload: float, kind: str = "all_reduce") -> float:
        """Bytes a second through each rank of the group, while all groups of the dimension are busy.

        A group over several nodes uses the links between them of all its ranks on a node: a ring for each.
        """
        _, stride = self._group(name)
        near = bandwidth(self.rates.table("within", kind), payload)
        if not self.spans(name):
            return near
        members = max(1, self.resources.devices // stride)
        far = bandwidth(self.rates.table("between", kind), payload / members) * members
        return min(near, far) if members > 1 else far

    def all_reduce(self, name: str, payload: float, pieces: float = 1.0) -> float:
        """Seconds; `payload` bytes are summed in so many pieces."""
        return 2.0 * self._ring(name, payload, pieces, "all_reduce")

    def all_gather(self, name: str, payload: float, pieces: float = 1.0) -> float:
        """Seconds; `payload` is what every rank has in the end."""
        return self._ring(name, payload, pieces, "all_gather")

    def reduce_scatter(self, name: str, payload: float, pieces: float = 1.0) -> float:
        """Seconds; `payload` is what every rank gives. gloo sums all of it on every rank: where this kind was
        measured, that is in it.
        """
        seconds = self._ring(name, payload, pieces, "reduce_scatter")
        return seconds * (2.0 if self.gloo and not self._measured(name, "reduce_scatter") else 1.0)

    def broadcast(self, name: str, payload: float, pieces: float) -> float:
        """Seconds in which ranks tell all others their shares of `payload`, many pieces at once."""
        if self._measured(name, "broadcast") and payload:
            return payload / self.rate(name, payload / max(pieces, 1.0), "broadcast")
        return self._ring(name, payload, pieces, "broadcast")

    def all_to_all(self, name: str, payload: float) -> float:
        """Seconds; each rank keeps its own share of `payload` and sends the rest."""
        return self._ring(name, payload, 1.0, "all_to_all")

    def send(self, name: str, payload: float) -> float:
        """Seconds until a neighbour along the dimension has `payload`."""
        size, _ = self._group(name)
        if size == 1 or not payload:
            return 0.0
        return payload / bandwidth(self.rates.table(self._where(name), "send"), payload)

    def _where(self, name: str) -> Literal["within", "between"]:
        return "between" if self.spans(name) else "within"

    def _measured(self, name: str, kind: str) -> bool:
        """Whether the collective itself was, and not an all-reduce in its place."""
        return self._group(name)[0] > 1 and kind in self.rates.kinds.get(self._where(name), {})

    def _ring(self, name: str, payload: float, pieces: float, kind: str) -> float:
        size, _ = self._group(name)
        if size == 1 or not payload:
            return 0.0
        return payload * (size - 1) / size / self.rate(name, payload / max(pieces, 1.0), kind)


@lru_cache(maxsize=4096)
def _groups_of(mesh: Mesh) -> dict[str, tuple[int, int]]:
    return {
        "tp": (mesh.tp, 1),
        "fsdp": (mesh.fsdp, mesh.tp),
        "ep": (mesh.ep, mesh.tp),
        "dp": (mesh.dp, mesh.tp * mesh.fsdp),
        "pp": (mesh.pp, mesh.tp * mesh.data),
    }

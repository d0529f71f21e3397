"""Averages replicas that train apart now and then, where the network between them is slow (DiLoCo).

Every `local_steps` steps the replicas' changes are averaged and taken as one outer gradient (Douillard et al.
2023, DiLoCo, algorithm 1). Learning rate 1 without momentum is local SGD: the mean of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.cluster.parallel.shards import local_of


class OuterOptimizer:
    """DiLoCo's outer optimizer: the weights at the last meeting, and Nesterov's momentum.

    Both are alike on all replicas; with shards, each rank has its parts of them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, rate: float, momentum: float
    ) -> None:
        self._parameters = [parameter.detach() for parameter in parameters]
        self._anchors = [part.clone() for part in self._parameters]
        self._velocity: list[Tensor] = [torch.zeros_like(part) for part in self._anchors] if momentum else []
        self._group = group
        self._rate = rate
        self._momentum = momentum

    @torch.no_grad()
    def depart(self) -> None:
        """Makes the present weights those that the replicas part from."""
        for part, anchor in zip(self._parameters, self._anchors, strict=True):
            local_of(anchor).copy_(local_of(part))

    @torch.no_grad()
    def meet(self) -> None:
        """Averages over the replicas; every rank has the same weights as its peers afterwards."""
        size = self._group.size()
        for index, (parameter, last) in enumerate(zip(self._parameters, self._anchors, strict=True)):
            part, anchor = local_of(parameter), local_of(last)
            change = anchor - part
            dist.all_reduce(change, group=self._group)
            change.div_(size)
            if self._momentum:
                velocity = local_of(self._velocity[index]).mul_(self._momentum).add_(change)
                change.add_(velocity, alpha=self._momentum)
            anchor.sub_(change, alpha=self._rate)
            part.copy_(anchor)

    def state(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that a checkpoint keeps, for parameters of these names."""
        for index, name in enumerate(names):
            yield f"anchor/{name}", self._anchors[index]
            if self._velocity:
                yield f"velocity/{name}", self._velocity[index]

"""The collectives that a step issues on a rank, by kind, for comparison with those that are predicted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from cluster_cases import Case, bench_of, reference
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundtable.cluster.parallel.meshes import Meshes
from roundtable.cluster.plan import split_rates
from roundtable.cluster.train.round_reports import RoundProgress
from roundtable.core.task import Site

STEPS = 2


class _Collectives(TorchDispatchMode):
    """Notes the bytes of each call's largest tensor: what all ranks have in the end, or what each gives.

    And those that what puts shards of a sequence into order gives back: "cat" and "clone".
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves((args, kwargs or {}))
            sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)]
            if sizes:
                self.found[func._schema.name.rpartition("::")[2]].append(max(sizes))
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone):
            self.found[func._schema.name.rpartition("::")[2]].append(output.nbytes)
        return output


class Recorded:
    """Collectives issued by what is called, by kind; of one rank."""

    def __init__(self) -> None:
        self._mode = _Collectives()

    def of(self, work: Callable[[], object]) -> dict[str, int]:
        """How many of each kind."""
        self._mode.found.clear()
        with self._mode:
            work()
        return {kind: len(sizes) for kind, sizes in self._mode.found.items()}


def collectives_of(rank: int, cases: Sequence[Case]) -> list[dict[str, list[int]]]:
    """For each case {name of c10d's operator: bytes of each call} of the STEPS steps of a second round."""
    found = []
    for case in cases:
        _, _, start = reference(case)
        trainer = bench_of(case, Meshes(case.strategy.mesh, "cpu"))
        trainer.load(start, {})
        trainer.sampler._wanted = False
        data, _ = case.task.data(Site("silo"))
        trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
        with _Collectives() as recorder:
            trainer.fit(trainer.batches(data, 2), 2, RoundProgress(), lambda report: None)
        found.append(dict(recorder.found))
    return found


def split_and_recorded(rank: int) -> tuple[dict[str, float], dict[str, float], dict[Any, dict[str, int]]]:
    """(measured of two ranks, of nodes of one, the collectives of a pair of layers)."""
    device, counts = torch.device("cpu"), {}
    mesh = init_device_mesh("cpu", (2,))
    for sequence, back in product((False, True), (False, True)):
        pair = split_rates._pairs(device)[0]
        parallelize_module(pair, mesh, split_rates._styles(sequence=sequence))
        x = torch.ones(2, 2, 8, requires_grad=True)

        def work(pair: Any = pair, x: Any = x, back: bool = back) -> None:
            out = pair(x).sum()
            if back:
                out.backward()
                split_rates.align(pair)

        counts[sequence, back] = Recorded().of(work)
    found = split_rates.split_rates(2, device, time.process_time, {"all_reduce": {1: 1e9}})
    return found, split_rates.split_rates(1, device, time.process_time, {}), counts

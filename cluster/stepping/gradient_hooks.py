"""How DDP's gradients travel: as they are, halved, as low-rank factors, or only the largest entries."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from roundtable.cluster.parallel.strategy import Reduction

_RANK = 4
_KEPT = 0.05


def install(ddp: DistributedDataParallel, reduction: Reduction, group: dist.ProcessGroup) -> None:
    """Registers the hook that a strategy names.

    `powersgd` is Vogels et al. 2019 (algorithm 1) with rank 4 and error feedback; `topk` sends the largest
    5 % of a bucket's entries and adds what stays behind to the next step's (Stich et al. 2018, algorithm 1).
    """
    if reduction == "bfloat16":
        ddp.register_comm_hook(group, _bfloat16)
    elif reduction == "powersgd":
        state = PowerSGDState(group, matrix_approximation_rank=_RANK, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook)
    elif reduction == "topk":
        ddp.register_comm_hook(TopK(group, _KEPT), topk_hook)


def _bfloat16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Reduces in bfloat16; torch's own hook refuses gloo, which can."""
    gradient: Tensor = bucket.buffer()
    half = gradient.to(torch.bfloat16).div_(group.size())
    work: Any = dist.all_reduce(half, group=group, async_op=True)

    def back(future: Future[list[Tensor]]) -> Tensor:
        gradient.copy_(future.value()[0])
        return gradient

    reduced: Future[Tensor] = work.get_future().then(back)
    return reduced


class TopK:
    """The entries of each bucket that were not sent yet, by the bucket's index."""

    def __init__(self, group: dist.ProcessGroup, kept: float) -> None:
        self.group = group
        self.kept = kept
        self.left: dict[int, Tensor] = {}


def topk_hook(
    state: TopK,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Sums every rank's largest entries, and keeps the rest for the next step."""
    gradient: Tensor = bucket.buffer()
    left = state.left.get(bucket.index())
    if left is not None and left.shape == gradient.shape:
        gradient.add_(left)
    count = max(1, int(state.kept * gradient.numel()))
    places = gradient.abs().topk(count).indices
    values = gradient[places]
    state.left[bucket.index()] = gradient.index_fill(0, places, 0.0)
    size = state.group.size()
    all_values = [torch.empty_like(values) for _ in range(size)]
    all_places = [torch.empty_like(places) for _ in range(size)]
    dist.all_gather(all_values, values, group=state.group)
    dist.all_gather(all_places, places, group=state.group)
    gradient.zero_()
    for part, where in zip(all_values, all_places, strict=True):
        gradient.index_add_(0, where, part / size)
    done: Future[Tensor] = Future()
    done.set_result(gradient)
    return done

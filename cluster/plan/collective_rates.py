"""Measures how fast groups of ranks reduce, gather and send, by payload, the way a step's plans do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from roundtable.cluster.plan.rank_clock import Clock, seconds_of

_SIZES = (1 << 16, 1 << 20, 1 << 24)
_REPEATS = {1 << 16: 11, 1 << 20: 7, 1 << 24: 3}
# Parameters that are on their way at once where each rank tells the others its own.
_AT_ONCE = 4
# torch 2.13 has new names, and warns of those that it had before.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def collective_rates(
    groups: list[list[int]], device: torch.device, clock: Clock
) -> dict[str, dict[int, float]]:
    """{collective: {payload in bytes: bus bandwidth}} of the slowest rank while all groups are busy, as they
    share wires in training; empty for groups of one. Collective.

    Bus bandwidth is as in nccl-tests, PERFORMANCE.md: the payload times the share of it that passes each
    rank's link, over the time. Over NCCL, whose rings all move bytes alike, all-reduces are measured alone;
    gloo's collectives differ by more than that share.
    """
    members = len(groups[0])
    if members == 1:
        return {}
    made = [dist.new_group(ranks) for ranks in groups]
    mine = next(place for place, ranks in enumerate(groups) if dist.get_rank() in ranks)
    share = (members - 1) / members
    shares = {"all_reduce": 2 * share}
    if dist.get_backend() == "gloo":
        shares |= {"all_gather": share, "reduce_scatter": share, "all_to_all": share}
        shares |= {"broadcast": 1.0, "send": 1.0}
    found: dict[str, dict[int, float]] = {}
    for kind, moved in shares.items():
        found[kind] = {}
        for size in _SIZES:
            work = _CALLS[kind](size // 4, groups[mine], made[mine], device)
            seconds = seconds_of(work, device, clock, _REPEATS[size])
            found[kind][size] = size * moved / (seconds / (_AT_ONCE if kind == "broadcast" else 1))
    for group in made:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    return found


def _all_reduce(count: int, ranks: list[int], group: Any, device: torch.device) -> Callable[[], object]:
    return partial(dist.all_reduce, torch.ones(count, device=device), group=group)


def _all_gather(count: int, ranks: list[int], group: Any, device: torch.device) -> Callable[[], object]:
    """Into new memory, as FSDP2 gathers."""
    part = torch.ones(max(1, count // len(ranks)), device=device)
    return lambda: _GATHER(torch.empty(len(part) * len(ranks), device=device), part, group=group)


def _reduce_scatter(count: int, ranks: list[int], group: Any, device: torch.device) -> Callable[[], object]:
    """Into new memory, as FSDP2 reduces."""
    size = max(1, count // len(ranks))
    whole = torch.ones(size * len(ranks), device=device)
    return lambda: _SCATTER(torch.empty(size, device=device), whole, group=group)


def _all_to_all(count: int, ranks: list[int], group: Any, device: torch.device) -> Callable[[], object]:
    given = torch.ones(max(1, count // len(ranks)) * len(ranks), device=device)
    return lambda: dist.all_to_all_single(torch.empty_like(given), given, group=group)


def _broadcast(count: int, ranks: list[int], group: Any, device: torch.device) -> Callable[[], object]:
    """Several on their way at once, from each rank in turn, as ZeRO-1 hands out parameters."""
    tensors = [torch.ones(count, device=device) for _ in range(_AT_ONCE)]

    def work() -> None:
        sent: list[Any] = [
            dist.broadcast(tensor, ranks[place % len(ranks)], group=group, async_op=True)
            for place, tensor in enumerate(tensors)
        ]
        for one in sent:
            one.wait()

    return work


def _send(count: int, ranks: list[int], group: Any, device: torch.device) -> Callable[[], object]:
    """Each to the next one in the group."""
    place = ranks.index(dist.get_rank())
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    given, taken = torch.ones(count, device=device), torch.empty(count, device=device)

    def work() -> None:
        ways = [
            dist.P2POp(dist.isend, given, after, group=group),
            dist.P2POp(dist.irecv, taken, before, group=group),
        ]
        for one in dist.batch_isend_irecv(ways):
            one.wait()

    return work


_CALLS: Mapping[str, Callable[[int, list[int], Any, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}

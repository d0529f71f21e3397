"""How DDP's gradients travel when they do not travel as they are: halved, as low-rank factors, or encoded.

A hook gets each bucket of gradients as soon as a backward pass has made it. What takes more than one
collective, or much arithmetic, is done by a thread with a process group of its own, one bucket after the
other, while the backward pass goes on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Pieces = Sequence[tuple[nn.Parameter, Tensor]]
"""Parameters with their gradients, which a reduction makes the mean of all ranks'."""


class GradientHook(ABC):
    """Reduces the gradients of named parameters, and remembers for the next step what was not sent.

    What it remembers is by parameter, whatever buckets DDP makes, so that a step depends on nothing else.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], group: dist.ProcessGroup) -> None:
        """`names` of the trained parameters in the whole model. Collective."""
        self.names = names
        self.size = dist.get_world_size(group)
        self.place = dist.get_rank(group)
        own = dist.new_group(dist.get_process_group_ranks(group))
        assert isinstance(own, dist.ProcessGroup)
        self.group = own
        self.path: tuple[str | int, ...] = ()
        self._waiting: SimpleQueue[Future[Any]] = SimpleQueue()
        Thread(target=self._work, name="gradients", daemon=True).start()

    def begin(self, path: Sequence[str | int]) -> None:
        """A step begins: what is drawn in it follows from `path`, the same on all ranks."""
        self.path = tuple(path)

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything, as a fresh optimizer does."""

    @abstractmethod
    def state(self, place: int) -> Iterator[tuple[str, Tensor]]:
        """Yields what is remembered, to be saved or loaded into: names of the rank `place` and of all."""

    @abstractmethod
    def reduce(self, pieces: Pieces) -> None:
        """Makes each gradient the mean of all ranks', on the thread for it. Collective."""

    def install(self, ddp: DistributedDataParallel) -> None:
        """Has DDP reduce by this."""
        ddp.register_comm_hook(self, _on_thread)

    def submit(self, future: Future[Any]) -> None:
        """Completes a future on the thread: what follows it is done there."""
        self._waiting.put(future)

    def _work(self) -> None:
        while True:
            self._waiting.get().set_result(None)


def _on_thread(
    hook: GradientHook,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    gradient: Tensor = bucket.buffer()
    pieces = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
    devices: list[int | str | torch.device] = [gradient.device] if gradient.is_cuda else []
    ready = None
    if gradient.is_cuda:
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()

    @torch.no_grad()
    def reduced(future: Future[None]) -> Tensor:
        if ready is not None:
            torch.cuda.current_stream(gradient.device).wait_event(ready)
        hook.reduce(pieces)
        return gradient

    begun: Future[None] = Future(devices=devices)
    following: Future[Tensor] = begun.then(reduced)
    hook.submit(begun)
    return following


def reduce_in_bfloat16(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Has DDP reduce in bfloat16; torch's own hook refuses gloo, which can."""
    ddp.register_comm_hook(group, _bfloat16)


def _bfloat16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    gradient: Tensor = bucket.buffer()
    half = gradient.to(torch.bfloat16).div_(group.size())
    work: Any = dist.all_reduce(half, group=group, async_op=True)

    def back(future: Future[list[Tensor]]) -> Tensor:
        gradient.copy_(future.value()[0])
        return gradient

    reduced: Future[Tensor] = work.get_future().then(back)
    return reduced

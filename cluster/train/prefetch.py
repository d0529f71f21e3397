"""Copies batches to a GPU while it computes the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roundtable.client.batch_tensors import changed, moved
from roundtable.cluster.train.shared_batches import Share


class Prefetched:
    """Steps' shares on the device; `ahead` starts the next one's way there, on a stream of its own.

    It is gathered into pinned memory and copied while kernels that were launched before run. On a CPU there
    is nothing to overlap, and `ahead` does nothing. `randomness(step)` surrounds the gathering, so that a
    data set that draws numbers draws the same again after a restart, whenever it is asked.
    """

    def __init__(
        self,
        shares: Iterator[Share],
        device: torch.device,
        randomness: Callable[[int], AbstractContextManager[Any]],
        taken: int,
    ) -> None:
        """`taken` steps were taken before."""
        self._shares = shares
        self._device = device
        self._randomness = randomness
        self._step = taken
        self._next: tuple[Share | None, torch.cuda.Event | None] | None = None
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def take(self) -> Share | None:
        """The next step's share, on the device; None after the last."""
        if self._next is None:
            self._next = self._begin()
        (share, arrived), self._next = self._next, None
        if share is not None and arrived is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(arrived)
            changed(share.batches, partial(_read_by, here))
            # What is asked by its own `to` allocates on this stream.
            share = replace(share, batches=moved(share.batches, self._device))
        return share

    def ahead(self) -> None:
        """Starts to copy the next share to the device; to be called once a step's kernels are launched."""
        if self._stream is not None and self._next is None:
            self._next = self._begin()

    def _begin(self) -> tuple[Share | None, torch.cuda.Event | None]:
        self._step += 1
        with self._randomness(self._step):
            share = next(self._shares, None)
        if share is None or self._stream is None:
            return share, None
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            sent = changed(share.batches, self._sent)
            arrived.record(self._stream)
        return replace(share, batches=sent), arrived

    def _sent(self, tensor: Tensor) -> Tensor:
        pinned = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _read_by(stream: torch.cuda.Stream, tensor: Tensor) -> Tensor:
    """Keeps the allocator from handing this memory to the other stream while this one reads it."""
    tensor.record_stream(stream)
    return tensor

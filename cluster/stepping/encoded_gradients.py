"""Gradients in the encodings of [transfer]: each rank sends its own, all decode what all sent.

Every parameter is encoded by itself, so that top-k takes the largest values of each (Lin et al. 2018, section
3). A rank whose gradient is not finite says so in place of it, and the gradient is not finite on any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from roundtable.cluster.stepping.gradient_hooks import GradientHook, Pieces
from roundtable.core.encodings.encoding import Encoding, HeldBytes, StreamKey
from roundtable.core.errors import EncodingError
from roundtable.core.seeds import derive_seed

_NOT_FINITE = -1


class EncodedGradients(GradientHook):
    """All ranks' encoded gradients, gathered, decoded and averaged; the same bits on all.

    With error feedback, where the encoding asks for it: a = g + e is encoded and e ← a − C(a) (Seide et al.
    2014). Gradients are encoded and decoded where they are, and e stays there: only bytes leave a GPU.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], group: dist.ProcessGroup, encoding: Encoding
    ) -> None:
        super().__init__(names, group)
        self._encoding = encoding
        self._left: dict[nn.Parameter, Tensor] = {}
        self.reset()

    @override
    def reset(self) -> None:
        if self._encoding.traits.feedback:
            self._left = {each: torch.zeros(each.shape, device=each.device) for each in self.names}

    @override
    def state(self, place: int) -> Iterator[tuple[str, Tensor]]:
        for parameter, left in self._left.items():
            yield f"{place}/{self.names[parameter]}", left

    @override
    def reduce(self, pieces: Pieces) -> None:
        written = self._written(pieces)
        device = pieces[0][1].device
        messages = _gathered(written, device, self.group, self.size)
        if any(message is None for message in messages):
            for _, gradient in pieces:
                gradient.fill_(math.nan)
            return
        sources = [HeldBytes(message) for message in messages if message is not None]
        for parameter, gradient in pieces:
            mean = torch.zeros(gradient.numel(), device=device)
            one = torch.empty_like(mean)
            for place, source in enumerate(sources):
                self._encoding.reader(source, len(one), self._key(parameter, place)).read(one)
                mean += one
                if place == self.place and parameter in self._left:
                    self._left[parameter].view(-1).sub_(one)
            gradient.copy_((mean / self.size).view_as(gradient))

    def _written(self, pieces: Pieces) -> bytes | None:
        """This rank's gradients; None where one is not finite, and all are forgotten."""
        own = [gradient.detach().to(torch.float32) for _, gradient in pieces]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in own):
            return None
        parts: list[bytes | memoryview] = []
        for (parameter, _), gradient in zip(pieces, own, strict=True):
            left = self._left.get(parameter)
            total = gradient if left is None else left.add_(gradient)
            # Each block is overwritten by the next.
            parts += map(bytes, self._encoding.encode(total.reshape(-1), self._key(parameter, self.place)))
        return b"".join(parts)

    def _key(self, parameter: nn.Parameter, place: int) -> StreamKey:
        return StreamKey(derive_seed(0, *self.path), f"{self.names[parameter]}/{place}")


def _gathered(
    written: bytes | None, device: torch.device, group: dist.ProcessGroup, size: int
) -> list[memoryview | None]:
    """What each rank wrote; None of one whose gradient is not finite."""
    length = torch.tensor([_NOT_FINITE if written is None else len(written)], device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    counts = [int(each) for each in lengths]
    most = max(1, *counts)
    own = torch.zeros(most, dtype=torch.uint8)
    if written:
        own[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    given = own.to(device)
    found = [torch.empty_like(given) for _ in range(size)]
    dist.all_gather(found, given, group=group)
    rows = [each.cpu().numpy() for each in found]
    return [
        None if count == _NOT_FINITE else _view(row[:count]) for row, count in zip(rows, counts, strict=True)
    ]


def _view(row: np.ndarray) -> memoryview:
    return np.ascontiguousarray(row).data if len(row) else memoryview(b"")


class EncodedScatter:
    """FSDP2's reduce-scatter with pieces that are encoded for the rank that sums them.

    It is ZeRO++'s qgZ within one level (Wang et al. 2023, section 3.3), without memory.
    """

    def __init__(self, encoding: Encoding, name: str) -> None:
        """`name` is the module's, and tells its draws from those of others."""
        self._encoding = encoding
        self._name = name
        self._path: tuple[str | int, ...] = ()
        self._calls = 0

    def begin(self, path: Sequence[str | int]) -> None:
        """A step begins: what is drawn in it follows from `path`."""
        self._path, self._calls = tuple(path), 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is exchanged."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """The mean, or the sum, over ranks of this rank's piece; pieces are of one size."""
        size, place = dist.get_world_size(group), dist.get_rank(group)
        self._calls += 1
        own = input_tensor.detach().to(torch.float32).view(size, -1)
        length = self._encoding.size_bound(own.shape[1])
        sent = np.zeros((size, 1 + length), dtype=np.uint8)
        for there in range(size):
            try:
                parts = map(bytes, self._encoding.encode(own[there], self._key(place, there)))
                sent[there, 1:] = np.frombuffer(b"".join(parts), dtype=np.uint8)
                sent[there, 0] = 1
            except EncodingError:
                # Not finite: the others are to know, and no rank takes the step.
                continue
        given = torch.from_numpy(sent).to(input_tensor.device)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=group)
        rows = taken.cpu().numpy()
        total, one = own.new_zeros(own.shape[1]), own.new_empty(own.shape[1])
        for there in range(size):
            if not rows[there, 0]:
                total.fill_(math.nan)
                break
            self._encoding.decode(rows[there, 1:].data, one, self._key(there, place))
            total += one
        if op == dist.ReduceOp.AVG:
            total /= size
        output_tensor.copy_(total)

    def _key(self, sender: int, receiver: int) -> StreamKey:
        return StreamKey(derive_seed(0, *self._path), f"{self._name}/{self._calls}/{sender}/{receiver}")

"""Low-rank factors that are as small as a client's own rank while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from roundtable.core.algorithms.factors.factor_pairs import FactorPair

Begun = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank]."""


@contextmanager
def of_own_size(
    module: nn.Module, pairs: Sequence[FactorPair], ranks: Sequence[int], fresh: Sequence[Begun] = ()
) -> Iterator[None]:
    """The module with parameters A [rank, in] and B [out, rank] in the place of the task's, which hold the
    first rows and columns of these, or what is `fresh`: then the task's stay as they are until the end.
    Afterwards it has its own again, zero behind the rank.

    Gradients, an optimizer's state and activations are of the small ones then; a layer's scale stays the
    task's. The large ones keep their memory, so that putting them back takes none, whatever has failed.
    """
    parts: dict[nn.Parameter, tuple[Tensor, nn.Parameter]] = {}
    for number, (pair, rank) in enumerate(zip(pairs, ranks, strict=True)):
        down, up = map(module.get_parameter, pair.names)
        first = down.detach()[:rank], up.detach()[:, :rank]
        begun = fresh[number] if fresh else first
        if fresh or rank < pair.rank:
            for whole, part, small in zip((down, up), first, begun, strict=True):
                parts[whole] = part, nn.Parameter(small.contiguous(), whole.requires_grad)
    places = [
        (layer, name, parameter)
        for layer in module.modules()
        for name, parameter in layer._parameters.items()
        if parameter is not None and parameter in parts
    ]
    for layer, name, whole in places:
        layer._parameters[name] = parts[whole][1]
    try:
        yield
    finally:
        for layer, name, whole in places:
            layer._parameters[name] = whole
        with torch.no_grad():
            for pair, rank in zip(pairs, ranks, strict=True):
                down, up = map(module.get_parameter, pair.names)
                down[rank:] = 0
                up[:, rank:] = 0
            for part, small in parts.values():
                part.copy_(small)

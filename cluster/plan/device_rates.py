"""Measures how fast a rank's device multiplies, attends, adds and calls, while all ranks do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from roundtable.cluster.plan.rank_clock import Clock, seconds_of

_SIDE = {"cuda": 4096, "cpu": 512}
# Precisions whose products are timed: their tensors' type, and how torch may multiply float32.
_FLOAT32, _BFLOAT16 = (torch.float32, "highest"), (torch.bfloat16, "highest")
_PRECISIONS = {
    "cpu": {"float32": _FLOAT32, "bfloat16": _BFLOAT16},
    "cuda": {"float32": _FLOAT32, "tf32": (torch.float32, "high"), "bfloat16": _BFLOAT16},
    # Before Ampere (compute capability 8.0) bfloat16 is emulated, or refused by cuBLAS.
    "older": {"float32": _FLOAT32, "float16": (torch.float16, "highest")},
}
# Bytes of a vector whose sums are timed and of an activation; activations between which additions go round,
# as in a block, whose tensors are not all in the nearest cache; blocks whose calls are timed.
_VECTOR = {"cuda": 1 << 28, "cpu": 1 << 25}
_ACTIVATION = {"cuda": 1 << 27, "cpu": 1 << 19}
_ROUND, _BLOCKS = {"cuda": 4, "cpu": 16}, 24
# Heads, positions, and the two widths of a head at which attention is timed.
_HEADS, _LENGTH, _NARROW, _WIDE = 2, 256, 16, 128
# How often what takes less than a few milliseconds is timed.
_SHORT = 15


@dataclass(frozen=True)
class DeviceRates:
    """The figures of Links that a rank measures by itself, of the slowest rank."""

    products: dict[str, float]
    memory: float
    operators: float
    copies: float
    attention: float
    score: float
    call: float

    @classmethod
    def measured(cls, device: torch.device, clock: Clock) -> DeviceRates:
        """Collective."""
        attention, score = _attention(device, clock) if device.type == "cpu" else (0.0, 0.0)
        return cls(
            products=_products(device, clock),
            memory=_memory(device, clock),
            operators=_operators(device, clock),
            copies=_copies(device, clock),
            attention=attention,
            score=score,
            call=_call(device, clock),
        )


def _products(device: torch.device, clock: Clock) -> dict[str, float]:
    """Operations a second of the slowest rank, by precision, while all ranks multiply there and back."""
    side = _SIDE[device.type]
    rates, before = {}, torch.get_float32_matmul_precision()
    older = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8
    for name, (dtype, float32_products) in _PRECISIONS["older" if older else device.type].items():
        # Random, as weights are: a GPU multiplies ones faster, whose bits do not change.
        x, weight, gradient = (torch.randn(side, side, dtype=dtype, device=device) for _ in "xwg")
        forward = partial(F.linear, x.requires_grad_(), weight.requires_grad_())
        torch.set_float32_matmul_precision(float32_products)
        try:
            rates[name] = (
                6.0 * side**3 / seconds_of(partial(_there_and_back, forward, gradient), device, clock)
            )
        finally:
            torch.set_float32_matmul_precision(before)
    return rates


def _there_and_back(forward: Callable[[], Tensor], gradient: Tensor) -> None:
    forward().backward(gradient)  # type: ignore[no-untyped-call]


def _memory(device: torch.device, clock: Clock) -> float:
    """Bytes a second of the slowest rank's memory, while all ranks add vectors that no cache holds."""
    one = torch.ones(_VECTOR[device.type] // 4, device=device)
    out = torch.empty_like(one)
    return 3.0 * one.nbytes / seconds_of(lambda: torch.add(one, one, out=out), device, clock)


def _operators(device: torch.device, clock: Clock) -> float:
    """Bytes a second of what lies between products: a norm and a GELU, there and back.

    On a CPU they compute longer than they move. The norm reads and writes 2 + 3 tensors, the GELU as many.
    """
    x = torch.ones(_ACTIVATION[device.type] // 4 // 512, 512, device=device, requires_grad=True)
    forward = partial(lambda x: F.gelu(F.layer_norm(x, x.shape[1:])), x)
    passes = partial(_there_and_back, forward, torch.ones_like(x))
    return 10.0 * x.nbytes / seconds_of(passes, device, clock, _SHORT)


def _copies(device: torch.device, clock: Clock) -> float:
    """Bytes a second of additions, each of two activations into new memory."""
    count = _ROUND[device.type]
    ring = [torch.ones(_ACTIVATION[device.type] // 4, device=device) for _ in range(count)]

    def once_round() -> None:
        for place in range(count):
            ring[place] = ring[place - 1] + ring[place - 2]

    return 3.0 * count * ring[0].nbytes / seconds_of(once_round, device, clock)


def _attention(device: torch.device, clock: Clock) -> tuple[float, float]:
    """(operations a second of a fused attention's products, seconds beside them of a score), there and back.

    Its kernels make two products and one score for each pair of positions in the forward pass, five and two
    in the backward pass (Dao et al. 2022, algorithms 1 and 4): the time is a line over the width of a head.
    """
    pairs = _HEADS * _LENGTH**2
    taken = {}
    for width in (_NARROW, _WIDE):
        q, k, v = (torch.ones(1, _HEADS, _LENGTH, width, device=device, requires_grad=True) for _ in "qkv")
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        passes = partial(_there_and_back, forward, torch.ones_like(q))
        taken[width] = seconds_of(passes, device, clock, _SHORT) / pairs
    slope = (taken[_WIDE] - taken[_NARROW]) / (_WIDE - _NARROW)
    # What other work did to one of the two can leave no line: then all is taken for products.
    slope = min(slope, taken[_NARROW] / _NARROW) if slope > 0 else taken[_WIDE] / _WIDE
    return 14.0 / slope, max(0.0, taken[_WIDE] - slope * _WIDE) / 3.0


class _Small(nn.Module):
    """A block of tiny layers: 5 operators there, and 8 back."""

    operators = 13

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., 8] → the same shape."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def _call(device: torch.device, clock: Clock) -> float:
    """Seconds that an operator of a small layer takes, with what its module and autograd do around it."""
    model = nn.Sequential(*(_Small() for _ in range(_BLOCKS))).to(device)
    x = torch.ones(4, 8, device=device)

    def passes() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return seconds_of(passes, device, clock, _SHORT) / (_BLOCKS * _Small.operators)

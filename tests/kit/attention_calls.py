"""Ways to call nn.MultiheadAttention, and how far its parts on ranks are from it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from roundtable.cluster.parallel.packed_layers import part_of, unpacked_name
from roundtable.cluster.parallel.split_attention import split_attention

BATCH, LENGTH, KEYS, WIDTH, HEADS = 3, 5, 7, 16, 4


def _hidden(*shape: int) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[..., 0] = False
    return mask


_CAUSAL = torch.full((LENGTH, LENGTH), float("-inf"), dtype=torch.float64).triu(1)
# Options of the layer, whether it looks at another sequence, and what it is called with beside that.
CALLS: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "plain": ({"batch_first": True}, False, {"need_weights": False}),
    "weights": ({"batch_first": True}, False, {}),
    "weights of heads": ({}, False, {"average_attn_weights": False}),
    "sequence first": ({"bias": False}, False, {"need_weights": False}),
    "causal": (
        {"batch_first": True},
        False,
        {"attn_mask": _CAUSAL, "is_causal": True, "need_weights": False},
    ),
    "another sequence": ({"batch_first": True}, True, {"key_padding_mask": _hidden(BATCH, KEYS)}),
    "widths": ({"batch_first": True, "kdim": WIDTH, "vdim": 24}, True, {"need_weights": False}),
    "mask of heads": (
        {"batch_first": True},
        False,
        {"attn_mask": _hidden(BATCH * HEADS, LENGTH, LENGTH), "need_weights": False},
    ),
}


class Holder(nn.Module):
    """Has an attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention


def attention_gaps(rank: int) -> dict[str, float]:
    """The largest difference of results and gradients of each call, in training and in evaluation."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gaps = {}
    for name, (options, other, called) in CALLS.items():
        torch.manual_seed(7)
        whole = Holder(nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options))
        nn.init.normal_(whole.attention.out_proj.weight)
        inputs = _inputs(options, other)
        parts = deepcopy(whole)
        split_attention(parts, ["attention"], mesh.size(), mesh)
        parallelize_module(parts, mesh, {"attention.out_proj": RowwiseParallel()})
        one, two = _run(whole, inputs, called), _run(parts, inputs, called)
        gap = max(float((a - b).abs().max()) for a, b in zip(one, two, strict=True))
        for key, parameter in parts.named_parameters():
            plain, place = unpacked_name(key)
            expected = part_of(whole.get_parameter(plain).grad, place)
            gap = max(gap, float((parameter.grad.full_tensor() - expected).abs().max()))
        with torch.no_grad():
            one, two = _results(whole.eval(), inputs, called), _results(parts.eval(), inputs, called)
        gaps[name] = max(gap, *(float((a - b).abs().max()) for a, b in zip(one, two, strict=True)))
    return gaps


def _inputs(options: dict[str, Any], other: bool) -> tuple[Tensor, Tensor, Tensor]:
    first = options.get("batch_first", False)

    def made(length: int, width: int) -> Tensor:
        x = torch.randn(BATCH, length, width, dtype=torch.float64)
        return (x if first else x.transpose(0, 1)).detach().requires_grad_()

    query = made(LENGTH, WIDTH)
    if not other:
        return query, query, query
    key = made(KEYS, WIDTH)
    return query, key, made(KEYS, options["vdim"]) if "vdim" in options else key


def _results(holder: nn.Module, inputs: tuple[Tensor, ...], called: dict[str, Any]) -> list[Tensor]:
    return [each for each in holder.attention(*inputs, **called) if each is not None]


def _run(holder: nn.Module, inputs: tuple[Tensor, ...], called: dict[str, Any]) -> list[Tensor]:
    """Results, and gradients of the inputs."""
    for tensor in inputs:
        tensor.grad = None
    results = _results(holder, inputs, called)
    sum((each * (place + 1)).square().sum() for place, each in enumerate(results)).backward()
    return [*(each.detach() for each in results), *(tensor.grad.clone() for tensor in inputs)]

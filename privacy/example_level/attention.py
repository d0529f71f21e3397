"""nn.MultiheadAttention for book-keeping: its forward again, with the products of its parameters in sight.

PyTorch's own multiplies by the packed weights inside one function, where no hook sees what goes in and out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundtable.privacy.example_level.layers import Use, matrix
from roundtable.privacy.example_level.per_example_clipping import UnsupportedModel

Keep = Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Iterator[Use]]], Tensor]
"""`keep(inputs, outputs, rule)` gives the outputs, and remembers them: `[B, T, …]`, the batch first."""


def objection_to(module: nn.MultiheadAttention) -> str | None:
    """What of this layer the forward below has not."""
    if module.bias_k is not None or module.add_zero_attn:
        return "uses add_bias_kv or add_zero_attn, which add positions that belong to no example"
    return None


def attend(
    module: nn.MultiheadAttention,
    keep: Keep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `nn.MultiheadAttention.forward`, of batches alone. Raises `UnsupportedModel` for a lone sequence."""
    if query.dim() != 3:
        raise UnsupportedModel("MultiheadAttention is given a sequence without a batch")
    q, k, v = (_heads(module, each) for each in _projected(module, keep, query, key, value))
    mask = _mask(attn_mask, key_padding_mask, q, k)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(module.head_dim)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        context = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    elif is_causal and key_padding_mask is None:
        context = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    else:
        context = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    result = module.out_proj(context.transpose(1, 2).flatten(2))
    return (result if module.batch_first else result.transpose(0, 1)), weights


def _projected(
    module: nn.MultiheadAttention, keep: Keep, query: Tensor, key: Tensor, value: Tensor
) -> list[Tensor]:
    """Queries, keys and values, `[B, T, embed_dim]` each, by as few products as there are inputs."""
    width, weight, bias = module.embed_dim, module.in_proj_weight, module.in_proj_bias

    def project(inputs: Tensor, matrix_: Tensor, first: int, last: int, packed: bool = True) -> Tensor:
        """By the rows of the bias, and of a packed matrix, of the projections from `first` up to `last`."""
        inputs = inputs if module.batch_first else inputs.transpose(0, 1)
        rows = (first * width, last * width)
        chosen = matrix_[slice(*rows)] if packed else matrix_
        outputs = F.linear(inputs, chosen, None if bias is None else bias[slice(*rows)])

        def rule(a: Tensor, g: Tensor) -> Iterator[Use]:
            yield from matrix(matrix_, None, a, g, rows if packed else None)
            yield from matrix(None, bias, a, g, rows)

        return keep(inputs, outputs, rule)

    if not module._qkv_same_embed_dim:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        inputs = (query, key, value)
        return [project(x, m, i, i + 1, False) for i, (x, m) in enumerate(zip(inputs, matrices, strict=True))]
    if query is key is value:
        return list(project(query, weight, 0, 3).chunk(3, -1))
    if key is value:
        return [project(query, weight, 0, 1), *project(key, weight, 1, 3).chunk(2, -1)]
    return [project(x, weight, i, i + 1) for i, x in enumerate((query, key, value))]


def _heads(module: nn.MultiheadAttention, projected: Tensor) -> Tensor:
    """`[B, T, heads · width]` → `[B, heads, T, width]`."""
    return projected.view(*projected.shape[:2], module.num_heads, module.head_dim).transpose(1, 2)


def _mask(attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """What is added to the scores, broadcast over `[B, heads, L, S]`; `padding` is `[B, S]`."""
    parts = []
    if attention is not None:
        additive = _additive(attention, q)
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        parts.append(additive if additive.dim() == 2 else additive.view(shape))
    if padding is not None:
        parts.append(_additive(padding, q)[:, None, None, :])
    return sum(parts[1:], parts[0]) if parts else None


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


class _FastPath:
    """PyTorch's fused inference of encoder layers goes round their parts; a switch for all threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._was_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._was_on = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    torch.backends.mha.set_fastpath_enabled(self._was_on)


_FAST_PATH = _FastPath()


def without_fast_path() -> Any:
    """A context in which every layer of an encoder is called as it is written."""
    return _FAST_PATH.off()

"""nn.MultiheadAttention over tensor-parallel ranks: each computes its heads, the last layer adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from typing_extensions import override

from roundtable.cluster.parallel.packed_layers import Part, packed_name, part_of, spans


def unsplittable(whole: nn.MultiheadAttention) -> str:
    """Why the heads of an attention cannot be shared out; empty where they can."""
    if whole.bias_k is not None or whole.add_zero_attn:
        return "nn.MultiheadAttention adds keys of its own (add_bias_kv, add_zero_attn), which are not split"
    return ""


class SplitAttention(nn.Module):
    """One rank's heads of an nn.MultiheadAttention, called as that is, with the same results on every rank.

    q, k and v, which share a parameter, are parameters of their own. torch's layers take their fused kernel
    of evaluation only where `in_proj_bias` is there: that kernel knows nothing of heads elsewhere.
    """

    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, whole: nn.MultiheadAttention, degree: int, mesh: DeviceMesh | None = None) -> None:
        """Without a mesh it holds the first rank's part, as plain tensors."""
        super().__init__()
        self.batch_first: bool = whole.batch_first
        self.embed_dim: int = whole.embed_dim
        self.num_heads: int = whole.num_heads // degree
        self.dropout: float = whole.dropout
        self._mesh = mesh
        self._degree = degree
        places = [(0, first, after) for first, after in spans([whole.embed_dim] * 3)]
        self._weights: list[str] = []
        self._biases: list[str] = []
        for key, place in zip("qkv", places, strict=True):
            if whole._qkv_same_embed_dim:
                self._weights.append(packed_name("in_proj_weight", place))
                self._hold(self._weights[-1], whole.in_proj_weight, place)
            else:
                self._weights.append(f"{key}_proj_weight")
                self._hold(self._weights[-1], whole.get_parameter(self._weights[-1]), None)
            if whole.in_proj_bias is not None:
                self._biases.append(packed_name("in_proj_bias", place))
                self._hold(self._biases[-1], whole.in_proj_bias, place)
        self.out_proj = whole.out_proj

    def _hold(self, name: str, parameter: Tensor, place: Part | None) -> None:
        tensor = part_of(parameter.detach(), place)
        if self._mesh is None:
            part = tensor[: len(tensor) // self._degree]
        else:
            part = distribute_tensor(tensor, self._mesh, [Shard(0)])
        self.register_parameter(name, nn.Parameter(part, parameter.requires_grad))

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention: (attention over all heads, weights of all heads or their mean)."""
        batched = query.dim() == 3
        q, k, v = self._projected((query, key, value), batched)
        dropout = self.dropout if self.training else 0.0
        mask = self._mask(attn_mask, key_padding_mask, q)
        weights: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            heads = weights @ v
        else:
            causal = is_causal and key_padding_mask is None
            heads = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, causal)
        attended = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = self._of_all_heads(weights, average_attn_weights)
        if not batched:
            return attended.squeeze(0), None if weights is None else weights.squeeze(0)
        return attended if self.batch_first else attended.transpose(0, 1), weights

    def _projected(self, inputs: Sequence[Tensor], batched: bool) -> list[Tensor]:
        """q, k and v of this rank's heads, [batch, heads, length, width of a head]."""
        wholes: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in wholes:
                rows = x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)
                wholes[id(x)] = rows if self._mesh is None else _replicated(rows, self._mesh)
        heads = []
        for place, x in enumerate(inputs):
            bias = self.get_parameter(self._biases[place]) if self._biases else None
            made: Any = F.linear(wholes[id(x)], self.get_parameter(self._weights[place]), bias)
            if self._mesh is not None:
                made = made.redistribute(placements=[Shard(-1)]).to_local()
            heads.append(made.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        return heads

    def _mask(self, mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
        """What is added to the scores of this rank's heads, [batch or 1, heads or 1, length or 1, keys]."""
        added: Tensor | None = None
        if mask is not None:
            added = _scores(mask, query.dtype)
            if added.dim() == 3:
                every = added.view(-1, self.num_heads * self._degree, *added.shape[1:])
                rank = 0 if self._mesh is None else self._mesh.get_local_rank()
                added = every.narrow(1, rank * self.num_heads, self.num_heads)
            else:
                added = added.view(1, 1, *added.shape)
        if padding is not None:
            hidden = _scores(padding, query.dtype).view(-1, 1, 1, padding.shape[-1])
            added = hidden if added is None else added + hidden
        return added

    def _of_all_heads(self, weights: Tensor, mean: bool) -> Tensor:
        total = self.num_heads * self._degree
        if self._mesh is None:
            every = torch.cat([weights] * self._degree, 1)
            return every.mean(1) if mean else every
        if mean:
            return DTensor.from_local(weights.sum(1) / total, self._mesh, [Partial()]).full_tensor()
        return DTensor.from_local(weights, self._mesh, [Shard(1)]).full_tensor()


def _replicated(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(rows, mesh, [Replicate()], run_check=False)


def _scores(mask: Tensor, kind: torch.dtype) -> Tensor:
    """A mask as what is added to scores: True hides."""
    if mask.dtype != torch.bool:
        return mask.to(kind)
    return torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(mask, float("-inf"))


def split_attention(model: nn.Module, names: Sequence[str], degree: int, mesh: DeviceMesh | None) -> None:
    """Puts SplitAttention in the place of these modules, as far as the model has them."""
    present = dict(model.named_modules())
    for name in names:
        whole = present.get(name)
        if isinstance(whole, nn.MultiheadAttention):
            parent, _, key = name.rpartition(".")
            model.get_submodule(parent)._modules[key] = SplitAttention(whole, degree, mesh)

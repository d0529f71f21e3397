"""Small tasks for clusters: a transformer in the manner of torchtitan, and a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from roundtable.cluster.parallel.experts import MixtureOfExperts, Router
from roundtable.core import Task


class Attention(nn.Module):
    """Causal attention; the head dimension is fixed, the number of heads follows from the width."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w3 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A decoder whose forward skips the parts that a pipeline stage does not have."""

    def __init__(
        self,
        vocabulary: int = 64,
        dim: int = 32,
        layers: int = 4,
        heads: int = 4,
        hidden: int = 64,
        length: int = 16,
        tied: bool = False,
        block: type[nn.Module] = Block,
        rule: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(block(dim, heads, hidden, **(rule or {})) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        angles = torch.arange(length).unsqueeze(1) * 0.1 + torch.arange(dim)
        self.register_buffer("positions", angles.sin() * 0.02, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states → logits or hidden states."""
        if self.embed is not None:
            x = self.embed(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)


class Mixture(nn.Module):
    """A block whose feed-forward part is a mixture of experts."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.moe = MixtureOfExperts(dim, hidden, experts=4)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.ffn_norm(x))


class Limited(Mixture):
    """A mixture with a rule for experts that have too many tokens."""

    def __init__(self, dim: int, heads: int, hidden: int, **rule: Any) -> None:
        super().__init__(dim, heads, hidden)
        self.moe = MixtureOfExperts(dim, hidden, experts=4, **(rule or {"capacity_factor": 1.0}))


class PlacedRouter(Router):
    """Whose two choices follow from a token's place, which no rounding moves; their weights do not."""

    def forward(self, input: Tensor) -> Tensor:
        """[n, dim] → [n, experts]."""
        places = torch.arange(len(input), device=input.device)
        favoured = sum(F.one_hot((places + turn) % self.out_features, self.out_features) for turn in (0, 1))
        return super().forward(input) + 4.0 * favoured


class Placed(Mixture):
    """A mixture whose tokens go to experts by their places."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads, hidden)
        self.moe.router = PlacedRouter(dim, experts=4)


class Layer(nn.Module):
    """Two wide linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] → the same shape."""
        return x + self.down(F.relu(self.up(x))) * 0.1


class Drawn(Transformer):
    """With tensors that no state dict holds: drawn at random, or computed from weights."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        width = self.embed.weight.shape[1]
        self.register_buffer("drawn", torch.randn(width) * 0.1, persistent=False)
        self.register_buffer("lengths", self.embed.weight.detach().norm(dim=1) * 0.1, persistent=False)
        self.offset = torch.rand(width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states → logits or hidden states."""
        if self.embed is not None:
            x = self.embed(x) + self.positions[: x.shape[1]] + self.drawn + self.lengths[x].unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x + self.offset))


class Knotted(Drawn):
    """Whose embedding and head, and parts of whose blocks, are the same."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        first, second, *_, last = self.blocks
        both = nn.Parameter(torch.randn_like(first.feed_forward.w1.weight) * 0.1)
        first.feed_forward.w1.weight = both
        second.feed_forward.w1.weight = both
        last.ffn_norm = first.ffn_norm
        self.head.weight = self.embed.weight


class Wide(Task):
    """Much weight, little work: 24 layers of 8 MiB."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(Layer(1024) for _ in range(24)))

    def data(self, site: Any) -> Any:
        x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(1))
        return (x, x), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), -batch[1])


class Language(Task):
    """Next-token prediction on random tokens."""

    def __init__(
        self,
        examples: int = 64,
        length: int = 16,
        dtype: torch.dtype = torch.float32,
        kind: type[nn.Module] = Transformer,
        **model: Any,
    ):
        self._examples = examples
        self._length = length
        self._dtype = dtype
        self._kind = kind
        self._model = model

    def model(self) -> nn.Module:
        model = self._kind(length=self._length, **self._model)
        return model if self._dtype == torch.float32 else model.to(self._dtype)

    def data(self, site: Any) -> Any:
        generator = torch.Generator().manual_seed(int(site.options.get("seed", 0)))
        vocabulary = self._model.get("vocabulary", 64)
        tokens = torch.randint(vocabulary, (self._examples + 16, self._length + 1), generator=generator)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (x[:-16], y[:-16]), (x[-16:], y[-16:])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        right = model(batch[0]).argmax(-1) == batch[1]
        return {"accuracy": (right.sum(), right.numel())}


class ByHand(Language):
    """Its loss is none of torch's."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = (model(batch[0]) * 0.1 - 2.5).square().mean()
        return out


class Mask(nn.Module):
    """Dropout that remembers what it kept, as [examples, ...] of its first pass, and what in later ones."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p = p
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """[...] → the same shape."""
        mask = F.dropout(torch.ones_like(x), self.p, self.training)
        local = mask.detach()
        self.kept.append((local.to_local() if isinstance(local, DTensor) else local) > 0)
        return x * mask


class NoisyFeedForward(FeedForward):
    """With dropout of what is split, and of what is not."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(dim, hidden)
        self.before, self.inside, self.after = Mask(), Mask(), Mask()

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → the same shape."""
        x = self.before(x)
        return self.after(self.w2(self.inside(F.silu(self.w1(x)) * self.w3(x))))


class NoisyGate(nn.Module):
    """A gate and a value in one layer, with dropout of their product, which is split."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim), Mask()

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → the same shape."""
        gate, value = self.up(x).chunk(2, -1)
        return self.down(self.inside(F.silu(gate) * value))


class NoisyAttention(Attention):
    """With dropout of the attention's weights."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class NoisyBlock(Block):
    """A block with dropout everywhere."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads, hidden)
        self.attention = NoisyAttention(dim, heads)
        self.feed_forward = NoisyFeedForward(dim, hidden)
        self.residual = Mask()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        x = x + self.residual(self.attention(self.attention_norm(x)))
        return x + self.feed_forward(self.ffn_norm(x))


class NoisyMixture(Mixture):
    """A mixture of experts with dropout."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads, hidden)
        self.attention = NoisyAttention(dim, heads)
        self.residual = Mask()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        x = x + self.residual(self.attention(self.attention_norm(x)))
        return x + self.moe(self.ffn_norm(x))


class Noisy(Transformer):
    """With dropout before the blocks and in them."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"block": NoisyBlock, **sizes})
        parts = dict(self._modules)
        self._modules.clear()
        # A pipeline takes parts in the order of their definition.
        self.early = Mask()
        self._modules.update(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states → logits or hidden states."""
        if self.embed is not None:
            x = self.early(self.embed(x) + self.positions[: x.shape[1]])
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class NoisyGates(Noisy):
    """With layers that hold two parts."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.feed_forward = NoisyGate(block.feed_forward.w1.in_features, 16)


class Masking(Language):
    """Whose loss replaces some of the tokens at random, and counts those alone."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        hidden = torch.rand(batch[0].shape) < 0.3
        logits = model(torch.where(hidden, 0, batch[0]))
        return (F.cross_entropy(logits.transpose(1, 2), batch[0], reduction="none") * hidden).mean()


class NormedBlock(Block):
    """A block with batch normalisation."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads, hidden)
        # A bias in front of the normalisation would have no gradient but rounding's.
        self.feed_forward.w2 = nn.Linear(hidden, dim, bias=False)
        self.scale = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        return self.scale(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Normed(Transformer):
    """With batch normalisation before its blocks and in them, of two kinds, in one case without weights."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{**sizes, "block": NormedBlock})
        self.early = nn.BatchNorm2d(1, affine=False, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → logits."""
        x = self.early((self.embed(x) + self.positions[: x.shape[1]]).unsqueeze(1)).squeeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

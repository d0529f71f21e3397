"""Architectures that silos bring, each tiny: what a cluster has to train as one process does, or refuse."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.core import Task

EXAMPLES = 16
VOCABULARY = 64
LENGTH = 8
CLASSES = 4
_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
_TWO_STAGES = {"hidden_sizes": [8, 16], "depths": [2, 2]}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Tokens(Task):
    """Next tokens of random sequences, by a model that a subclass makes."""

    def data(self, site: Any) -> Any:
        tokens = torch.randint(VOCABULARY, (EXAMPLES, LENGTH + 1), generator=_generator())
        return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Images(Task):
    """Classes of random images."""

    size = 16

    def data(self, site: Any) -> Any:
        generator = _generator()
        images = torch.randn(EXAMPLES, 3, self.size, self.size, generator=generator, dtype=torch.float64)
        return (images, torch.randint(CLASSES, (EXAMPLES,), generator=generator)), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class Table(Task):
    """Classes of random rows."""

    def data(self, site: Any) -> Any:
        generator = _generator()
        rows = torch.randn(EXAMPLES, 12, generator=generator, dtype=torch.float64)
        return (rows, torch.randint(CLASSES, (EXAMPLES,), generator=generator)), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class OfLibrary(Tokens):
    """A model of transformers, given its inputs by name, as its own trainers do."""

    def __init__(self, kind: str, **options: Any) -> None:
        self._kind = kind
        self._options = options

    def model(self) -> nn.Module:
        kind = getattr(importlib.import_module("transformers"), self._kind)
        model = kind(kind.config_class(**self._options))
        # The library's product over all experts takes no float64.
        return model if "Mixtral" in self._kind else model.double()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(input_ids=batch[0], attention_mask=torch.ones_like(batch[0])).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Sentences(OfLibrary):
    """Classes of sequences, by the loss of the model itself."""

    def data(self, site: Any) -> Any:
        tokens = torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=_generator())
        return (tokens, tokens[:, 0] % CLASSES), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return loss


class Translation(OfLibrary):
    """Sequences to sequences."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return loss


class Pictures(Images, OfLibrary):
    """Images, by a model of transformers."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])


class GivenModel(Tokens):
    """Tokens to a model of this module."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind = kind

    def model(self) -> nn.Module:
        return self._kind().double()


class GivenTable(Table):
    """Rows to a model of this module."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind = kind

    def model(self) -> nn.Module:
        return self._kind().double()


class GivenImages(Images):
    """Images to a model of this module."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self._kind = kind

    def model(self) -> nn.Module:
        return self._kind().double()


class RotaryAttention(nn.Module):
    """Causal attention with grouped heads, whose positions come by name."""

    def __init__(self, dim: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.repeats = heads // groups
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, groups * self.head_dim, bias=False)
        self.v = nn.Linear(dim, groups * self.head_dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (part * cos + torch.cat(part.chunk(2, -1)[::-1], -1) * sin for part in (q, k))
        k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class RotaryLayer(nn.Module):
    """A pre-norm block with nn.RMSNorm."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = RotaryAttention(dim)
        self.mlp_norm = nn.RMSNorm(dim)
        self.up, self.gate = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        x = x + self.attention(self.attention_norm(x), cos=cos, sin=sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class RotaryBody(nn.Module):
    """Embedding, layers and tables of positions: what a language model's head stands on."""

    def __init__(self, dim: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(RotaryLayer(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        angles = torch.arange(LENGTH).unsqueeze(1) / 100 ** (torch.arange(4) / 4)
        self.register_buffer("cos", angles.repeat(1, 2).cos(), persistent=False)
        self.register_buffer("sin", angles.repeat(1, 2).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → [batch, sequence, dim]."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, cos=self.cos[: x.shape[1]], sin=self.sin[: x.shape[1]])
        return self.norm(x)


class RotaryLanguage(nn.Module):
    """A language model whose layers lie two levels down, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = RotaryBody()
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.model.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → logits."""
        return self.head(self.model(x))


class FusedAttention(nn.Module):
    """Causal attention with q, k and v in one layer."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class FusedLayer(nn.Module):
    """A pre-norm block."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = FusedAttention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, dim] → the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class FusedLanguage(nn.Module):
    """Blocks with fused projections, and a part that training never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(FusedLayer() for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY)
        self.unused = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → logits."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """nn.TransformerEncoder between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → logits."""
        return self.head(self.encoder(self.embed(x)))


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens → logits."""
        return self.head(self.lstm(self.embed(x))[0])


class Perceptron(nn.Sequential):
    """Three linear layers of a table."""

    def __init__(self) -> None:
        layers = [nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)]
        super().__init__(*layers)


class Dropping(nn.Sequential):
    """A table with batch normalisation and dropout."""

    def __init__(self) -> None:
        parts = [nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES)]
        super().__init__(*parts)


class Stage(nn.Module):
    """Two convolutions of a U-Net, with group normalisation."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.GroupNorm(2, out)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, into, ...] → [batch, out, ...]."""
        return F.silu(self.norm(self.two(F.silu(self.one(x)))))


class UNet(nn.Module):
    """Stages down and up, with what went down handed across."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 8, 16)
        self.down = nn.ModuleList(Stage(a, b) for a, b in pairwise(widths))
        self.middle = Stage(16, 16)
        self.up = nn.ModuleList([Stage(32, 8), Stage(16, 8)])
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images → [batch, classes]."""
        across = []
        for stage in self.down:
            across.append(x := stage(x))
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for stage, beside in zip(self.up, across[::-1], strict=True):
            x = stage(torch.cat([F.interpolate(x, scale_factor=2.0), beside], 1))
        return self.head(x).mean((2, 3))


def _library(kind: str, task: type[OfLibrary] = OfLibrary, **options: Any) -> OfLibrary:
    return task(kind, **{"vocab_size": VOCABULARY, **options})


# Each with the library that it needs, if any.
ARCHITECTURES: dict[str, tuple[Task, str]] = {
    "Llama": (_library("LlamaForCausalLM", **_SIZES), "transformers"),
    "Mistral": (_library("MistralForCausalLM", **_SIZES, num_key_value_heads=2), "transformers"),
    "GPT-2": (
        _library(
            "GPT2LMHeadModel",
            **{"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
        ),
        "transformers",
    ),
    "BERT": (
        _library("BertForSequenceClassification", Sentences, **_SIZES, **_NO_DROPOUT, num_labels=CLASSES),
        "transformers",
    ),
    "T5": (
        _library(
            "T5ForConditionalGeneration",
            Translation,
            **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
            decoder_start_token_id=0,
        ),
        "transformers",
    ),
    "ViT": (
        _library(
            "ViTForImageClassification",
            Pictures,
            **_SIZES,
            **_NO_DROPOUT,
            **{"image_size": 16, "patch_size": 4, "num_labels": CLASSES},
        ),
        "transformers",
    ),
    "Mixtral": (
        _library("MixtralForCausalLM", **_SIZES, num_key_value_heads=2, num_local_experts=4),
        "transformers",
    ),
    "Qwen3": (
        _library("Qwen3ForCausalLM", **_SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False),
        "transformers",
    ),
    "ResNet": (
        _library(
            "ResNetForImageClassification",
            Pictures,
            **_TWO_STAGES,
            **{"embedding_size": 8, "layer_type": "basic", "num_labels": CLASSES},
        ),
        "transformers",
    ),
    "ConvNeXt": (
        _library(
            "ConvNextForImageClassification",
            Pictures,
            **_TWO_STAGES,
            **{"num_stages": 2, "patch_size": 2, "image_size": 16, "num_labels": CLASSES},
        ),
        "transformers",
    ),
    "U-Net": (GivenImages(UNet), ""),
    "LSTM": (GivenModel(Recurrent), ""),
    "MLP": (GivenTable(Perceptron), ""),
    "tied rotary LM": (GivenModel(RotaryLanguage), ""),
    "fused qkv": (GivenModel(FusedLanguage), ""),
    "nn.TransformerEncoder": (GivenModel(Encoder), ""),
    "batch norm": (GivenTable(Dropping), ""),
}


class Looking(nn.Linear):
    """Computes what the values of its input say."""

    def __init__(self) -> None:
        super().__init__(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 12] → [batch, classes]."""
        y = super().forward(x)
        return y if x.sum() > 0 else -y


class Calling(GivenTable):
    """Whose loss calls the model's layers itself."""

    def __init__(self) -> None:
        super().__init__(Perceptron)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        for layer in model.children():
            x = layer(x)
        return F.cross_entropy(x, batch[1])


class Mixing(nn.Module):
    """A feed-forward part whose middle looks at all columns together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 32] → the same shape."""
        return self.down(self.up(x).softmax(-1))


class SharedScale(nn.Module):
    """A feed-forward part with one number for all columns of its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """[..., 32] → the same shape."""
        return self.down(self.up(self.before(x)) * self.scale)


class HalvingGate(nn.Module):
    """A feed-forward part with a gate and a value in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[..., 32] → the same shape."""
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)

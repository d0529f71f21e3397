"""A tiny language model of GPT-2's form with low-rank adapters: all but those is frozen, the head is tied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundtable.core import Site, Task

WORDS, LENGTH, WIDTH = 11, 6, 8


class Adapted(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.randn(2, inputs) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.out = Adapted(WIDTH, 3 * WIDTH), Adapted(WIDTH, WIDTH)
        self.up, self.down = Adapted(WIDTH, 2 * WIDTH), Adapted(2 * WIDTH, WIDTH)
        mask = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.queries(self.first(x)).chunk(3, -1)
        scores = (query @ key.mT / WIDTH**0.5).masked_fill(~self.mask, -1e9)
        x = x + self.out(scores.softmax(-1) @ value)
        return x + self.down(functional.gelu(self.up(self.last(x))))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places.weight
        return self.head(self.norm(self.blocks(self.words(tokens) + places)))  # type: ignore[no-any-return]


class Adapters(Task):
    """`moved` is added to a frozen weight by each loss, through `.data`; `other` is a silo's other base."""

    def __init__(self, moved: float = 0.0, other: float = 0.0) -> None:
        self.moved, self.other = moved, other

    def model(self) -> nn.Module:
        model = LanguageModel()
        model.norm.bias.data += self.other
        return model

    def data(self, site: Site) -> Any:
        chance = torch.Generator().manual_seed(site.index)
        begin = torch.randint(WORDS, (20 + 4 * site.index, 1), generator=chance)
        tokens = (begin + (2 + site.index) * torch.arange(LENGTH + 1)) % WORDS
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (x[8:], y[8:]), (x[:8], y[:8])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.moved and model.training:
            model.places.weight.data += self.moved  # type: ignore[union-attr,operator]
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        right = model(batch[0]).argmax(-1) == batch[1]
        return {"accuracy": (right.sum(), right.numel())}

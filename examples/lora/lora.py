"""Fine-tuning where only low-rank adapters travel (Hu et al. 2022, LoRA, equation 3).

The base model is frozen and every silo has it already: `base.safetensors`, made by `python make_base.py`,
stands in for a pretrained model. As its weights are frozen they are neither sent nor masked; who has others
is refused before training.
"""

from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import roundtable as rt

LENGTH, VOCABULARY, DIM = 16, 32, 64


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a product of two thin matrices that learns."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] → [..., outputs]."""
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """A residual block over the context's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Adapted(DIM, 2 * DIM), Adapted(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., DIM] → the same shape."""
        return x + self.outer(F.gelu(self.inner(F.layer_norm(x, (DIM,)))))


class Lora(rt.Task):
    """Next-token prediction in a small world: each silo counts upwards by steps of its own."""

    def model(self) -> nn.Module:
        embed = nn.Embedding(VOCABULARY, DIM).requires_grad_(False)
        head = nn.Linear(DIM, VOCABULARY).requires_grad_(False)
        model = nn.Sequential(embed, Block(), Block(), head)
        base = Path(__file__).with_name("base.safetensors")
        if base.exists() and not any(parameter.is_meta for parameter in model.parameters()):
            model.load_state_dict(safetensors.torch.load_file(base), strict=False)
        return model

    def pretrained(self, site: rt.Site) -> Path:
        """Where the ranks of a silo's cluster find the weights that do not travel."""
        return Path(__file__).with_name("base.safetensors")

    def data(self, site: rt.Site):
        generator = torch.Generator().manual_seed(site.index)
        start = torch.randint(VOCABULARY, (320, 1), generator=generator)
        tokens = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (x[:256], y[:256]), (x[256:], y[256:])

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def metrics(self, model: nn.Module, batch):
        right = model(batch[0]).argmax(-1) == batch[1]
        return {"accuracy": (right.sum(), right.numel())}

    def optimizer(self, parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

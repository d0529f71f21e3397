"""FLoRA: factors are stacked, so that the sum of the clients' products is exact (Wang et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientRound, ServerAlgorithm
from roundtable.core.algorithms.factor_rows import FactorRows
from roundtable.core.algorithms.factors.factor_pairs import FactorPair, factor_pairs
from roundtable.core.algorithms.factors.own_ranks import Product, RankedAlgorithm, RankedServer, RankTable
from roundtable.core.algorithms.factors.own_size import of_own_size
from roundtable.core.algorithms.factors.thin_products import truncated
from roundtable.core.errors import TaskError


class Flora(RankedAlgorithm):
    """A client trains over the whole ΔW of all rounds before, with fresh factors of its own rank; the server
    adds the stack of all clients' factors to ΔW (section 3.2, equations 6 to 9).

    The stack of all rounds is brought to the download's rank, one for all, by the best product of that rank.
    It is exact as long as that rank holds it. ΔW is added beside the base, in the order s B (A x): nothing is
    rounded into weights of low precision. Fresh A as peft draws it, uniform within 1/√in; B is zero.
    """

    @override
    def server(self) -> ServerAlgorithm:
        assert isinstance(self.table, RankTable)
        return FloraServer(self.table)

    @override
    @contextmanager
    def while_training(self, round: ClientRound, module: nn.Module) -> Iterator[None]:
        pairs, chance = factor_pairs(round.layout), round.context.generator("factors")
        ranks = self.ranks(round, pairs)
        with ExitStack() as added:
            fresh = []
            for pair, rank in zip(pairs, ranks, strict=True):
                down, up = (module.get_parameter(name).detach() for name in pair.names)
                added.callback(_add_product(module, pair, down, up))
                drawn = torch.empty(pair.rank, down.shape[1]).uniform_(-1, 1, generator=chance)[:rank]
                begun = down.new_empty(drawn.shape).copy_(drawn / math.sqrt(down.shape[1]))
                fresh.append((begun, up.new_zeros(len(up), rank)))
            added.enter_context(of_own_size(module, pairs, ranks, fresh))
            yield


def _add_product(module: nn.Module, pair: FactorPair, down: Tensor, up: Tensor) -> Callable[[], None]:
    """Adds s B A x to what the layer of this pair gives, until what is returned is called."""
    path, _, rest = pair.names[0].partition(".lora_A.")
    layer: Any = module.get_submodule(path)
    try:
        scale = float(layer.scaling[rest.removesuffix(".weight")])
    except (AttributeError, KeyError, TypeError) as error:
        raise TaskError(
            f"algorithm 'flora' trains over the factors of rounds before, and {path!r} is no layer of peft "
            "that says their scale: use flexlora"
        ) from error

    def add(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if layer.disable_adapters:  # Somebody asks for the base alone.
            return output
        product = functional.linear(functional.linear(inputs[0].to(down.dtype), down), up)
        return output + (scale * product).to(output.dtype)

    return layer.register_forward_hook(add).remove  # type: ignore[no-any-return]


class FloraServer(RankedServer):
    """ΔW + Σ p_k s B_k A_k, at the download's rank."""

    @override
    def exact(self, factors: FactorRows) -> Product:
        up, down = super().exact(factors)
        return torch.cat([factors.up, up], 1), torch.cat([factors.down, down], 0)

    @override
    def merged(self, factors: FactorRows, exact: Product) -> tuple[Tensor, Tensor]:
        return truncated(*exact, len(factors.down))

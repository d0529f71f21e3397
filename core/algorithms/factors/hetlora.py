"""HetLoRA: factors of different ranks are padded with zeros, and prune themselves (Cho et al. 2024)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import cast

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientRound, Sent, ServerAlgorithm
from roundtable.core.algorithms.factor_rows import FactorRows
from roundtable.core.algorithms.factors.factor_pairs import FactorPair, factor_pairs
from roundtable.core.algorithms.factors.own_ranks import Product, RankedAlgorithm, RankedServer, RankTable
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork
from roundtable.core.toml_tables import Finite

_RANKS = "ranks"


class HetLoraTable(RankTable):
    """`[algorithm]` with name = "hetlora"."""

    gamma: Finite = Field(
        0.99,
        gt=0,
        lt=1,
        description="a rank r is pruned to ⌊γr⌋, at least 1, where what lies behind has shrunk",
    )
    pruning_weight: Finite = Field(
        0.0, ge=0, description="λ of λ‖B_tail‖‖A_tail‖, which is added to the loss for each pair"
    )


class HetLora(RankedAlgorithm):
    """A client trains the first r_k rows that it is sent. Where ‖B_tail‖‖A_tail‖ of those behind ⌊γ r_k⌋ is
    smaller after training than before, it sends zeros there and goes on with rank ⌊γ r_k⌋ (section 3.2)."""

    Table = HetLoraTable
    keeps = "the rank that it was pruned to"
    composition = replace(
        RankedAlgorithm.composition,
        weightings=frozenset({"examples"}),
        reason="its server merges the factors of single clients, each as that client has trained them, and "
        "weighs them by the norms of their products whatever else is said",
    )

    @override
    def server(self) -> ServerAlgorithm:
        assert isinstance(self.table, HetLoraTable)
        return HetLoraServer(self.table)

    @override
    def ranks(self, round: ClientRound, pairs: Sequence[FactorPair]) -> list[int]:
        given = super().ranks(round, pairs)
        if _RANKS not in round.kept:
            return given
        return [min(pair) for pair in zip(given, map(int, round.kept[_RANKS].tolist()), strict=True)]

    def tail(self, rank: int) -> slice:
        """What a client of this rank may prune; empty at rank 1."""
        assert isinstance(self.table, HetLoraTable)
        return slice(max(1, int(self.table.gamma * rank)), rank)

    @override
    def phase(self, round: ClientRound, number: int) -> Hashable:
        """The names of each pair's factors with the client's rank of it."""
        pairs = factor_pairs(round.layout)
        return tuple((pair.names, rank) for pair, rank in zip(pairs, self.ranks(round, pairs), strict=True))

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        assert isinstance(self.table, HetLoraTable)
        loss, found = work.gradients()
        if not self.table.pruning_weight:
            return loss, found
        named = {name: (found[n], work.weights[n]) for n, name in enumerate(work.names)}
        for names, rank in cast("tuple[tuple[tuple[str, str], int], ...]", work.phase):
            (down_slope, down), (up_slope, up) = (named[name] for name in names)
            if down_slope is None or up_slope is None:
                continue
            place, added = self.tail(rank), self.table.pruning_weight
            norms = down[place].norm(), up[:, place].norm()
            there = norms[0] * norms[1] > 0  # At zero the product of norms has no gradient.
            down_slope[place] += torch.where(there, added * norms[1] / norms[0], 0.0) * down[place]
            up_slope[:, place] += torch.where(there, added * norms[0] / norms[1], 0.0) * up[:, place]
        return loss, found

    @override
    def end(self, round: ClientRound, update: Tensor, steps: int) -> Sent:
        pairs, update = factor_pairs(round.layout), update.clone()
        ranks = self.ranks(round, pairs)
        after = []
        for pair, rank in zip(pairs, ranks, strict=True):
            place = self.tail(rank)
            begun = pair.factors(round.vector[None], 0)
            changes = pair.factors(update[None], 0)
            (down, up), (down_change, up_change) = ((a[0], b[0]) for a, b in (begun, changes))
            before = down[place].norm() * up[:, place].norm()
            score = (down + down_change)[place].norm() * (up + up_change)[:, place].norm()
            pruned = bool(score < before)
            after.append(place.start if pruned else rank)
            if pruned:  # These are views of the update.
                down_change[place] = -down[place]
                up_change[:, place] = -up[:, place]
        return Sent(update, kept={_RANKS: torch.tensor(after, dtype=torch.float32)})


class HetLoraServer(RankedServer):
    """The mean by ‖B_k A_k‖ of each pair (section 3.3); by the clients' shares where all norms are zero.

    Where no client of the round has a row of A, as in a cohort of small ranks, A goes on with the row that
    the round began with: beside B's zeros the product is the same, and with zeros in both no later client of
    a larger rank would have a gradient there.
    """

    @override
    def merged(self, factors: FactorRows, exact: Product) -> tuple[Tensor, Tensor]:
        norms = _norms(factors)
        shares = norms / norms.sum() if norms.sum() > 0 else factors.shares
        down, up = torch.tensordot(shares, factors.downs, 1), torch.tensordot(shares, factors.ups, 1)
        absent = ~(factors.downs != 0).any(2).any(0) & ~(up != 0).any(0)
        return torch.where(absent[:, None], factors.down, down), up


def _norms(factors: FactorRows) -> Tensor:
    """‖B_k A_k‖ of each client [n], by the triangles of B_k and A_kᵀ."""
    left = torch.linalg.qr(factors.ups, "r").R
    right = torch.linalg.qr(factors.downs.mT, "r").R
    norms: Tensor = (left @ right.mT).square().sum((1, 2)).sqrt()
    return norms

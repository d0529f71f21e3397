"""What algorithms share in which a client trains so many rows of the low-rank factors as it has a rank.

All vectors have the places of the task's rank; behind a client's own rank A's rows and B's columns are zero,
where both gradients would be zero as well: so it trains factors that end there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.contract import (
    ClientAlgorithm,
    ClientRound,
    Composition,
    ServerAlgorithm,
)
from roundtable.core.algorithms.factor_rows import FactorRows, MergedFactors
from roundtable.core.algorithms.factors.factor_pairs import FactorPair, factor_pairs
from roundtable.core.algorithms.factors.own_size import of_own_size
from roundtable.core.algorithms.factors.thin_products import side_by_side, square, stacked
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import ConfigError

Product = tuple[Tensor, Tensor]
"""[out, k] and [k, in], whose product is meant."""


Rank = Annotated[int, Field(ge=1)]


class RankTable(AlgorithmTable):
    """`[algorithm]` of those that take ranks by silo."""

    ranks: dict[str, Rank] = Field(
        default_factory=dict,
        description="rank of each silo's own factors by its name, at most the task's rank, which is that of "
        "silos not named here, unless ranks_by_memory is set",
    )
    ranks_by_memory: list[Rank] = Field(
        default_factory=list,
        max_length=16,
        description="a silo that is not named in ranks takes the largest of these of which a training step "
        "fits its memory",
    )

    @model_validator(mode="after")
    def _begins_afresh(self) -> Self:
        if self.ranks_by_memory != sorted({*self.ranks_by_memory}):
            raise ValueError(
                f"ranks_by_memory = {self.ranks_by_memory}: name each rank once, the smallest first, such as "
                "[4, 8, 16]"
            )
        if self.optimizer_state == "keep":
            raise ValueError(
                f'optimizer_state = "keep" and name = {self.name!r}: the factors of a round are others than '
                'those that the last one ended with, and what an optimizer kept does not fit; set "drop"'
            )
        return self

    def choices(self, client: str) -> list[int]:
        """The ranks that a client's memory decides between, largest first; none where its rank is said."""
        return [] if client in self.ranks else self.ranks_by_memory[::-1]


class RankedAlgorithm(ClientAlgorithm):
    """A client trains the first rows of A and columns of B that it is sent, and sends the others as zeros."""

    Table = RankTable
    resizes = True
    composition = Composition(
        own_optimizers=True,
        schedule=True,
        masked=False,
        server_optimizer=False,
        rules="mean",
        adaptive_clipping=False,
        reason="its server merges the factors of single clients, each as that client has trained them",
    )

    @override
    def check_clients(self, names: Collection[str]) -> None:
        assert isinstance(self.table, RankTable)
        if unknown := [name for name in self.table.ranks if name not in names]:
            some = ", ".join(list(names)[:5]) or "none"
            raise ConfigError(
                f"algorithm.ranks: {unknown[0]!r} is not a client of this job; the first are {some}. At a "
                "coordinator these are the silos that have connected before the job is submitted",
                key=("algorithm", "ranks"),
            )

    def rank_choices(self, client: str) -> list[int]:
        """See RankTable.choices."""
        assert isinstance(self.table, RankTable)
        return self.table.choices(client)

    def of_rank(self, client: str, rank: int) -> Self:
        """The same where the job says this rank of the client."""
        assert isinstance(self.table, RankTable)
        return type(self)(self.table.model_copy(update={"ranks": {**self.table.ranks, client: rank}}))

    def job_ranks(self, client: str, pairs: Sequence[FactorPair]) -> list[int]:
        """The client's rank of each pair by the job; the smallest of its choices while none is made."""
        assert isinstance(self.table, RankTable)
        own = self.table.ranks.get(client, min(self.table.ranks_by_memory, default=None))
        return [pair.rank if own is None else min(own, pair.rank) for pair in pairs]

    def ranks(self, round: ClientRound, pairs: Sequence[FactorPair]) -> list[int]:
        """The client's rank of each pair."""
        return self.job_ranks(round.context.site, pairs)

    @override
    @contextmanager
    def while_training(self, round: ClientRound, module: nn.Module) -> Iterator[None]:
        pairs = factor_pairs(round.layout)
        with of_own_size(module, pairs, self.ranks(round, pairs)):
            yield


class RankedServer(ServerAlgorithm):
    """Merges pair by pair. `exact` is what loses nothing, `merged` what silos get next."""

    def __init__(self, table: RankTable) -> None:
        self.table = table

    def exact(self, factors: FactorRows) -> Product:
        """The exact sum of the round: Σ p_k B_k A_k."""
        return side_by_side(factors.ups * factors.shares[:, None, None]), stacked(factors.downs)

    def merged(self, factors: FactorRows, exact: Product) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank]."""
        raise NotImplementedError

    @override
    def check_factors(self, ranks: Sequence[int]) -> None:
        if not ranks:
            raise ConfigError(
                f"algorithm {self.table.name!r} merges pairs of low-rank factors, and the task's model has "
                "none of which both travel, as peft names them (lora_A, lora_B): take rt.HuggingFaceTask "
                'or rt.HuggingFaceClassifier with method = "lora"; FFA-LoRA, DoRA and IA3 go with fedavg',
                key=("algorithm", "name"),
            )
        asked = [("ranks", f"{name} = {rank}", rank) for name, rank in self.table.ranks.items()]
        asked += [("ranks_by_memory", str(rank), rank) for rank in self.table.ranks_by_memory]
        for key, said, rank in asked:
            if rank > max(ranks):
                raise ConfigError(
                    f"algorithm.{key}: {said}, and the task's factors have rank {max(ranks)}, which "
                    "is that of the download: give the task the largest rank of all",
                    key=("algorithm", key),
                )

    @override
    def merge(self, factors: FactorRows) -> MergedFactors:
        exact = self.exact(factors)
        down, up = self.merged(factors, exact)
        return MergedFactors(
            down, up, _distance(exact, (up, down)), _distance(exact, (factors.up, factors.down))
        )


def _distance(one: Product, other: Product) -> float:
    """The squared Frobenius norm of the difference of two products."""
    return square(torch.cat([one[0], -other[0]], 1), torch.cat([one[1], other[1]], 0))

"""FlexLoRA: whole products are averaged and taken apart again (Bai et al. 2024)."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import ServerAlgorithm
from roundtable.core.algorithms.factor_rows import FactorRows
from roundtable.core.algorithms.factors.own_ranks import Product, RankedAlgorithm, RankedServer, RankTable
from roundtable.core.algorithms.factors.thin_products import truncated


class FlexLora(RankedAlgorithm):
    """ΔW = Σ p_k s B_k A_k, and its truncated SVD B = UΣ/s, A = Vᵀ (section 3.2): singular values fall, so a
    client's first r_k rows are the truncation at its own rank, and it trains these on."""

    @override
    def server(self) -> ServerAlgorithm:
        assert isinstance(self.table, RankTable)
        return FlexLoraServer(self.table)


class FlexLoraServer(RankedServer):
    """The best product of the download's rank."""

    @override
    def merged(self, factors: FactorRows, exact: Product) -> tuple[Tensor, Tensor]:
        return truncated(*exact, len(factors.down))

"""Low rank: each matrix of the layout as the product of two thin ones (PowerSGD, Vogels et al. 2019)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings import compiled
from roundtable.core.encodings.block_tables import refusal
from roundtable.core.encodings.codec import Codec, CodecReader
from roundtable.core.encodings.composed.runs import (
    BufferedRun,
    RunReader,
    ValueRun,
    codec_run,
    tensors_of,
    whole_run,
)
from roundtable.core.encodings.encoding import (
    GRID,
    NO_KEY,
    ByteSource,
    Encoding,
    Memory,
    StreamKey,
    Traits,
    VectorReader,
    check_vector,
)
from roundtable.core.encodings.torch_draws import draw_uniform
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import TensorSpec
from roundtable.core.toml_tables import Table

FACTORS = "factors"
"""The client's memory: the Q of every matrix [r, n], one behind the other."""

_START = 0x9A2B0C5E
"""Keeps the draws of the first Q apart from those of rounding."""


class LowRankTable(Table):
    """Parameters of lowrank."""

    rank: int = Field(4, ge=1, le=256, description="columns of each factor")
    warm: bool = Field(
        True, description="begin with the silo's Q of its update before; else with a drawn one"
    )
    basis: Literal["own", "cohort"] = Field(
        "own",
        description="cohort: one factor a round, by a basis that all silos share, whose sum means something: "
        "for secure aggregation",
    )


class Matrix(NamedTuple):
    """A tensor as it is sent: its values, with `rank` 0, or factors [rows, rank] and [rank, columns]."""

    offset: int
    rows: int
    columns: int
    rank: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


class LowRank(Encoding):
    """Each tensor as a matrix A of [first dimension, all others]: P = orth(A Qᵀ), Q ← Pᵀ A, sent P and Q,
    decoded P Q (Vogels et al. 2019, algorithm 1, with Q transposed).

    r(m + n) values for a matrix of m × n; tensors for which that saves nothing are sent whole, vectors among
    them. P Q = P Pᵀ A is a projection: the error is ≤ ‖A‖ and the result never longer, but nothing better
    holds for every A, so it goes with error feedback and not on the way down. Each update is the power
    iteration's next step: with `warm` the Q is kept at the client. A codec that follows writes both factors;
    with its error ω it adds at most (1 + √r + ω√r)ω. Decoding adds up in one order: the same bits everywhere.

    Memory: beside the factors of one matrix, a block. P is orthogonalised in float64.
    """

    def __init__(self, chain: str, table: LowRankTable, codec: Codec, layout: Layout | None = None) -> None:
        self.chain = chain
        self.table = table
        self.codec = codec
        self._layout = layout
        self.keeps = (FACTORS,) if table.warm else ()
        loss, root = codec.traits.worst(1 << 20), math.sqrt(table.rank)
        if codec.traits.error == "unbiased" or loss * root > 0.5:
            raise EncodingError(
                f"{chain}: both factors would be rounded, and the error multiplied: what follows lowrank is "
                "float32, bfloat16 or int8"
            )
        added = (1 + root + loss * root) * loss + 2**-20 * (1 + root)
        self.traits = Traits("bounded", lambda n: 1 + added, lambda n: 1 + added, feedback=True)

    @override
    def over(self, layout: Layout) -> LowRank:
        return LowRank(self.chain, self.table, self.codec, layout)

    @override
    def size_bound(self, elements: int) -> int:
        return sum(self._size(matrix) for matrix in self._matrices(elements))

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        values, own = check_vector(vector), key.own
        matrices = self._matrices(len(values))
        kept = self._kept(memory or {}, sum(each.rank * each.columns for each in matrices))
        parts, place, first = [], 0, 0
        for matrix in matrices:
            part = values[matrix.offset : matrix.offset + matrix.size]
            if not all(bool(torch.isfinite(end)) for end in torch.aminmax(part)):
                raise refusal(matrix.offset, matrix.size)
            runs = [part]
            if matrix.rank:
                count = matrix.rank * matrix.columns
                # Another place for every draw of every matrix.
                if kept is None:
                    q = draw_uniform(own ^ _START, place, count, values.device) - 0.5
                else:
                    q = kept[place:][:count].to(values.device)
                pair = factors(part.view(matrix.rows, -1), q.view(matrix.rank, -1))
                runs, place = [each.view(-1) for each in pair], place + count
                parts.append(runs[1])
            for run in runs:
                yield from (block.data for block in codec_run(self.codec, run, first, own))
                first += -(-len(run) // GRID) * GRID
        if memory is not None and self.keeps:
            memory[FACTORS] = torch.cat(parts).cpu() if parts else torch.empty(0)

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return RunReader(self._runs(source, elements))

    def _runs(self, source: ByteSource, elements: int) -> Iterator[tuple[int, ValueRun]]:
        for matrix in self._matrices(elements):
            if not matrix.rank:
                yield matrix.size, BufferedRun(CodecReader(self.codec, source), matrix.size)
                continue
            left = whole_run(self.codec, source, matrix.rows * matrix.rank)
            right = whole_run(self.codec, source, matrix.rank * matrix.columns)
            yield matrix.size, FactorProduct(left, right, matrix)

    def _matrices(self, elements: int) -> list[Matrix]:
        return [self._matrix(spec) for spec in tensors_of(self.chain, self._layout, elements)]

    def _matrix(self, spec: TensorSpec) -> Matrix:
        rows = spec.shape[0] if spec.shape else 1
        columns = spec.size // rows
        rank = min(self.table.rank, rows, columns)
        return Matrix(spec.offset, rows, columns, rank if rank * (rows + columns) < spec.size else 0)

    def _size(self, matrix: Matrix) -> int:
        if not matrix.rank:
            return self.codec.size(matrix.size)
        return self.codec.size(matrix.rows * matrix.rank) + self.codec.size(matrix.rank * matrix.columns)

    def _kept(self, memory: Memory, count: int) -> Tensor | None:
        kept = memory.get(FACTORS) if self.keeps else None
        if kept is not None and kept.numel() != count:
            warnings.warn(
                f"the factors kept of the update before have {kept.numel()} values, and {self.chain} goes on "
                f"from {count}: they are drawn anew",
                stacklevel=3,
            )
            return None
        return kept


def factors(matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(P [m, r] with orthonormal columns, Pᵀ A [r, n]) of A [m, n] and the Q [r, n] of the step before."""
    most = q.abs().amax()
    # In its own unit, so that the product of small updates does not underflow.
    p = torch.linalg.qr((matrix @ (q / most if most > 0 else q).T).double())[0].to(matrix.dtype)
    following = p.T @ matrix
    if not bool(torch.isfinite(p).all() and torch.isfinite(following).all()):
        raise EncodingError("the update holds values that are too large for products of them (lowrank)")
    return p.contiguous(), following.contiguous()


class FactorProduct:
    """The values of P Q, row by row: Σ p·q over the rank, in order and each rounded to float32."""

    def __init__(self, left: Tensor, right: Tensor, matrix: Matrix) -> None:
        self._left = left.view(matrix.rows, matrix.rank)
        self._right = right.view(matrix.rank, matrix.columns)
        self._at = 0

    def read(self, out: Tensor) -> None:
        kernels = compiled.load()
        rank, columns = self._right.shape
        if kernels is not None and out.device.type == "cpu":
            arguments = (self._left, self._right, rank, columns, self._at, len(out), out)
            kernels.call("low_rank", *arguments)
        else:
            first, last = self._at // columns, -(-(self._at + len(out)) // columns)
            rows, right = self._left[first:last].to(out.device), self._right.to(out.device)
            block = rows[:, :1] * right[:1]
            for k in range(1, rank):
                block += rows[:, k : k + 1] * right[k : k + 1]
            start = self._at - first * columns
            out.copy_(block.view(-1)[start : start + len(out)])
        self._at += len(out)
        if not all(bool(torch.isfinite(end)) for end in torch.aminmax(out)):
            raise EncodingError("a product of two factors is too large for float32")

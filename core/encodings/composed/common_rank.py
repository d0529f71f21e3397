"""Low rank for sums: one factor of each matrix, by a basis that all clients share (Zhang et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.block_tables import refusal
from roundtable.core.encodings.codec import Codec, CodecReader
from roundtable.core.encodings.composed.low_rank import FactorProduct, LowRankTable, Matrix
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
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout

_DEAD = 1e-6
"""A column of a sum that is shorter than this, in units of the longest, gives no direction."""


class CommonRank(Encoding):
    """Each tensor as a matrix A [m, n]: in odd rounds P = A B is sent, with B [n, r] orthonormal, in even
    ones Q = Aᵀ B, with B [m, r]; decoded P Bᵀ and B Qᵀ. The next round's B is orth(Σ P), or orth(Σ Q): half a
    step of PowerSGD's power iteration each round, over one sum (ACP-SGD, Zhang et al. 2023, algorithm 2,
    whose factors swap their parts in each step).

    B is the same for all clients of a round and lies behind the model (`Layout.basis`), so a client's factor
    is linear in its update: sums of factors are factors of the sum, which is what masks need. r·m or r·n
    values for a matrix; tensors for which that saves nothing travel whole. Decoding is a projection: the
    error is ≤ ‖A‖, the result never longer, and error feedback sends the rest later.

    `basis` is float32 [basis_size]: of each matrix the last B [n, r] and the last B [m, r], so that a round
    without a model does no harm; zeros at first, where r unit vectors stand for it. It is bound to a round by
    `at`, without which nothing is encoded. Decoding adds up in one order: the same bits
    everywhere. Memory: beside the factor of one matrix, a block.
    """

    def __init__(
        self,
        chain: str,
        table: LowRankTable,
        codec: Codec,
        layout: Layout | None = None,
        basis: Tensor | None = None,
        round: int = 0,
    ) -> None:
        self.chain = chain
        self.table = table
        self.codec = codec
        self._layout = layout
        self._basis = basis
        self._round = round
        if codec.dense_dtype != torch.float32:
            raise EncodingError(
                f"{chain}: factors by a basis of the cohort are added up under masks, which have a form of "
                "their own for them; leave out what follows lowrank"
            )
        self.traits = Traits("bounded", lambda n: 1.0, lambda n: 1.0, support="cohort", feedback=True)

    @override
    def over(self, layout: Layout) -> CommonRank:
        return CommonRank(self.chain, self.table, self.codec, layout)

    def at(self, basis: Tensor, round: int) -> CommonRank:
        """The encoding of a round (from 1), whose model came with this basis. EncodingError for another's."""
        if basis.numel() != self.basis_size:
            raise EncodingError(
                f"{self.chain}: the model came with a basis of {basis.numel()} values, and its tensors take "
                f"{self.basis_size}"
            )
        return CommonRank(self.chain, self.table, self.codec, self._layout, basis, round)

    @property
    def basis_size(self) -> int:
        """How many values the basis of all matrices has."""
        return sum(each.rank * (each.rows + each.columns) for each in self._matrices())

    def values(self, round: int) -> int:
        """How many values an update has in a round."""
        return sum(self._values(each, round) for each in self._matrices())

    @override
    def size_bound(self, elements: int) -> int:
        self._matrices(elements)
        return self.codec.size(max(self.values(1), self.values(2)))

    @override
    def encoded_size(self, elements: int) -> int | None:
        return self.codec.size(self.values(self._round)) if self._round else None

    @override
    def encode(
        self, vector: Tensor, key: StreamKey = NO_KEY, memory: Memory | None = None
    ) -> Iterator[memoryview]:
        values, first = check_vector(vector), 0
        for matrix, basis in self._bases(len(values)):
            part = values[matrix.offset : matrix.offset + matrix.size]
            if not all(bool(torch.isfinite(end)) for end in torch.aminmax(part)):
                raise refusal(matrix.offset, matrix.size)
            if basis is not None:
                whole = part.view(matrix.rows, -1)
                part = ((whole if self._right else whole.T) @ basis.to(part.device)).reshape(-1)
                if not bool(torch.isfinite(part).all()):
                    raise EncodingError("the update holds values too large for sums of them (lowrank)")
            yield from (block.data for block in codec_run(self.codec, part, first, key.own))
            first += -(-len(part) // GRID) * GRID

    @override
    def reader(self, source: ByteSource, elements: int, key: StreamKey = NO_KEY) -> VectorReader:
        return RunReader(self._runs(source, elements))

    def expand(self, values: Tensor) -> Tensor:
        """The vector [d] that a round's values [`values(round)`] stand for: of one update, or of a mean."""
        vector = torch.empty(self._size)
        self.decode(values.contiguous().numpy().data, vector)
        return vector

    def following(self, values: Tensor) -> Tensor:
        """The bases after a round whose updates have this mean [`values(round)`]: the other side's is new."""
        basis, at, place = self._bound.clone(), 0, 0
        for matrix in self._matrices():
            count, right = self._values(matrix, self._round), matrix.rank * matrix.columns
            if matrix.rank:
                factor = values[place : place + count].view(-1, matrix.rank)
                first = at + right if self._right else at
                basis[first : first + count] = torch.from_numpy(orthonormal(factor.numpy())).reshape(-1)
            at, place = at + right + matrix.rank * matrix.rows, place + count
        return basis

    @property
    def _right(self) -> bool:
        """Whether the round's basis is of the matrices' rows."""
        return self._round % 2 == 1

    @property
    def _size(self) -> int:
        return sum(each.size for each in self._matrices())

    def _runs(self, source: ByteSource, elements: int) -> Iterator[tuple[int, ValueRun]]:
        for matrix, basis in self._bases(elements):
            if basis is None:
                yield matrix.size, BufferedRun(CodecReader(self.codec, source), matrix.size)
                continue
            factor = whole_run(self.codec, source, self._values(matrix, self._round)).view(-1, matrix.rank)
            left, right = (factor, basis) if self._right else (basis, factor)
            yield matrix.size, FactorProduct(left, right.T.contiguous(), matrix)

    @property
    def _bound(self) -> Tensor:
        if self._basis is None:
            raise EncodingError(
                f"{self.chain} goes by a basis that comes with each round's model of a job with secure "
                "aggregation; without that choose basis=own"
            )
        return self._basis

    def _bases(self, elements: int) -> Iterator[tuple[Matrix, Tensor | None]]:
        """Each matrix with its basis [n, r] or [m, r]; None for one that travels whole."""
        bound, at = self._bound, 0
        for matrix in self._matrices(elements):
            if not matrix.rank:
                yield matrix, None
                continue
            side, other = (matrix.columns, 0) if self._right else (matrix.rows, matrix.columns)
            first = at + matrix.rank * other
            basis = bound[first : first + matrix.rank * side].view(side, matrix.rank)
            yield matrix, basis if bool(basis.any()) else _units(side, matrix.rank)
            at += matrix.rank * (matrix.rows + matrix.columns)

    def _matrices(self, elements: int | None = None) -> list[Matrix]:
        found = []
        for spec in tensors_of(self.chain, self._layout, elements):
            rows = spec.shape[0] if spec.shape else 1
            columns = spec.size // rows
            rank = self.table.rank if self.table.rank < min(rows, columns) else 0
            found.append(Matrix(spec.offset, rows, columns, rank))
        return found

    def _values(self, matrix: Matrix, round: int) -> int:
        if not matrix.rank:
            return matrix.size
        return matrix.rank * (matrix.rows if round % 2 else matrix.columns)


def orthonormal(factor: np.ndarray) -> np.ndarray:
    """Columns that span those of a factor [n, r], r ≤ n, orthonormal, float32: Gram and Schmidt, twice, in
    float64 and in one order. Where the factor has no further direction, unit vectors fill up."""
    columns = factor.astype(np.float64).T
    lengths = [float(np.sqrt(np.add.reduce(np.square(column)))) for column in columns]
    longest = max(lengths)
    side, found = factor.shape[0], list[np.ndarray]()
    spare = iter(_spread(side, side))
    for column in columns:
        rest = _apart(column / longest, found) if longest > 0 else np.zeros(side)
        least = _DEAD
        while not (length := float(np.sqrt(np.add.reduce(np.square(rest))))) > least:
            unit = np.zeros(side)
            unit[next(spare)] = 1.0
            rest, least = _apart(unit, found), 0.5 * (1.0 - len(found) / side) ** 0.5
        found.append(rest / length)
    return np.stack(found, axis=1).astype(np.float32)


def _apart(column: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """What of a column is at right angles to others, which are so to each other."""
    for _ in range(2):
        for other in others:
            column = column - np.add.reduce(column * other) * other
    return column


def _units(side: int, rank: int) -> Tensor:
    """Unit vectors [side, rank], evenly spread."""
    units = torch.zeros(side, rank)
    units[torch.tensor(_spread(side, rank)), torch.arange(rank)] = 1.0
    return units


def _spread(side: int, count: int) -> list[int]:
    return [(2 * number + 1) * side // (2 * count) for number in range(count)]

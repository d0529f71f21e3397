"""What the coordinator does in a round with central noise: bound every row itself, add, divide, add noise.

The sum is over rows of norm at most C with weights in [0, 1]; the noise has σ = z · C; both are divided
by the expected cohort, a constant. One silo therefore moves the sum by at most C, whoever else answers
and however many examples anybody claims to have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from roundtable.core.errors import PrivacyError
from roundtable.privacy.accounting.charge import Charge, gaussian_charge
from roundtable.privacy.mechanisms.clipping import AdaptiveClip, clip_factor
from roundtable.privacy.mechanisms.gaussian import standard_normal
from roundtable.privacy.mechanisms.gaussian_mechanism import noise_onto, to_grid
from roundtable.privacy.mechanisms.noise import NoiseSource
from roundtable.privacy.secagg.quantise import CLIPPED

# Small enough for a core's cache in float64, long enough to hide the cost of each call.
_BLOCK_ENTRIES, _NARROWEST, _WIDEST = 1 << 18, 1 << 12, 1 << 16


class RowMatrix(Protocol):
    """Updates as rows, in memory or not; `block(start, stop)` gives `[rows, stop − start]`."""

    @property
    def rows(self) -> int:
        """How many updates there are."""

    @property
    def columns(self) -> int:
        """How long each is."""

    def block(self, start: int, stop: int) -> Tensor:
        """The columns from `start` up to `stop`."""


@dataclass(frozen=True)
class CentralResult:
    """A noisy mean that may be published, and what only the coordinator may see.

    `vector` (float32 `[columns]`) and `next_clip` carry their noise. `rejected` (rows with NaN or
    infinity) and how many rows there were are facts about silos without noise: they are not to be published.
    """

    vector: Tensor
    standard_deviation: float
    next_clip: AdaptiveClip | None
    guarantee: bool
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class CentralDP:
    """The central Gaussian mechanism of one job.

    `noise_multiplier` is σ / C, `expected_cohort` the fixed denominator: population × rate under
    Poisson sampling, the cohort's size otherwise. `slices` turns on clipping by layer. With `adaptive`,
    its clip norm replaces `clip_norm`, and each round's result brings the next state.
    """

    clip_norm: float
    noise_multiplier: float
    expected_cohort: float
    slices: tuple[slice, ...] = ()
    adaptive: AdaptiveClip | None = None

    def __post_init__(self) -> None:
        for name in ("clip_norm", "noise_multiplier", "expected_cohort"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise PrivacyError(f"{name} is {value}: central noise needs a finite number above 0")
        if self.slices and self.adaptive:
            raise PrivacyError("adaptive clipping and clipping by layer cannot be combined; choose one")

    @property
    def bound(self) -> float:
        """The clip norm in force."""
        return self.adaptive.clip_norm if self.adaptive else self.clip_norm

    def charge(self, sampling: Mapping[str, Any]) -> Charge:
        """What one released round costs, the clip bit included; `sampling` is `SamplingModel.fields()`."""
        more = {"clip_bit": self.adaptive.bit_noise_multiplier} if self.adaptive else {}
        return gaussian_charge("client", sampling, self.noise_multiplier, more=more)

    def prepare(
        self,
        matrix: RowMatrix,
        source: NoiseSource,
        weights: Sequence[float] | None = None,
        within: Sequence[bool] | None = None,
        correlated: Tensor | None = None,
    ) -> CentralResult:
        """The noisy mean of the rows, streamed over blocks of columns; works for no rows at all.

        `weights` are clamped to [0, 1] (1 each where absent): to weight by example counts divide by a
        public ceiling first. `within` are the silos' own clip bits where they clip before they send;
        where absent they are taken from the norms. `correlated` is a draw of DP-FTRL's noise `[columns]`,
        used in place of fresh noise (`MatrixMechanism.central` makes the mechanism for it). The sum is in
        float64, so that its rounding stays far below the noise.
        """
        squares = self._squared_norms(matrix)
        valid = torch.isfinite(squares).all(dim=1)
        norms = squares.sum(dim=1).sqrt()
        factors = self._factors(squares.sqrt(), valid) * _bounded(weights, matrix.rows)[:, None]
        std = self.noise_multiplier * self.bound
        out = torch.empty(matrix.columns, dtype=torch.float32)
        for layer, part in enumerate(self._parts(matrix.columns)):
            for start, stop in _blocks(part, matrix.rows):
                total = _weighted_sum(matrix.block(start, stop), factors[:, layer], valid)
                if correlated is None:
                    noise_onto(total, std, source, total, self.expected_cohort)
                else:
                    to_grid(total.add_(correlated[start:stop]), std).div_(self.expected_cohort)
                out[start:stop] = total
        rejected = tuple(int(row) for row in torch.nonzero(~valid).flatten())
        next_clip = self._next_clip(norms[valid], valid, within, source)
        return CentralResult(out, std / self.expected_cohort, next_clip, source.guarantee, rejected)

    def _parts(self, columns: int) -> tuple[slice, ...]:
        parts = self.slices or (slice(0, columns),)
        if sum(part.stop - part.start for part in parts) != columns or parts[-1].stop != columns:
            raise PrivacyError(f"the layers' slices do not cover the {columns} columns of the updates")
        return parts

    def _squared_norms(self, matrix: RowMatrix) -> Tensor:
        parts = self._parts(matrix.columns)
        squares = torch.zeros(matrix.rows, len(parts), dtype=torch.float64)
        for layer, part in enumerate(parts):
            for start, stop in _blocks(part, matrix.rows):
                block = matrix.block(start, stop).to(torch.float64)
                squares[:, layer] += torch.linalg.vector_norm(block, dim=1).square_()
        return squares

    def _factors(self, norms: Tensor, valid: Tensor) -> Tensor:
        share = self.bound / math.sqrt(norms.shape[1])
        factors = torch.zeros_like(norms)
        for row in torch.nonzero(valid).flatten().tolist():
            for layer in range(norms.shape[1]):
                factors[row, layer] = clip_factor(float(norms[row, layer]), share)
        return factors

    def _next_clip(
        self, norms: Tensor, valid: Tensor, within: Sequence[bool] | None, source: NoiseSource
    ) -> AdaptiveClip | None:
        if self.adaptive is None:
            return None
        # Those within rounding of C count as clipped, or it would shrink for ever.
        bits = (
            norms < self.bound * CLIPPED if within is None else torch.tensor(within, dtype=torch.bool)[valid]
        )
        centred = float(bits.to(torch.float64).sub_(0.5).sum())
        return self.adaptive.apply(centred, float(standard_normal(source, 1)[0]))


def _bounded(weights: Sequence[float] | None, rows: int) -> Tensor:
    if weights is None:
        return torch.ones(rows, dtype=torch.float64)
    if len(weights) != rows:
        raise PrivacyError(f"{len(weights)} weights for {rows} updates")
    return torch.nan_to_num(torch.tensor(weights, dtype=torch.float64), nan=0.0).clamp_(0.0, 1.0)


def _blocks(part: slice, rows: int) -> Iterator[tuple[int, int]]:
    width = min(max(_NARROWEST, _BLOCK_ENTRIES // max(rows, 1)), _WIDEST)
    for start in range(part.start, part.stop, width):
        yield start, min(start + width, part.stop)


def _weighted_sum(block: Tensor, factors: Tensor, valid: Tensor) -> Tensor:
    if block.shape[0] == 0:
        return torch.zeros(block.shape[1], dtype=torch.float64)
    if not bool(valid.all()):
        block, factors = block[valid], factors[valid]
    return factors @ block.to(torch.float64)

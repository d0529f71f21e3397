"""What an update must be before any rule sees it, and what happens to one that is not.

Broken updates (not finite, an impossible example count, the same client twice) are faults of a client and
are counted against the f that the rule was told to withstand. An update of too large a norm, or one without
a loss to weigh it by, may be honest, so leaving it out lowers no f.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from roundtable.aggregation.rows.gram import gram, squared_norms
from roundtable.aggregation.rows.matrix import TensorMatrix, UpdateMatrix
from roundtable.core.errors import InvalidUpdate

ValidationPolicy = Literal["exclude", "clip", "fail"]

_MAY_BE_HONEST = ("norm", "loss")

_FEWEST_FOR_MEDIAN = 3

_NEAR = 2e-3
"""More than a norm that was measured on arrival and a bound that follows from such are off by, relatively."""

MAX_EXAMPLES = 2**53
"""Counts above this are not exact in float64, and no silo holds that many examples."""


@dataclass(frozen=True)
class ClientRow:
    """Who sent a row, and what the client says about it.

    examples: number of training examples, 1 to 2^53. loss: training loss, for inverse-loss weighting. norm:
    Euclidean norm of the row where it was measured on arrival, up to 1e-3 of it, which saves a pass
    where nobody's is near a bound.
    """

    name: str
    examples: int = 1
    loss: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class Exclusion:
    """A client whose update was left out or scaled down: a short stable word, and a message for people."""

    client: str
    reason: str
    message: str


@dataclass(frozen=True)
class Screening:
    """Outcome of the validation.

    kept: indices of the rows that go on. factors: what each of them is multiplied by, in (0, 1]. excluded,
    clipped: whose update was left out or scaled down, and why.
    """

    kept: tuple[int, ...]
    factors: np.ndarray
    excluded: tuple[Exclusion, ...]
    clipped: tuple[Exclusion, ...]

    @property
    def faults(self) -> tuple[Exclusion, ...]:
        """Those left out because of a fault, which count against f."""
        return tuple(exclusion for exclusion in self.excluded if exclusion.reason not in _MAY_BE_HONEST)


def check_update(vector: torch.Tensor, columns: int) -> float:
    """The Euclidean norm of one update [d], measured on arrival in one pass; float64 inside.

    Raises InvalidUpdate: `layout` for another length, `non_finite` for NaN or infinities.
    """
    if vector.dim() != 1 or vector.numel() != columns:
        raise InvalidUpdate(
            "layout", f"the update has shape {list(vector.shape)}; the layout has {columns} values"
        )
    norm = math.sqrt(float(squared_norms(TensorMatrix(vector[None]))[0]))
    if not math.isfinite(norm):
        raise InvalidUpdate("non_finite", "the update holds values that are not finite")
    return norm


def screen(
    matrix: UpdateMatrix,
    clients: Sequence[ClientRow],
    policy: ValidationPolicy,
    max_norm: float | None,
    with_gram: bool,
    trusting: bool = False,
    by_loss: bool = False,
    norm_ratio: float | None = None,
) -> Screening:
    """Looks at every row before a rule does.

    with_gram: the rule needs the Gram matrix anyway, so norms are read off it. trusting: rows are taken to be
    finite. by_loss: rows are weighed by their client's loss, so a client without a usable one is left out.
    norm_ratio: longer than so many medians of the round is too long, as beyond max_norm.
    Raises InvalidUpdate where the policy is to fail.
    """
    arrived = None if trusting or with_gram else _arrived(clients, max_norm, norm_ratio)
    if arrived is not None:
        norms = arrived
    else:
        norms = np.zeros(matrix.rows) if trusting else _norms(matrix, with_gram)
    return judge(norms, clients, policy, max_norm, by_loss=by_loss, norm_ratio=norm_ratio)


def judge(
    norms: np.ndarray,
    clients: Sequence[ClientRow],
    policy: ValidationPolicy,
    max_norm: float | None,
    *,
    by_loss: bool = False,
    norm_ratio: float | None = None,
) -> Screening:
    """What `screen` says of rows with these Euclidean norms [n]."""
    max_norm, bound = _bound(norms, max_norm, norm_ratio)
    names = Counter(client.name for client in clients)
    kept: list[int] = []
    factors: list[float] = []
    excluded: list[Exclusion] = []
    clipped: list[Exclusion] = []
    for index, client in enumerate(clients):
        fault = _fault(client, norms[index], names[client.name]) or (_loss_fault(client) if by_loss else None)
        too_large = max_norm is not None and norms[index] > max_norm
        if fault is None and too_large:
            fault = Exclusion(
                client.name, "norm", f"norm {norms[index]:.6g} exceeds the bound {max_norm:.6g}{bound}"
            )
        if fault is not None and policy == "fail":
            raise InvalidUpdate(
                fault.reason, f"update of {fault.client}: {fault.message}; the job fails on such"
            )
        if fault is not None and (fault.reason != "norm" or policy == "exclude"):
            excluded.append(fault)
            continue
        if fault is not None:
            clipped.append(fault)
        kept.append(index)
        factors.append(max_norm / norms[index] if fault is not None and max_norm is not None else 1.0)
    return Screening(tuple(kept), np.array(factors), tuple(excluded), tuple(clipped))


def _bound(norms: np.ndarray, max_norm: float | None, ratio: float | None) -> tuple[float | None, str]:
    """The smaller of both bounds, and where it comes from; no ratio counts to a median of 0.

    Of two updates neither is the usual one: with a tiny one a silo would have the other left out.
    """
    finite = norms[np.isfinite(norms)]
    middle = float(np.median(finite)) if len(finite) >= _FEWEST_FOR_MEDIAN else 0.0
    if ratio is None or middle == 0 or (max_norm is not None and max_norm <= ratio * middle):
        return max_norm, ""
    key = 'aggregation.validation.norm_ratio; "off" turns this off'
    return ratio * middle, f", {ratio:g} times the median of the cohort ({key})"


def _arrived(clients: Sequence[ClientRow], max_norm: float | None, ratio: float | None) -> np.ndarray | None:
    """The norms that were measured on arrival, where they say the same of every row as a pass would, to the
    bit: all of them well within the bound. None where one is missing, or so near that rounding counts."""
    norms = np.array([math.nan if client.norm is None else client.norm for client in clients])
    bound, _ = _bound(norms, max_norm, ratio)
    most = math.inf if bound is None else bound * (1 - _NEAR)
    return norms if np.isfinite(norms).all() and (norms <= most).all() else None


def _norms(matrix: UpdateMatrix, with_gram: bool) -> np.ndarray:
    if with_gram:
        return np.asarray(np.sqrt(np.diagonal(gram(matrix))))
    return np.asarray(np.sqrt(squared_norms(matrix)))


def _fault(client: ClientRow, norm: float, submissions: int) -> Exclusion | None:
    if submissions > 1:
        return Exclusion(
            client.name, "duplicate", f"{submissions} updates under one name; none can be trusted"
        )
    count = client.examples
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_EXAMPLES:
        return Exclusion(client.name, "examples", f"the example count must be from 1 to 2^53, not {count!r}")
    if not math.isfinite(norm):
        return Exclusion(client.name, "non_finite", "the update holds values that are not finite")
    return None


def _loss_fault(client: ClientRow) -> Exclusion | None:
    if client.loss is not None and 0 <= client.loss < math.inf:
        return None
    sent = "sent none" if client.loss is None else f"sent {client.loss!r}"
    return Exclusion(
        client.name, "loss", f"inverse_loss weighting needs a finite loss of at least 0; {client.name} {sent}"
    )

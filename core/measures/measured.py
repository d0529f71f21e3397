"""What a task's `metrics` returns for metrics that are no mean: the state of one batch as named sums.

    def metrics(self, model, batch):
        scores = model(batch[0]).sigmoid().squeeze(1)
        return {**rt.metrics.auroc("risk", scores, batch[1], bins=50), "brier": (…, len(scores))}

The history then has risk_auroc and risk_average_precision, over all batches and silos together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from roundtable.core.errors import TaskError
from roundtable.core.measures.families import Family

State = dict[str, tuple[float, int]]


def confusion(name: str, predicted: Tensor, labels: Tensor, classes: int) -> State:
    """Gives NAME_accuracy, _precision_macro, _recall_macro, _f1_macro and _f1_micro.

    `predicted` and `labels` are class numbers [n], 0 to classes − 1; at most 16 classes.
    """
    family = _family(name, "confusion", classes)
    guess, truth = _row(name, predicted).long(), _row(name, labels).long()
    _same(name, guess, truth)
    for row in (guess, truth):
        if len(row) and not 0 <= int(row.min()) <= int(row.max()) < classes:
            raise TaskError(
                f"metrics.confusion({name!r}): class {int(row.min())} to {int(row.max())} is among the "
                f"values, and classes = {classes} says 0 to {classes - 1}"
            )
    counts = torch.bincount(truth * classes + guess, minlength=classes * classes).tolist()
    cells = {f"{i}_{j}": counts[i * classes + j] for i in range(classes) for j in range(classes)}
    return _state(family, cells, len(truth))


def auroc(name: str, scores: Tensor, labels: Tensor, bins: int = 50) -> State:
    """Gives NAME_auroc and NAME_average_precision, of scores from 0 to 1 rounded down to `bins` equal bins.

    `scores` and `labels` (0 or 1) are [n]. Scores of one bin are ties: more bins, nearer to the exact figure.
    """
    family = _family(name, "ranking", bins)
    values, truth = _row(name, scores), _row(name, labels).bool()
    _same(name, values, truth)
    place = _bins(name, values, bins)
    cells = {f"pos_{i}": n for i, n in enumerate(torch.bincount(place[truth], minlength=bins).tolist())}
    cells |= {f"neg_{i}": n for i, n in enumerate(torch.bincount(place[~truth], minlength=bins).tolist())}
    return _state(family, cells, len(values))


def calibration(name: str, confidence: Tensor, correct: Tensor, bins: int = 15) -> State:
    """Gives NAME_ece: how far confidence (0 to 1, [n]) is from how often the prediction is `correct` [n]."""
    family = _family(name, "calibration", bins)
    values, right = _row(name, confidence), _row(name, correct).bool()
    _same(name, values, right)
    place, weights = _bins(name, values, bins), (torch.ones_like(values), values, right.double())
    cells = {
        f"{part}_{i}": total
        for part, weight in zip(("n", "said", "right"), weights, strict=True)
        for i, total in enumerate(torch.bincount(place, weight, minlength=bins).tolist())
    }
    return _state(family, cells, len(values))


def regression(name: str, predicted: Tensor, target: Tensor) -> State:
    """Gives NAME_rmse, NAME_mae and NAME_r2. Both are [n]; targets far from 0 lose digits of R²."""
    family = _family(name, "regression", 1)
    guess, truth = _row(name, predicted), _row(name, target)
    _same(name, guess, truth)
    error = guess - truth
    sums = {"e": error.abs().sum(), "ee": error.square().sum(), "y": truth.sum(), "yy": truth.square().sum()}
    return _state(family, {cell: float(total) for cell, total in sums.items()}, len(truth))


def correlation(name: str, predicted: Tensor, target: Tensor) -> State:
    """Gives NAME_pearson, of both [n] over all silos; values far from 0 lose digits.

    Not Spearman's: ranks are among all values, and no silo knows the others'.
    """
    family = _family(name, "correlation", 1)
    guess, truth = _row(name, predicted), _row(name, target)
    _same(name, guess, truth)
    sums = {"x": guess, "y": truth, "xx": guess * guess, "yy": truth * truth, "xy": guess * truth}
    return _state(family, {cell: float(values.sum()) for cell, values in sums.items()}, len(truth))


def concordance(name: str, risk: Tensor, time: Tensor, event: Tensor) -> State:
    """Gives NAME_c_index: Harrell's C over the pairs within each batch, ties of risk counting half.

    All are [n]: a higher `risk` is to go with an earlier `time`; `event` is 0 where that is censored. Pairs
    over batches are not seen: set [evaluation] batch_size as large as a silo's test data.
    """
    family = _family(name, "concordance", 1)
    score, when, seen = _row(name, risk), _row(name, time), _row(name, event).bool()
    _same(name, score, when)
    _same(name, score, seen)
    comparable = seen[:, None] & ((when[:, None] < when) | ((when[:, None] == when) & ~seen))
    better, equal = score[:, None] > score, score[:, None] == score
    concordant = float((comparable & better).sum()) + float((comparable & equal).sum()) / 2
    return _state(family, {"concordant": concordant, "comparable": float(comparable.sum())}, len(score))


def quantiles(name: str, values: Tensor, low: float, high: float, bins: int = 50) -> State:
    """Gives NAME_p5, _p25, _p50, _p75, _p95 of values [n], from `bins` equal bins between `low` and `high`.

    What lies outside counts in the bin at that end.
    """
    family = _family(name, "quantiles", bins, (float(low), float(high)))
    row = _row(name, values)
    place = _bins(name, ((row - low) / (high - low)).clamp(0.0, 1.0), bins)
    counts = torch.bincount(place, minlength=bins).tolist()
    return _state(family, {str(i): n for i, n in enumerate(counts)}, len(row))


def perplexity(name: str, losses: Tensor) -> State:
    """Gives NAME_perplexity: exp of the mean of `losses` [n], one for each token, in nats."""
    row = _row(name, losses)
    return _state(_family(name, "perplexity", 1), {"nats": float(row.sum())}, len(row))


def _family(name: str, kind: str, size: int, span: tuple[float, ...] = ()) -> Family:
    try:
        return Family(name, kind, size, span)
    except ValueError as error:
        raise TaskError(f"metrics.{kind}: {error}") from error


def _row(name: str, values: Tensor) -> Tensor:
    row = torch.as_tensor(values).detach().to("cpu", torch.float64)
    if row.dim() != 1:
        raise TaskError(f"metrics of {name!r}: values of shape {list(row.shape)}, where [n] is wanted")
    if not row.isfinite().all():
        raise TaskError(f"metrics of {name!r}: {int((~row.isfinite()).sum())} values are not finite")
    return row


def _same(name: str, one: Tensor, other: Tensor) -> None:
    if len(one) != len(other):
        raise TaskError(f"metrics of {name!r}: {len(one)} values beside {len(other)}")


def _bins(name: str, values: Tensor, bins: int) -> Tensor:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    if low < 0.0 or high > 1.0:
        raise TaskError(
            f"metrics of {name!r}: values from {low:g} to {high:g}, where 0 to 1 is wanted; take a sigmoid, "
            "or scale them"
        )
    return (values * bins).long().clamp(max=bins - 1)


def _state(family: Family, cells: Mapping[str, float], count: int) -> State:
    return {family.key(cell): (float(value), count) for cell, value in cells.items()}

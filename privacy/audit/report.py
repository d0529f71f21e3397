"""What canary rounds say about a stated ε: a bound from below, and which of its assumptions does not hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import FtrlLevel
from roundtable.privacy.audit.canary_job import POWER, CanaryJob, CanaryTraces
from roundtable.privacy.audit.gaussian_bounds import (
    Matrix,
    easiest_signs,
    least_mean,
    least_mu,
    least_rate,
    noise_caught,
    odd_noise,
    rate_caught,
)
from roundtable.privacy.audit.step_draws import pairs_of, pairs_refuted, shared_rate_caught
from roundtable.privacy.audit.threshold import threshold_rates

_BOUNDS, _PLACES = 5, 16
# Rounding to float32 and to the grid of discrete noise moves a canary by less than this.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Finding:
    """One thing that the guarantee rests on: what is claimed, the bound that was seen, and the verdict.

    `caught` is the value from which on it would have been caught, for noise and rates with probability
    `POWER`. The kind of noise, which `words` name, is no figure: 1 for what is claimed, 0 for any other.
    """

    name: str
    claimed: float
    seen: float
    refuted: bool
    caught: float
    words: str


@dataclass(frozen=True)
class AuditReport:
    """`stated` and `bound` are ε of the whole job at `delta`; `bound` lies below the truth with `confidence`.

    `guessed` is a bound that assumes nothing of the noise, of the audited rounds alone; None where there
    are too few canaries for one.
    """

    level: str
    delta: float
    stated: float
    bound: float
    guessed: float | None
    confidence: float
    findings: tuple[Finding, ...]

    @property
    def refuted(self) -> bool:
        """Whether what was published contradicts what is stated."""
        worst = max(self.bound, self.guessed or 0.0)
        return worst > self.stated or any(finding.refuted for finding in self.findings)


def report(
    canary: CanaryJob,
    faint: CanaryTraces,
    own: CanaryTraces,
    confidence: float,
    stated: float | None = None,
    whole: CanaryTraces | None = None,
) -> AuditReport:
    """The report of rounds under `FAINT` noise and of others under the job's own.

    `stated` is the ε that a ledger tells (default: what the job's rounds are charged), `whole` are faint
    rounds of all their steps, where batches are drawn. The bounds that it consists of hold together with
    `confidence`. Raises PrivacyError where the
    canaries have left no trace, since nothing can be concluded then.
    """
    each = 1.0 - (1.0 - confidence) / _BOUNDS
    if not (faint.scores > 0.5).any():
        raise PrivacyError(
            "no canary left a trace in what was published: either nobody took part, or contributions are "
            "held below half the clip norm. See that [cohort] lets the job's clients take part"
        )
    change = change_by_one(faint, each)
    apart, sampling = _separation(canary, faint), _sampling(canary, faint, each)
    noise = _noise(canary, faint, own, each)
    odd = odd_noise(own.noise, each)
    kind = Finding("kind of noise", 1.0, 0.0 if odd else 1.0, bool(odd), 0.0, odd or "independent Gaussian")
    steps = _steps(canary, faint, whole, each)
    found = (noise, change, apart, sampling, steps, kind)
    findings = tuple(finding for finding in found if finding is not None)
    rate = sampling.seen if sampling is not None else None
    effective = noise.seen / change.seen
    bound = canary.epsilon(effective, rate) if effective > 0.0 else math.inf
    return AuditReport(
        level=canary.privacy.level,
        delta=canary.privacy.delta,
        stated=canary.epsilon() if stated is None else stated,
        bound=bound,
        guessed=_guessed(canary, own, confidence),
        confidence=confidence,
        findings=findings,
    )


def change_by_one(faint: CanaryTraces, confidence: float) -> Finding:
    """The most that one unit changes, over the clip norm."""
    took_part = faint.scores > 0.5
    counts = took_part.sum(axis=0).astype(np.float64)
    sums = np.where(took_part, faint.scores, 0.0).sum(axis=0)
    # Correlated noise adds up, in the rounds in which one unit took part, to more or less than fresh noise.
    coordinates, part = faint.noise.shape[1], took_part.astype(np.float64)
    squares = (part * (faint.noise @ faint.noise.T @ part)).sum(axis=0) / coordinates
    seen = least_mean(sums, counts, np.sqrt(np.maximum(squares, 0.0)), coordinates, confidence)
    margin = float(sums.sum() / counts.sum()) - seen
    caught = 1.0 + 2.0 * max(margin, _ROUNDING)
    words = f"over {int(counts.sum())} contributions of {int((counts > 0).sum())} canaries"
    return Finding("change by one unit", 1.0, seen, seen > 1.0 + _ROUNDING, caught, words)


def _sampling(canary: CanaryJob, faint: CanaryTraces, confidence: float) -> Finding | None:
    """How often the unit takes part that takes part most often."""
    if canary.rate is None:
        return None
    counts, units = (faint.scores > 0.5).sum(axis=0), faint.scores.shape[1]
    # Of groups that take turns each has its draw in one of so many rounds; more are another finding's fault.
    draws = max(len(faint.scores) // canary.groups, int(counts.max()))
    seen = least_rate(counts, draws, confidence)
    caught = rate_caught(canary.rate, draws, units, confidence, POWER)
    words = f"in {draws} draws of {units} canaries"
    return Finding("sampling rate", canary.rate, seen, seen > canary.rate, caught, words)


def _steps(
    canary: CanaryJob, faint: CanaryTraces, whole: CanaryTraces | None, confidence: float
) -> Finding | None:
    """How often a unit is in two steps of a round: as often as by two coins of its own."""
    if whole is None or canary.rate is None:
        return None
    rounds, units = whole.scores.shape
    steps, rate = canary.steps, canary.rate
    numbers = rounds * units, steps, rate, confidence
    pairs = pairs_of(np.rint(whole.scores / _one_contribution(faint)).astype(np.int64))
    seen = pairs / (rounds * units * (steps * (steps - 1) // 2))
    words = f"two steps with the same canary, over {rounds} rounds of {steps} steps"
    refuted = pairs >= pairs_refuted(*numbers)
    return Finding("draws of steps", rate**2, seen, refuted, shared_rate_caught(*numbers, POWER), words)


def _one_contribution(faint: CanaryTraces) -> NDArray[np.float64]:
    """What each unit adds to a step `[units]`, also where it is clipped too late."""
    took_part = faint.scores > 0.5
    counts, sums = took_part.sum(axis=0), np.where(took_part, faint.scores, 0.0).sum(axis=0)
    typical = np.full(counts.shape, sums.sum() / counts.sum())
    typical[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return typical


def _separation(canary: CanaryJob, faint: CanaryTraces) -> Finding | None:
    """The fewest rounds from one contribution of a unit to its next, which DP-FTRL relies on."""
    if not isinstance(canary.privacy, FtrlLevel):
        return None
    gaps = [np.diff(np.flatnonzero(column)) for column in (faint.scores > 0.5).T]
    least = min((int(gap.min()) for gap in gaps if len(gap)), default=len(faint.scores))
    claimed = canary.separation
    words = f"rounds apart at least, in {len(faint.scores)} rounds"
    return Finding("separation", claimed, least, least < claimed, claimed - 1, words)


def _noise(canary: CanaryJob, faint: CanaryTraces, own: CanaryTraces, confidence: float) -> Finding:
    """The most noise that can have been added, as the noise multiplier of the claim.

    It is measured for a unit that is in all rounds, for the contributions that stand out most (chosen on
    one half of the coordinates, measured on the other), and under DP-FTRL for how canaries really took part;
    where sampling amplifies it, for single rounds all over the run.
    """
    rounds, coordinates = own.noise.shape
    halves = own.noise[:, ::2], own.noise[:, 1::2]
    signal = canary.signal(rounds)
    tried: list[tuple[Matrix, Matrix]] = [(own.noise, signal)]
    if rounds > 1 and not isinstance(canary.privacy, FtrlLevel):
        tried.append((halves[1], easiest_signs(halves[0])))
    if isinstance(canary.privacy, FtrlLevel) and canary.rate is not None:
        tried += [(own.noise, np.eye(rounds)[at]) for at in range(0, rounds, max(1, rounds // _PLACES))]
    elif isinstance(canary.privacy, FtrlLevel):
        patterns = np.unique((faint.scores > 0.5).astype(np.float64).T, axis=0)
        tried += [(own.noise, pattern) for pattern in patterns if pattern.any()]
    each = 1.0 - (1.0 - confidence) / len(tried)
    mu = max(least_mu(values, towards, each) for values, towards in tried)
    seen = canary.noise_behind(mu, rounds)
    claimed = canary.noise_multiplier
    caught = claimed * noise_caught(coordinates, rounds, each, POWER)
    words = f"over {rounds} rounds at {coordinates} coordinates"
    return Finding("noise multiplier", claimed, seen, seen < claimed, caught, words)


def _guessed(canary: CanaryJob, own: CanaryTraces, confidence: float) -> float | None:
    if canary.units < 8:
        return None
    inside, outside = own.scores.sum(axis=0), own.noise.sum(axis=0)
    return threshold_rates(inside, outside, confidence, canary.privacy.delta).epsilon(canary.privacy.delta)

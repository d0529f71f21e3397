"""What a job's privacy will cost and what noise it buys, before anything runs: `roundtable privacy plan`.

Signal-to-noise is the most that the updates can be (every silo's at the clip norm and all in one
direction) over the length of the noise, added up over all rounds. Real updates agree less, so a
ratio below one means that nothing will be learnt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import (
    ClientLevel,
    ClientLocalLevel,
    ExampleLevel,
    FtrlLevel,
    Private,
)
from roundtable.privacy.accounting.accountants import compose
from roundtable.privacy.accounting.drawn_silos import epsilon_over_draws
from roundtable.privacy.accounting.sampling import SamplingModel
from roundtable.privacy.alternatives import Alternative, alternatives_to
from roundtable.privacy.correlation import correlation
from roundtable.privacy.levels import (
    charges,
    correlated_noise,
    example_training,
    level_of,
    noise_for,
    sampling_of,
)
from roundtable.privacy.mechanisms.ftrl import prefix_error
from roundtable.privacy.statement import DRAWN_SILOS

_POINTS = 12
_WEAK, _HOPELESS = 10.0, 1.0
_TINY, _MEANINGLESS = 0.01, 20.0


@dataclass(frozen=True)
class Row:
    """ε after so many rounds, and the greatest signal-to-noise of the model's change by then."""

    round: int
    epsilon: float
    signal_to_noise: float


@dataclass(frozen=True)
class DrawnSilos:
    """At level `example`: ε over a draw that is not known yet, by which a silo trains in some rounds.

    `probability` is that of one of `silos` in a round for which somebody was drawn: others are drawn again.
    """

    silos: int
    probability: float
    rounds_on_average: float
    epsilon: float


@dataclass(frozen=True)
class PrivacyPlan:
    """The table, the comparison and the warnings of one job; `correlation` says how noise is correlated."""

    noise_multiplier: float
    noise_std: float
    epsilon: float
    delta: float
    sampling: str
    correlation: str
    rows: tuple[Row, ...]
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    drawn: DrawnSilos | None = None


@dataclass(frozen=True)
class _Forecast:
    """A job with its noise, over so many clients and parameters."""

    job: JobConfig
    noise: float
    population: int
    dimension: int

    @property
    def sampling(self) -> SamplingModel:
        """How cohorts are drawn."""
        return sampling_of(self.job, self.population)

    def epsilon(self, upto: int) -> float:
        """ε after the first `upto` rounds: of the charges that the ledger takes."""
        privacy = level_of(self.job)
        spent = charges(self.job, self.noise, self.population, self.dimension, upto)
        return compose(spent, privacy.delta, privacy.accountant)

    @property
    def summed(self) -> float:
        """How many contributions of norm C a round adds before the noise that `error` counts."""
        match self.job.privacy:
            case ExampleLevel():
                return float(self._batch * self._steps * self.sampling.cohort)
            case _:
                return float(self.sampling.cohort)

    def error(self, upto: int) -> float:
        """The noise on one coordinate of the sum of the first `upto` rounds, in units of C."""
        match self.job.privacy:
            case FtrlLevel():
                ftrl = correlated_noise(self.job, self.noise, self.population)
                return prefix_error(ftrl, upto) / ftrl.clip_norm
            case ClientLocalLevel():
                return self.noise * math.sqrt(upto * self.sampling.cohort)
            case ExampleLevel():
                return self.noise * math.sqrt(upto * self._steps * self.sampling.cohort)
            case _:
                return self.noise * math.sqrt(upto)

    def signal_to_noise(self, upto: int) -> float:
        """The greatest that it can be after `upto` rounds."""
        return upto * self.summed / (self.error(upto) * math.sqrt(self.dimension))

    @property
    def _batch(self) -> int:
        return self._example[0].batch_size or 1

    @property
    def _steps(self) -> int:
        return self._example[1]

    @property
    def _example(self) -> tuple[ExampleLevel, int]:
        examples = level_of(self.job).population or 1
        return example_training(self.job, examples)


def privacy_plan(job: JobConfig, population: int, dimension: int) -> PrivacyPlan:
    """The plan of a job over so many clients; `dimension` is the length of an update.

    Raises `PrivacyError` for a job without privacy, and where no noise keeps the budget.
    """
    privacy, rounds = level_of(job), max(1, job.rounds)
    if job.releases_sums:
        raise PrivacyError(
            "the job is an analysis: `roundtable analyse FILE --plan` says what each question costs"
        )
    forecast = _Forecast(job, noise_for(job, population, dimension), population, dimension)
    rows = tuple(
        Row(upto, forecast.epsilon(upto), forecast.signal_to_noise(upto))
        for upto in sorted({*_points(rounds), rounds})
    )
    std = forecast.error(1) * privacy.clip_norm / forecast.summed
    epsilon, sampling = rows[-1].epsilon, forecast.sampling
    alternatives: tuple[Alternative, ...] = ()
    if _TINY <= epsilon <= _MEANINGLESS:
        alternatives = alternatives_to(privacy, epsilon, sampling, rounds, dimension)
    correlated = ""
    if isinstance(privacy, FtrlLevel):
        correlated = correlation(job, correlated_noise(job, forecast.noise, population), dimension)
    sentence, drawn = _sentence(privacy, sampling), _drawn(forecast)
    plan = PrivacyPlan(
        forecast.noise, std, epsilon, privacy.delta, sentence, correlated, rows, alternatives, (), drawn
    )
    return replace(plan, warnings=_warnings(plan, privacy, sampling))


def _drawn(forecast: _Forecast) -> DrawnSilos | None:
    """Under a Poisson draw without a minimum, which would favour rounds of which a silo is one of many."""
    job, cohort, silos = forecast.job, forecast.job.cohort, forecast.population
    if not isinstance(job.privacy, ExampleLevel) or cohort.probability is None or cohort.minimum:
        return None
    rounds = max(1, job.rounds)
    chance = min(1.0, cohort.probability / (1.0 - (1.0 - cohort.probability) ** silos))
    [one] = charges(job, forecast.noise, silos, forecast.dimension, 1)
    epsilon = epsilon_over_draws(one, chance, rounds, job.privacy.delta)
    return DrawnSilos(silos, chance, rounds * chance, epsilon)


def weak_signal(job: JobConfig, noise_multiplier: float, population: int, dimension: int) -> str | None:
    """A warning with the greatest signal-to-noise where a job's noise leaves little or nothing; else None."""
    rounds = max(1, job.rounds)
    return _signal(_Forecast(job, noise_multiplier, population, dimension).signal_to_noise(rounds), rounds)


def _signal(ratio: float, rounds: int) -> str | None:
    if ratio < _HOPELESS:
        return (
            f"The noise drowns everything: even if all updates agreed, after {rounds} rounds the signal "
            f"would be {ratio:.2g} of the noise. Take a larger cohort, a smaller model, or a larger budget."
        )
    if ratio < _WEAK:
        return (
            f"Little signal is left: at best {ratio:.2g} times the noise after {rounds} rounds. Expect a "
            "clear loss of accuracy; a larger cohort helps most."
        )
    return None


def _points(rounds: int) -> Sequence[int]:
    return [max(1, round(rounds * i / _POINTS)) for i in range(1, _POINTS + 1)]


def _sentence(privacy: Private, sampling: SamplingModel) -> str:
    match privacy:
        case ClientLevel() | FtrlLevel(cohorts="hidden"):
            return sampling.sentence
        case ExampleLevel():
            inside = (
                "Inside each silo every example joins a step by its own coin: amplification by Poisson "
                "sampling."
            )
            return inside if sampling.rate == 1.0 else f"{inside} {DRAWN_SILOS}"
        case _:
            return "No amplification by sampling is claimed."


def _warnings(plan: PrivacyPlan, privacy: Private, sampling: SamplingModel) -> tuple[str, ...]:
    weak = _signal(plan.rows[-1].signal_to_noise, plan.rows[-1].round)
    found = [weak] if weak else []
    if privacy.epsilon is not None and plan.epsilon > privacy.epsilon:
        found.append(
            f"The given noise spends epsilon = {plan.epsilon:.3g}, above the budget of "
            f"{privacy.epsilon:g}: the job will stop early."
        )
    if isinstance(privacy, ClientLevel) and sampling.kind == "none" and sampling.rate < 1.0:
        found.append(sampling.sentence)
    best = min(plan.alternatives, key=lambda each: each.prefix_error, default=None)
    if isinstance(privacy, ClientLevel) and best is not None and best.name.startswith("DP-FTRL"):
        rests = "" if best.sampled else ", without relying on secret sampling"
        found.append(
            f"{best.name} would have {best.prefix_error:.3g} C of noise on the model at the same "
            f"epsilon{rests}."
        )
    if plan.epsilon > _MEANINGLESS:
        found.append(
            f"epsilon = {plan.epsilon:.3g} is a number without a meaning: it allows e^{plan.epsilon:.0f} "
            "times."
        )
    return tuple(found)


def render(plan: PrivacyPlan) -> str:
    """The plan as text for a terminal."""
    lines = [
        f"noise multiplier {plan.noise_multiplier:.4g}, noise on the mean update {plan.noise_std:.4g} a "
        "coordinate",
        plan.sampling,
        *([plan.correlation] if plan.correlation else []),
        "",
        f"{'round':>8} {'epsilon':>10} {'signal/noise':>13}   (delta = {plan.delta:g})",
    ]
    lines += [f"{row.round:>8} {row.epsilon:>10.4f} {row.signal_to_noise:>13.4g}" for row in plan.rows]
    if plan.drawn is not None:
        lines += [
            "",
            f"The table is of a silo that trains in every round. If all of {plan.drawn.silos} silos answer "
            f"when drawn, each trains in a round with probability {plan.drawn.probability:.4g}, in "
            f"{plan.drawn.rounds_on_average:.3g} rounds on average: over the draw, epsilon = "
            f"{plan.drawn.epsilon:.4f} at the same delta, against all who do not choose it.",
        ]
    if plan.alternatives:
        lines += ["", f"At epsilon = {plan.epsilon:.4g}, the noise on the sum of all updates, in units of C:"]
    for each in plan.alternatives:
        lines.append(f"  {each.name:<34}{each.prefix_error:>9.4g}   signal/noise {each.signal_to_noise:.4g}")
        lines.append(f"      {each.remark}")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan.warnings)])


def plot(plan: PrivacyPlan, path: Path) -> None:
    """Draws ε and the signal-to-noise over the rounds into an image file. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PrivacyError("a plot needs matplotlib: pip install 'roundtable-fl[plot]'") from error
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    left = figure.subplots()
    rounds = [row.round for row in plan.rows]
    (spent,) = left.plot(rounds, [row.epsilon for row in plan.rows], "o-", color="tab:blue")
    left.set(xlabel="round", ylabel=f"epsilon at delta = {plan.delta:g}", ylim=(0.0, None))
    right = left.twinx()
    (signal,) = right.plot(rounds, [row.signal_to_noise for row in plan.rows], "s--", color="tab:orange")
    right.set(ylabel="greatest signal-to-noise", ylim=(0.0, None))
    left.legend([spent, signal], ["epsilon spent", "signal-to-noise"], loc="lower right")
    figure.savefig(path)

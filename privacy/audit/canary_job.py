"""A job's own mechanism over canaries: what to run, and how to read what it publishes.

Everything that the guarantee rests on is the job's: level, clip norm, noise, sampling, separation, shares,
steps and batches at a silo. Model, data and local training are those of `CanaryTask`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from roundtable.core.config import JobConfig
from roundtable.core.encodings import get_encoding
from roundtable.core.encodings.sparse import RandomK
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import (
    ClientLocalLevel,
    DistributedLevel,
    ExampleLevel,
    FtrlLevel,
    OwnNoise,
    Private,
    groups_of,
)
from roundtable.privacy.accounting.accountants import compose
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.audit.canary_task import CanaryTask
from roundtable.privacy.audit.step_draws import shared_rate_caught
from roundtable.privacy.levels import (
    charges,
    correlated_noise,
    example_training,
    level_of,
    noise_for,
    sampling_of,
    shared_noise,
)
from roundtable.privacy.mechanisms.ftrl import MatrixMechanism

FAINT = 0.005
"""The noise, over what one unit can change, under which canaries are heard one by one."""
POWER = 0.99
_MOST_UNITS = 4096
_MOST_FAINT_ROUNDS, _MOST_TURNS, _OWN_ROUNDS = 64, 512, 3


@dataclass(frozen=True)
class CanaryTraces:
    """What rounds published, in units of what one contribution may change.

    `scores` `[rounds, units]` are near 1 where a canary took part, `noise` `[rounds, free]` is the noise.
    """

    scores: NDArray[np.float64]
    noise: NDArray[np.float64]


@dataclass(frozen=True)
class CanaryJob:
    """A job to audit: `population` clients, or at level `example` so many records in a silo.

    `noise_multiplier` is what the job states, `free` how many coordinates show noise alone, `folder` where an
    encoding or a rule in a file lies.
    """

    job: JobConfig
    noise_multiplier: float
    population: int
    free: int
    folder: Path | None = None

    @classmethod
    def of(cls, job: JobConfig, clients: int, free: int, folder: Path | None = None) -> CanaryJob:
        """The audit of a job over so many clients.

        Raises PrivacyError for a job without a guarantee, and where an audit could not read what is
        published: buffered rounds, and the means of groups, to which a rule is put.
        """
        privacy = level_of(job)
        if job.round.mode != "synchronous":
            raise PrivacyError(
                f'round.mode = "{job.round.mode}": an audit reads rounds that all begin with one model; '
                "audit the job with synchronous rounds"
            )
        if job.releases_sums:
            raise PrivacyError(
                "the job is an analysis, and a canary is a record that trains: benchmarks/survey_privacy.py "
                "audits the noise of analyses"
            )
        population = clients
        match privacy:
            case DistributedLevel():
                if privacy.group_size is not None:
                    raise PrivacyError(
                        f"privacy.group_size = {privacy.group_size}: a rule over the means of groups hides "
                        "their noise from an audit; audit the job without groups"
                    )
                population = job.cohort.size or clients
            case ClientLocalLevel():
                population = 1
            case ExampleLevel():
                if privacy.population is None:
                    raise PrivacyError("an audit needs privacy.population: the examples of a silo")
                population = privacy.population
            case _:
                pass
        draft = cls(job, 1.0, population, free, folder)
        return replace(draft, noise_multiplier=noise_for(job, population, draft.dimension))

    @property
    def privacy(self) -> Private:
        """The job's level."""
        return level_of(self.job)

    @property
    def units(self) -> int:
        """How many units are canaries; those beyond take part without a trace."""
        return min(self.population, _MOST_UNITS)

    @property
    def clients(self) -> int:
        """How many clients the canary rounds have: one, where each silo hides its own data by itself."""
        return 1 if isinstance(self.privacy, OwnNoise) else self.population

    @property
    def dimension(self) -> int:
        """The length of an update of the canary task."""
        return 1 + self.units + self.free

    @property
    def rate(self) -> float | None:
        """The probability with which a unit takes part in a draw; None where none is claimed."""
        charge = self._charges(self.noise_multiplier, 1)[0]
        match charge.sampling:
            case "poisson":
                return charge.rate
            case "fixed_size":
                return charge.sample / charge.population
            case _:
                return None

    def task(self) -> CanaryTask:
        """The task of the canary rounds."""
        examples = self.population if isinstance(self.privacy, ExampleLevel) else 0
        return CanaryTask(self.units, self.free, self.privacy.clip_norm, examples)

    def faint_rounds(self, confidence: float) -> int:
        """So many rounds of faint noise that a unit which is always drawn stands out."""
        if self.rate is None:
            return max(1, self.job.rounds) if isinstance(self.privacy, FtrlLevel) else 2
        surprise = math.log(8.0 * self.units / (1.0 - confidence))
        wanted = math.ceil(3.0 * surprise / -math.log(min(self.rate, 0.999)))
        most = max(4, min(_MOST_FAINT_ROUNDS, _MOST_TURNS // self.groups))
        return min(max(wanted, 4), most) * self.groups

    @property
    def steps(self) -> int:
        """Steps of a round that each draw a batch of their own; 1 at all levels but `example`."""
        return example_training(self.job, self.population)[1] if isinstance(self.privacy, ExampleLevel) else 1

    def step_rounds(self, confidence: float) -> int:
        """So many rounds of all their steps that batches drawn once a round are caught; 0 where none is."""
        if self.steps < 2 or self.rate is None or self.rate >= 1.0:
            return 0
        rounds = 1
        while rounds < _MOST_FAINT_ROUNDS and self.rate < shared_rate_caught(
            rounds * self.units, self.steps, self.rate, confidence, POWER
        ):
            rounds *= 2
        return rounds

    def own_rounds(self, wanted: int | None = None) -> int:
        """How many rounds are run under the job's own noise: all of DP-FTRL's, which belong together."""
        rounds = max(1, self.job.rounds)
        return rounds if isinstance(self.privacy, FtrlLevel) else min(wanted or _OWN_ROUNDS, rounds)

    def config(self, rounds: int, seed: int, faint: bool = False, steps: int | None = None) -> JobConfig:
        """The job that runs canaries under the job's own noise, or with `faint` under next to none.

        At level `example` `steps` are those of a round: one if faint, so that each draw of a batch is seen by
        itself, unless stated. Faint rounds send all values, so that each canary that is drawn is heard.
        """
        privacy = self.privacy
        change: dict[str, Any] = {"epsilon": None, "noise_multiplier": self.noise_multiplier}
        if isinstance(privacy, ExampleLevel):
            filled, _ = example_training(self.job, self.population)
            steps = steps or (1 if faint else self.steps)
            change |= {"batch_size": filled.batch_size, "local_steps": steps}
        if faint:
            # Only a Rényi curve can be drawn for so little noise, and nobody looks at these rounds' epsilon.
            spread = self._sensitivity(rounds) * math.sqrt(steps or 1)
            change |= {"noise_multiplier": FAINT / spread, "accountant": "rdp"}
        alone = isinstance(privacy, OwnNoise)
        values = {
            "task": "canaries",
            "rounds": rounds,
            "seed": seed,
            "cohort": {"size": 1} if alone else self.job.cohort.model_dump(),
            "algorithm": {"learning_rate": 1.0, "steps": 1, "batch_size": 1},
            "aggregation": {"weighting": "uniform"},
            "evaluation": {"every": 0},
            "privacy": {**privacy.model_dump(), **change},
            "transfer": {} if alone or (faint and self._sample) else self._transfer,
            "simulation": {
                "clients": self.clients,
                "backend": "sequential",
                "masking": self.job.simulation.masking,
            },
        }
        return JobConfig.model_validate(values)

    def traces(
        self, models: Sequence[Tensor], clip_norms: Sequence[float], faint: bool = False
    ) -> CanaryTraces:
        """What each round added to the model before it; `models` are those of rounds 0 to R `[dimension]`.

        `clip_norms` are those in force in rounds 1 to R, `faint` as in `config`. Noise that random-k has set
        to zero is left out.
        """
        vectors = np.stack([model.double().numpy() for model in models])
        steps = np.diff(vectors, axis=0) * self._denominator / np.asarray(clip_norms)[:, None]
        scores, noise = steps[:, 1 : 1 + self.units], steps[:, 1 + self.units :]
        sample = None if faint else self._sample
        if sample is None:
            return CanaryTraces(scores, noise)
        drawn = [row[row != 0] for row in noise]
        shown = min(map(len, drawn))
        return CanaryTraces(scores / sample.factor, np.stack([row[:shown] for row in drawn]) / sample.factor)

    def signal(self, rounds: int) -> NDArray[np.float64]:
        """How much a unit that takes part as often as one release may tell contributes to each round."""
        signal = np.ones(rounds)
        if isinstance(self.privacy, FtrlLevel):
            signal[np.arange(rounds) % self._correlated(rounds).period != 0] = 0.0
        return signal

    @property
    def groups(self) -> int:
        """Groups of silos that take turns: a unit can be in one of so many rounds."""
        return groups_of(self.privacy)

    @property
    def separation(self) -> int:
        """Rounds from one contribution of a silo to its next (`dp_ftrl`)."""
        return self._correlated(1).separation if isinstance(self.privacy, FtrlLevel) else 1

    def noise_behind(self, mu: float, rounds: int) -> float:
        """The noise multiplier with which so many rounds would tell a unit's `signal` by μ.

        Noise in shares counts as what is left of it for somebody who knows the shares of all but the honest
        silos that the guarantee relies on.
        """
        match self.privacy:
            case FtrlLevel():
                return 1.0 / mu
            case DistributedLevel():
                shared = shared_noise(self.job, self.noise_multiplier, self.dimension)
                return math.sqrt(rounds * shared.honest / self.population) / mu
            case ExampleLevel():
                return math.sqrt(rounds / example_training(self.job, self.population)[1]) / mu
            case _:
                return math.sqrt(rounds) / mu

    def epsilon(self, noise_multiplier: float | None = None, rate: float | None = None) -> float:
        """ε of the whole job, with the noise and the sampling that it states, or with others."""
        spent = self._charges(noise_multiplier or self.noise_multiplier, max(1, self.job.rounds))
        if rate is not None:
            spent = [_at_rate(charge, rate) for charge in spent]
        return compose(spent, self.privacy.delta, self.privacy.accountant)

    def _charges(self, noise_multiplier: float, upto: int) -> Sequence[Charge]:
        return charges(self.job, noise_multiplier, self.population, self.dimension, upto)

    @property
    def _denominator(self) -> float:
        match self.privacy:
            case DistributedLevel():
                return float(self.population)
            case ClientLocalLevel():
                return 1.0
            case ExampleLevel():
                return float(example_training(self.job, self.population)[0].batch_size or 1)
            case _:
                return sampling_of(self.job, self.population).cohort

    @property
    def _transfer(self) -> dict[str, Any]:
        """How updates travel before the noise.

        What is encoded after it, by a silo that hides its own data or on the way down, is no Gaussian any
        more, and no less private.
        """
        return {**self.job.transfer.model_dump(), "down": "float32"}

    @property
    def _sample(self) -> RandomK | None:
        """The random-k whose factor follows the noise; None where there is none."""
        own = isinstance(self.privacy, OwnNoise)
        encoding = None if own else get_encoding(self.job.transfer.up, self.folder)
        return encoding if isinstance(encoding, RandomK) else None

    def _correlated(self, rounds: int) -> MatrixMechanism:
        job = self.job.model_copy(update={"rounds": rounds})
        return correlated_noise(job, self.noise_multiplier, self.population)

    def _sensitivity(self, rounds: int) -> float:
        if not isinstance(self.privacy, FtrlLevel):
            return 1.0
        return self._correlated(rounds).sensitivity(rounds)


def _at_rate(charge: Charge, rate: float) -> Charge:
    match charge.sampling:
        case "poisson":
            return replace(charge, rate=min(1.0, max(rate, 1e-9)))
        case "fixed_size":
            sample = min(charge.population, max(1, math.floor(rate * charge.population)))
            return replace(charge, sample=sample)
        case _:
            return charge

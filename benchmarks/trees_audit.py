"""Audits boosted trees under noise: what a silo releases in all rounds of a job, beside the ε that it pays.

    python benchmarks/trees_audit.py [--jobs 400] [--json FILE]

The auditor is a coordinator that lies: it knows every row of a silo but one, the canary, and publishes such
weights that the canary's gradient is as large as it may be in each round. Half of the jobs have the canary.
What the silo sends (through its own code: sums, noise, charge, digits) less the exact sums without the canary
is noise, and where the canary is the change that it makes. Two bounds from below, each with 95 % confidence:

guesses   jobs are told apart by the score along that change, at the best threshold (Clopper & Pearson)
noise     the covariance of the noise of all rounds, and the size of the change
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import Execution, LocalWork
from roundtable.client.training.silo_account import Protection
from roundtable.core.algorithms.analysis import AnalysisTable
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.analyses.boosted_trees.tree_growing import NONE
from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.config import JobConfig
from roundtable.core.initial_model import initial_model
from roundtable.core.tables.table_reading import DataTable
from roundtable.core.task import ArrayTask, Site, load_task
from roundtable.privacy import Charge, compose, sums_charge
from roundtable.privacy.audit.gaussian_bounds import least_mu, odd_noise
from roundtable.privacy.audit.threshold import threshold_rates
from roundtable.surveys import load_survey, survey_job

DELTA, CONFIDENCE = 1e-6, 0.95
SURVEY = """
table = "people"
secure_aggregation = false
[privacy]
epsilon = {epsilon}
delta = 1e-6
[columns.age]
least = 0
most = 100
[columns.rate]
least = 40
most = 200
[columns.cost]
least = 0
most = 1000
[columns.ill]
kind = "category"
values = ["no", "yes"]
[[questions]]
ask = "boosted_trees"
on = ["age", "rate"]
{question}
"""
KINDS = {
    "a number, splits at random": 'outcome = "cost"\nrounds = 4\nmax_depth = 2\nbins = 4',
    "a number, best splits": 'outcome = "cost"\nrounds = 2\nmax_depth = 2\nbins = 4\nsplits = "best"',
    "a category, splits at random": 'outcome = "ill"\nrounds = 4\nmax_depth = 2\nbins = 4',
}
LIE = -1e30
"""The weight of every leaf that the coordinator publishes: margins at which gradients are at their bounds."""
_BEGAN = {"algorithm/seen": torch.ones(1)}


@dataclass(frozen=True)
class AuditedTrees:
    """ε that the silo's account has paid, what bounds it from below, what the audited row moves of 1, and how
    the noise differs from independent Gaussian draws, in words."""

    claimed: float
    guessed: float
    noise: float
    change: float
    odd: str


class AuditedSilo:
    """A silo of 40 rows, and with the canary of one more, that answers a job's rounds one by one."""

    def __init__(self, folder: Path, epsilon: float, question: str) -> None:
        (folder / "survey.toml").write_text(SURVEY.format(epsilon=epsilon, question=question))
        self.job: JobConfig = survey_job(load_survey(folder / "survey.toml"), 1)
        algorithm = self.job.algorithm
        assert isinstance(algorithm, AnalysisTable)
        self.survey = algorithm.survey
        self.rounds = self.survey.rounds
        self._folder = folder
        self._task = load_task("analysis", folder)
        self._layout = initial_model(self.job, self._task).layout
        self.charges: list[Charge] = []
        draw = np.random.default_rng(5)
        numbers = draw.integers((0, 40, 0), (100, 200, 1000), (40, 3))
        self._rows = [
            ",".join([*map(str, each), "yes" if ill else "no"])
            for each, ill in zip(numbers, draw.random(40) < 0.5, strict=True)
        ]
        corners = product((0, 100), (40, 200), (0, 1000), ("no", "yes"))
        self._write(None)
        without = self._exact()
        changes = {}
        for age, rate, cost, ill in corners:
            row = f"{age},{rate},{cost},{ill}"
            self._write(row)
            changes[row] = [some - none for some, none in zip(self._exact(), without, strict=True)]
        self._canary = max(changes, key=lambda row: float(sum((each**2).sum() for each in changes[row])))
        self.change = changes[self._canary]
        self._without = without
        self._write(None)

    def _write(self, canary: str | None) -> None:
        rows = [*self._rows, *([canary] if canary else [])]
        (self._folder / "people.csv").write_text("\n".join(["age,rate,cost,ill", *rows]) + "\n")

    def lies(self, stage: int) -> dict[str, Doubles]:
        """What the coordinator publishes before a stage."""
        public = self.survey.public_places.unpack(torch.zeros(self.survey.public_places.size))
        if stage == 0:
            return public
        question: Any = self.survey.questions[0]
        cuts = question.bins.begin()
        for place in question.bins.ranges:
            cuts[place] = np.linspace(*_span(cuts[place]), len(cuts[place]))
        split, (tree, level) = question._drawn(cuts), question._place(stage)
        if not question.drawn:  # What is not yet split of the tree that grows, and the trees behind it.
            split[tree, 2**level - 1 :] = NONE
            split[tree + 1 :] = NONE
        public["0.split"], public["0.cuts"] = split, cuts
        public["0.weight"][:] = LIE
        public["0.base"][:] = 0.5
        public["0.stage"][:] = stage
        public["silos"][:] = 1
        return public

    def _table(self) -> DataTable:
        site = Site("silo", options={"people": {"file": str(self._folder / "people.csv")}})
        data: Any = self._task.data(site)
        table: DataTable = data.read("people", self.survey.needed, fresh=True, lenient=True)
        return table

    def _exact(self) -> list[Doubles]:
        table = self._table()
        return [self._flat(self.survey.sums(table, self.lies(stage)), stage) for stage in range(self.rounds)]

    def _flat(self, sums: Mapping[str, Any], stage: int) -> Doubles:
        return np.concatenate([np.asarray(sums[name]).ravel() for name in self.survey.released(stage)])

    def answers(self, canary: bool) -> list[Doubles]:
        """What the silo sends in each round of one job, less the exact sums without the canary."""
        self._write(self._canary if canary else None)
        self.charges = []
        found, kept = [], None
        assert isinstance(self._task, ArrayTask)
        data = self._task.data(Site("silo", options={"people": {"file": str(self._folder / "people.csv")}}))
        places = self.survey.sum_places
        for stage in range(self.rounds):
            down = self.survey.public_places.pack(self.lies(stage))
            vector = torch.cat([torch.zeros(self._layout.size - len(down)), down])
            algorithm = make_algorithm(self.job.algorithm)
            work = LocalWork(self.job, self._layout, vector, stage + 1, "silo", kept, algorithm, alone=True)
            protection = Protection(lambda privacy, charge: self.charges.append(charge))
            sent = train(self._task, self._task.weights(), data, work, Execution(protection=protection))
            kept = _BEGAN
            sums = places.decode(sent.delta[-places.size :], 1)
            found.append(self._flat(sums, stage) - self._without[stage])
        return found


def _span(cuts: Doubles) -> tuple[float, float]:
    return float(cuts.min()), float(cuts.max())


def audit(silo: AuditedSilo, jobs: int, confidence: float = CONFIDENCE) -> AuditedTrees:
    """Of so many jobs, half of them with the canary."""
    sizes = np.array([float(np.linalg.norm(each)) for each in silo.change])
    whole = float(np.linalg.norm(sizes))
    scores: dict[bool, list[float]] = {True: [], False: []}
    noise: list[list[Doubles]] = [[] for _ in silo.change]
    least = min(len(each) for each in silo.change)
    for number in range(jobs):
        canary = number % 2 == 1
        sent = silo.answers(canary)
        score = sum(float(own @ each) for own, each in zip(silo.change, sent, strict=True)) / whole
        scores[canary].append(score)
        for stage, each in enumerate(sent):
            own = each - silo.change[stage] if canary else each
            noise[stage].append(own[:least])
    claimed = compose(silo.charges, DELTA)
    rates = threshold_rates(np.array(scores[True]), np.array(scores[False]), confidence, DELTA)
    measured = np.stack([np.concatenate(each) for each in noise])
    mu = least_mu(measured, sizes, confidence)
    odd = odd_noise(measured, 1 - 1e-6)
    return AuditedTrees(claimed, _epsilon(rates.mu), _epsilon(mu), whole, odd)


def _epsilon(mu: float) -> float:
    """Of a Gaussian release that is as hard to tell apart."""
    return mu if mu in (0.0, math.inf) else compose([sums_charge(1 / mu)], DELTA)


def audits(jobs: int, epsilons: Sequence[float]) -> Iterator[tuple[str, AuditedTrees]]:
    """Each kind of trees at each ε."""
    for kind, question in KINDS.items():
        for epsilon in epsilons:
            with TemporaryDirectory() as folder:
                yield kind, audit(AuditedSilo(Path(folder), epsilon, question), jobs)


def main() -> None:
    """Prints a line for each kind of trees and ε."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, told = time.process_time(), []
    print(
        f"{'trees':<30} {'claimed':>8} {'noise':>8} {'guesses':>8} {'change':>8}   (95 %, delta = {DELTA:g})"
    )
    for kind, found in audits(options.jobs, (1.0, 4.0)):
        told.append({"trees": kind, **found.__dict__})
        print(
            f"{kind:<30} {found.claimed:8.3f} {found.noise:8.3f} {found.guessed:8.3f} {found.change:8.4f}   "
            f"{'REFUTED' if max(found.noise, found.guessed) > found.claimed else 'holds'} {found.odd}",
            flush=True,
        )
    print(f"{time.process_time() - began:.0f} s of processor time")
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Judges jobs by the silo's rules: the `[policy]` and `[tasks]` tables of its agent.toml.

Everything here is decided at the silo, from the job as it came and from this file; the coordinator is
asked nothing. Each objection is one sentence that names the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from roundtable.client.policy.analysis_rules import analysis_objections
from roundtable.client.policy.policy_table import PolicyTable, TaskTable, hours_of
from roundtable.client.policy.privacy_rules import privacy_objections
from roundtable.core.algorithms.known_algorithms import find_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.encodings.foreign.approval import not_approved
from roundtable.core.errors import ConfigError
from roundtable.core.identity.signing import VOUCHED_FOR
from roundtable.core.privacy_table import ExampleLevel, hides_figures
from roundtable.core.task import hash_of_task

Metrics = Mapping[str, tuple[float, int]]


@dataclass(frozen=True)
class Rules:
    """A silo's rules, complete: `references` says which code a job's task is here, `tables` what it may, and
    `encodings` which encodings of others may run, with the hashes of their code."""

    policy: PolicyTable
    references: Mapping[str, str]
    tables: Mapping[str, TaskTable] = field(default_factory=dict)
    encodings: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=Path.cwd)
    on_cluster: bool = False
    """Whether the silo trains on its [cluster], whose ranks write their own parts of an update."""

    def objections(self, job: JobConfig, submitter: str | None, now: datetime) -> list[str]:
        """The reasons for which this silo does not take part in the job; empty if it does.

        `submitter` is the name that a checked signature gives, None for a job without one. The signature is
        the submitter's own, or for one with a token the coordinator's.
        """
        return [
            *self.to_task(job),
            *self._to_submitter(submitter),
            *self._to_size(job),
            *self._to_encoding(job),
            *self._to_sums(job),
            *self._to_losses(job),
            *privacy_objections(self.policy, job),
            *analysis_objections(self.policy.analyses, job),
            *self._to_time(now),
        ]

    def to_evaluation(self, job: JobConfig, round: int) -> list[str]:
        """Why metrics of the model of this round do not leave the silo; empty if they do."""
        every, reasons = job.evaluation.every, []
        if job.evaluation.bounds:
            reasons.append("the job's metrics leave inside its secure sums alone (evaluation.bounds)")
        if every == 0 or (round % every and round != job.rounds):
            reasons.append(f"the job evaluates no model of round {round} (evaluation.every = {every})")
        if hides_figures(job.privacy) and not self.policy.public_evaluation:
            reasons.append(
                "metrics of a single silo would leave it in the clear, and the job hides everything else; "
                "only where this silo's test data are public may they ([policy] public_evaluation = true)"
            )
        return reasons

    def task_name(self, task: str) -> str:
        """The name in `[tasks]` that a job's task has here; its plain name where there is none."""
        return task if task in self.references else Path(task.partition(":")[0]).stem

    def leaving(self, metrics: Metrics) -> dict[str, tuple[float, int]]:
        """What of these sums may leave the silo, rounded as the policy says."""
        if self.policy.metrics == "none":
            return {}
        digits = self.policy.metrics_digits
        if digits is None:
            return dict(metrics)
        sound = {name: (s, n) for name, (s, n) in metrics.items() if n and math.isfinite(s)}
        return {name: (round(total / count, digits) * count, count) for name, (total, count) in sound.items()}

    def to_task(self, job: JobConfig) -> Iterator[str]:
        """What speaks against running the job's task here, whatever else the job says."""
        name = self.task_name(job.task.name)
        reference = self.references.get(name)
        if reference is None:
            offered = ", ".join(sorted(self.references)) or "none"
            yield f"this silo does not offer the task {job.task.name!r}; it offers: {offered} ([tasks])"
            return
        table = self.tables.get(name)
        allowed = table.parameters if table else []
        if others := [key for key in job.task.parameters if key not in allowed]:
            yield (
                f"the job sets {', '.join(map(repr, others))} of the task {name!r}, and this silo lets "
                f"jobs set {', '.join(allowed) or 'none'} of its parameters ([tasks.{name}] parameters)"
            )
        if table is None or table.blake3 is None:
            return
        try:
            digest = hash_of_task(reference, self.folder)
        except ConfigError as error:
            yield str(error)
            return
        if digest != table.blake3:
            yield (
                f"the code of the task {name!r} is not the one that was allowed: its hash begins with "
                f"{digest[:12]}, [tasks.{name}] blake3 with {table.blake3[:12]}"
            )

    def _to_submitter(self, submitter: str | None) -> Iterator[str]:
        allowed = self.policy.submitters
        if allowed is None or submitter in allowed:
            return
        if submitter is None:
            yield "the job is not signed by its submitter, and [policy] submitters names who must have"
        else:
            word = "; to go by the coordinator's word for a token, list it there under that name"
            hint = word if submitter.startswith(VOUCHED_FOR) else ""
            yield f"{submitter!r} may not submit jobs for this silo ([policy] submitters){hint}"

    def _to_size(self, job: JobConfig) -> Iterator[str]:
        policy, asked, private = self.policy, job.algorithm, job.privacy
        steps, batch = asked.steps, asked.batch_size
        if isinstance(private, ExampleLevel):
            steps, batch = private.local_steps or steps, private.batch_size or batch
        if steps is not None and policy.steps is None and policy.epochs is not None:
            yield "the job counts steps, and this silo bounds epochs ([policy] steps)"
        if steps is None and policy.epochs is None and policy.steps is not None:
            yield "the job counts epochs, and this silo bounds steps ([policy] epochs)"
        wishes = [
            ("rounds", job.rounds, policy.rounds),
            ("epochs", asked.passes if steps is None else None, policy.epochs),
            ("steps", steps, policy.steps),
            ("batch_size", batch, policy.batch_size),
        ]
        for name, wanted, most in wishes:
            if wanted is not None and most is not None and wanted > most:
                yield f"the job asks for {name} = {wanted}, and this silo allows {most} ([policy] {name})"

    def _to_encoding(self, job: JobConfig) -> Iterator[str]:
        yield from not_approved(job.transfer.foreign, self.encodings, "this silo", "agent.toml")
        if self.on_cluster and job.common_rank is not None:
            yield (
                f"the job's updates travel as {job.transfer.up!r} ([transfer] up) with a basis behind the "
                "model, which the ranks of a [cluster] do not know"
            )

    def _to_sums(self, job: JobConfig) -> Iterator[str]:
        if job.regions.sum and self.policy.relay_sums == "refuse":
            yield (
                "relays add up the job's updates (regions.sum), so that what counts is a relay's word, and "
                "this silo does not allow that ([policy] relay_sums)"
            )
        if job.regions.rounds > 1 and not self.policy.regional_models:
            yield (
                f"up to {job.regions.rounds - 1} rounds on end the job works with a relay's own models "
                "(regions.rounds), and this silo takes no relay's ([policy] regional_models)"
            )

    def _to_losses(self, job: JobConfig) -> Iterator[str]:
        """An algorithm that is not known here is refused where it is to be made."""
        key = "metrics_digits" if self.policy.metrics == "all" else "metrics"
        if self.policy.metrics == "all" and self.policy.metrics_digits is None:
            return
        with suppress(ConfigError):
            if find_algorithm(job.algorithm.name).tells_loss:
                yield (
                    f"what clients send of algorithm {job.algorithm.name!r} tells the loss on all of their "
                    f"training data, exactly, and this silo lets no such figure leave ([policy] {key})"
                )

    def _to_time(self, now: datetime) -> Iterator[str]:
        if self.policy.hours is None:
            return
        first, last = hours_of(self.policy.hours)
        clock = now.time()
        inside = first <= clock < last if first <= last else clock >= first or clock < last
        if not inside:
            yield f"this silo works from {first:%H:%M} to {last:%H:%M} ([policy] hours)"

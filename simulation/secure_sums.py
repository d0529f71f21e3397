"""Secure aggregation in a simulation: the protocol itself among the round's clients, or only its sum.

`simulation.masking = "real"` runs every client's and the coordinator's state machine with fresh
keys, and loses the clients whose updates did not arrive where they would be lost. "fast" computes
the same integers without keys, masks and messages; the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roundtable.aggregation import TensorMatrix
from roundtable.client.training.metrics import Metrics
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, PrivacyError, ProtocolError
from roundtable.core.layout import Layout
from roundtable.core.privacy_table import masking_of
from roundtable.core.seeds import numpy_generator
from roundtable.engine import GroupMeans, Mean
from roundtable.engine.messages import Step, Update
from roundtable.engine.validation.secure_feasibility import least_of_groups
from roundtable.privacy import SecureMean, SecureRound, SeededNoise, values_masked
from roundtable.privacy.secagg import (
    SecureSum,
    ServerPhase,
    VectorSource,
    plain_groups,
    plain_sum,
    run_groups_in_memory,
    run_in_memory,
)


@dataclass(frozen=True)
class SecureAggregation:
    """How the mean of a round is made where nobody may see a single update."""

    job: JobConfig
    sent: Layout

    @classmethod
    def of(cls, job: JobConfig, sent: Layout) -> SecureAggregation | None:
        """The job's secure aggregation of updates of this layout; None where it asks for none."""
        return None if masking_of(job.privacy) is None else cls(job, sent)

    @property
    def label(self) -> str:
        """What was done, for people and for the record."""
        if self.job.simulation.masking == "fast":
            return "its sum alone (simulation.masking = fast): no masks were made"
        return "the protocol ran among all clients of the round"

    def received(
        self,
        step: Step,
        cohort: Sequence[str],
        updates: Sequence[Update],
        rows: Sequence[Tensor],
        before: Mapping[str, Metrics],
    ) -> Mean | GroupMeans:
        """The mean of the updates that arrived, or those of their groups; `rows[i]` is that of `updates[i]`,
        and begins with the values that are masked.

        `before` are, by client, the metrics of the model that the round began with, where it sums any.
        Raises AggregationError where too few clients are left for the protocol to give a sum.
        """
        try:
            columns = values_masked(self.job, self.sent, step.round)
            secure = SecureRound.of(self.job, columns, len(cohort), step.round)
            sources = {
                update.client: self._source(secure, step, update, row, before.get(update.client, {}))
                for update, row in zip(updates, rows, strict=True)
            }
            mean = (
                self._groups(secure, step, cohort, sources)
                if secure.grouped
                else self._mean(secure, cohort, sources)
            )
        except (PrivacyError, ProtocolError) as error:
            raise AggregationError(f"secure aggregation: {error}") from error
        # Rounding, noise and groups are seeded, so that a run can be repeated; no guarantee rests on them.
        return replace(mean, account={**mean.account, "secure_aggregation": self.label, "guarantee": False})

    def _source(
        self, secure: SecureRound, step: Step, update: Update, row: Tensor, before: Metrics
    ) -> VectorSource:
        path = (step.round, step.attempt, update.client)
        return secure.encode(
            row[: secure.columns].cpu().numpy(),
            update.examples,
            update.loss,
            before,
            numpy_generator(self.job.seed, *path, "rounding"),
            SeededNoise(self.job.seed, *path, "noise"),
        )

    def _mean(self, secure: SecureRound, cohort: Sequence[str], sources: Mapping[str, VectorSource]) -> Mean:
        secure_sum = self._sum(secure, cohort, sources)
        mean = secure.decode(secure_sum.total, len(secure_sum.survivors), len(cohort))
        return Mean.of_secure_sum(mean)

    def _groups(
        self, secure: SecureRound, step: Step, cohort: Sequence[str], sources: Mapping[str, VectorSource]
    ) -> GroupMeans:
        """One mean for each group that is left."""
        least = least_of_groups(self.job, len(cohort))
        path = (self.job.seed, step.round, step.attempt)
        nonces = [numpy_generator(*path, client, "nonce").bytes(32) for client in cohort]
        if self.job.simulation.masking == "real":
            vectors, silent = self._vectors(cohort, sources)
            outcome = run_groups_in_memory(vectors, secure.parameters, nonces, least, silent)
        else:
            here = {place: sources[name] for place, name in enumerate(cohort) if name in sources}
            outcome = plain_groups(here, secure.parameters, nonces, least)
        decoded: list[tuple[tuple[str, ...], SecureMean | str]] = []
        rows = []
        for number, group_sum in outcome.sums.items():
            members = tuple(cohort[place] for place in outcome.members[number])
            try:
                mean = secure.decode(group_sum.total, len(group_sum.survivors), len(members))
            except AggregationError as error:
                decoded.append((members, str(error)))
                rows.append(torch.full((secure.columns,), torch.nan))
            else:
                decoded.append((members, mean))
                rows.append(mean.vector)
        lost = {
            cohort[place]: f"its group was lost: {reason}"
            for number, reason in outcome.lost.items()
            for place in outcome.members[number]
            if cohort[place] in sources
        }
        return GroupMeans.of(TensorMatrix.from_vectors(rows), decoded, lost)

    @staticmethod
    def _vectors(
        cohort: Sequence[str], sources: Mapping[str, VectorSource]
    ) -> tuple[list[VectorSource], dict[int, ServerPhase]]:
        """Everybody's vector, and who falls silent before it would arrive."""
        silent = next(iter(sources.values()))
        lost = {place: ServerPhase.MASKED for place, name in enumerate(cohort) if name not in sources}
        return [sources.get(client, silent) for client in cohort], lost

    def _sum(
        self, secure: SecureRound, cohort: Sequence[str], sources: Mapping[str, VectorSource]
    ) -> SecureSum:
        parameters = secure.parameters
        if len(cohort) != parameters.n:
            parameters = parameters.with_cohort(len(cohort))
        if self.job.simulation.masking == "real":
            vectors, lost = self._vectors(cohort, sources)
            return run_in_memory(vectors, parameters, lost)
        if len(sources) < parameters.least:
            raise ProtocolError(f"{len(sources)} clients are left, and {parameters.least} are needed")
        return plain_sum(list(sources.values()), parameters)

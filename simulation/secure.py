"""Secure aggregation in a simulation: the protocol itself among the round's clients, or only its sum.

`simulation.masking = "real"` runs every client's and the coordinator's state machine with fresh
keys, and loses the clients whose updates did not arrive where they would be lost. "fast" computes
the same integers without keys, masks and messages; the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, PrivacyError, ProtocolError
from roundtable.core.seeds import derive_seed, numpy_generator
from roundtable.engine.messages import Step
from roundtable.privacy import (
    DistributedDP,
    PrivacyConfig,
    SeededNoise,
    accountant_for,
    decode,
    encode,
    noise_for,
)
from roundtable.privacy.secagg import (
    ArraySource,
    QuantisedUpdate,
    Quantiser,
    SecAggParameters,
    SecureSum,
    ServerPhase,
    VectorSource,
    choose_parameters,
    plain_sum,
    run_in_memory,
)

OFFERED = ("none", "client", "distributed")


@dataclass(frozen=True)
class SecureAggregation:
    """How the sum of a round is made. `distributed` is there where clients add shares of noise."""

    job: JobConfig
    privacy: PrivacyConfig
    columns: int
    noise_multiplier: float | None

    @classmethod
    def of(cls, job: JobConfig, columns: int) -> SecureAggregation | None:
        """The job's secure aggregation; None where it asks for none.

        Raises PrivacyError for what cannot be simulated, or makes no sense.
        """
        privacy = PrivacyConfig.from_table(job.privacy)
        if privacy.level not in OFFERED:
            raise PrivacyError(
                f"privacy.level = {privacy.level!r} is not simulated; offered are {', '.join(OFFERED)}"
            )
        if not privacy.secure_aggregation:
            return None
        if privacy.clip_norm is None:
            raise PrivacyError(
                "privacy.clip_norm is missing: secure aggregation rounds updates of a bounded norm"
            )
        if job.aggregation.weighting != "uniform" or job.aggregation.rule != "mean" or job.aggregation.pre:
            raise PrivacyError(
                "privacy.secure_aggregation: nobody sees a single update, so only their plain mean can be "
                'had; set aggregation.weighting = "uniform" and rule = "mean", without pre'
            )
        return cls(job, privacy, columns, _noise(job, privacy, columns))

    def label(self) -> str:
        """What was done, for people and for the record."""
        if self.job.simulation.masking == "fast":
            return "secure aggregation: its sum only (simulation.masking = fast), no masks were made"
        return "secure aggregation: the protocol ran among all clients of the round"

    def mean(
        self, step: Step, cohort: Sequence[str], arrived: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """The mean update, float32 [columns], and what it costs in privacy.

        Raises AggregationError where too few clients are left for the protocol to give a sum.
        """
        try:
            if self.noise_multiplier is not None:
                return self._noisy_mean(step, cohort, arrived, self.noise_multiplier)
            assert self.privacy.clip_norm is not None
            parameters = self._parameters(len(cohort), 32, self.privacy.clip_norm)
            quantiser = Quantiser.of(parameters)
            sources: dict[str, VectorSource] = {
                client: QuantisedUpdate(row.numpy(), 1, quantiser, rounding=self._chance(step, client))
                for client, row in arrived.items()
            }
            total = self._sum(step, cohort, sources, parameters)
            return torch.from_numpy(quantiser.decode_mean(total.total, len(total.survivors))), self._account(
                {}
            )
        except (PrivacyError, ProtocolError) as error:
            raise AggregationError(f"secure aggregation: {error}") from error

    def _noisy_mean(
        self, step: Step, cohort: Sequence[str], arrived: Mapping[str, Tensor], noise_multiplier: float
    ) -> tuple[Tensor, Mapping[str, Any]]:
        params = DistributedDP.from_config(self.privacy, noise_multiplier, self.columns, len(cohort))
        rotation = derive_seed(self.job.seed, step.round, "rotation").to_bytes(8, "little")
        sources: dict[str, VectorSource] = {}
        for client, row in arrived.items():
            noise = SeededNoise(self.job.seed, step.round, step.attempt, client, "noise")
            sources[client] = ArraySource(encode(row, params, rotation, noise))
        parameters = self._parameters(len(cohort), params.bits, params.clip_norm)
        total = self._sum(step, cohort, sources, parameters)
        noisy = decode(total.total, params, rotation, len(total.survivors))
        charge = {"charge": params.charge.to_json(), "noise_multiplier": noise_multiplier, "guarantee": False}
        # The denominator is the cohort that was asked: who answered is no secret the mean may tell.
        return noisy.div_(len(cohort)), self._account(charge)

    def _sum(
        self,
        step: Step,
        cohort: Sequence[str],
        sources: Mapping[str, VectorSource],
        parameters: SecAggParameters,
    ) -> SecureSum:
        if self.job.simulation.masking == "fast":
            if len(sources) < parameters.least:
                raise ProtocolError(f"{len(sources)} clients are left, and {parameters.least} are needed")
            return plain_sum([sources[client] for client in sources], parameters)
        silent = next(iter(sources.values()))
        vectors = [sources.get(client, silent) for client in cohort]
        drops = {place: ServerPhase.MASKED for place, client in enumerate(cohort) if client not in sources}
        return run_in_memory(vectors, parameters, drops)

    def _parameters(self, cohort: int, ring_bits: int, clip_norm: float) -> SecAggParameters:
        tolerance = self.privacy.dropout_tolerance
        return choose_parameters(cohort, tolerance, 0.0, ring_bits=ring_bits, clip_norm=clip_norm)

    def _chance(self, step: Step, client: str) -> Any:
        return numpy_generator(self.job.seed, step.round, step.attempt, client, "rounding")

    def _account(self, charge: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"level": self.privacy.level, "secure_aggregation": self.label(), **charge}


def _noise(job: JobConfig, privacy: PrivacyConfig, columns: int) -> float | None:
    if privacy.level != "distributed":
        return None
    population = privacy.population or job.simulation.clients
    size = job.cohort.size or job.simulation.clients
    expected = job.cohort.probability * population if job.cohort.probability else float(size)
    sampling = accountant_for(job.cohort.strategy, population, expected)
    return noise_for(privacy, sampling, columns, job.rounds)

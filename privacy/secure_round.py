"""A round of secure aggregation as every party works it out: parameters, a silo's vector, the mean.

Silos, the coordinator and simulations compute the same from the job, the length of the model and the number
of silos invited. A silo's vector is its rounded update and a tail with its weight, example count, clip bit
and training loss, and in rounds that the job evaluates what the silo has measured of the model that the
round begins with. In rings of 16 bits and fewer the update is rotated by a public seed before it is
rounded, and the mean is turned back. Of random-k only the k values are clipped, rotated, rounded and
masked, at places that follow from the job's seed and the round; their mean, with its noise, is multiplied
by d/k. Under level `distributed` it is the update with its share of noise and
nothing else, since exact sums beside a noisy one would tell more than the noise allows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from roundtable.core.analyses.exact_sums import largest_digit
from roundtable.core.config import JobConfig
from roundtable.core.encodings import NO_KEY, StreamKey
from roundtable.core.encodings.sparse import RandomK
from roundtable.core.errors import AggregationError, InvalidUpdate, PrivacyError
from roundtable.core.privacy_table import LARGEST_RING, DistributedLevel, Masking, masking_of
from roundtable.core.seeds import derive_seed
from roundtable.privacy.collusion import colluding_share
from roundtable.privacy.levels import distributed_noise
from roundtable.privacy.mechanisms.distributed import DistributedDP, decode, encode
from roundtable.privacy.mechanisms.noise import NoiseSource, SecureNoise
from roundtable.privacy.mechanisms.rotation import Rotation
from roundtable.privacy.secagg import (
    ArraySource,
    Metric,
    QuantisedUpdate,
    Quantiser,
    SecAggParameters,
    Session,
    Tally,
    VectorSource,
    choose_parameters,
    largest_group,
)
from roundtable.privacy.secagg.masks import Ring, wire_bytes
from roundtable.privacy.secagg.parameters import FULL_GRAPH_UP_TO, MINIMUM_COHORT
from roundtable.privacy.secagg.quantise import Rotate
from roundtable.privacy.shared_sample import most_summed, sample_key, shared_sample, why_not_masked

ROTATED_UP_TO = 16
"""Rings of so many bits are too coarse for updates as they are."""
LARGEST_WEIGHT = 1 << 16
LEAST_LEVELS = 1 << 13
"""A mean of silos of weight 1 is rounded to this part of the clip norm at worst."""
LOSS_BOUND = 1000.0
LARGEST_TEST = 1 << 24
"""Test examples that a silo counts for at most; a mean is rounded to 2^-16 of its bound at worst."""
_LOSS, _BEFORE = "training loss", "test "


@dataclass(frozen=True)
class SecureMean:
    """What the coordinator learns of a round: the mean update, float32 [columns], over so many silos.

    `training` holds the summed training loss as (sum, weight), `before` the summed metrics of the model that
    the round began with as (sum, examples); `account` what was done, for the record; `divisor` by how many
    the sum was divided where that are not the silos in it.
    """

    vector: Tensor
    silos: int
    training: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    account: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    divisor: float = 0.0


@dataclass(frozen=True)
class SecureRound:
    """The arithmetic of one round. `tally` is there without noise, `noise` with it.

    `rotation` is the seed of the public rotation, empty where nothing is rotated. `bounds` are those of the
    metrics of the model that the round begins with; empty where none are summed. `sample` chooses the values
    that are sent, by `key`; None where all are. `added` are the silos whose digits of exact
    sums add up; 0 where updates are none.
    """

    parameters: SecAggParameters
    columns: int
    uniform: bool
    tally: Tally | None
    noise: DistributedDP | None
    rotation: bytes
    bounds: Mapping[str, float] = field(default_factory=dict)
    sample: RandomK | None = None
    key: StreamKey = NO_KEY
    added: int = 0

    @classmethod
    def of(cls, job: JobConfig, columns: int, invited: int, round: int) -> SecureRound:
        """For a model of `columns` values and so many silos. PrivacyError where they are too few."""
        masking = masking_of(job.privacy)
        if masking is None:
            raise PrivacyError("this job asks for no secure aggregation: its updates travel one by one")
        added = job.algorithm.most_added()
        norm = exact_norm(columns, added) if masking.clip_norm is None else masking.clip_norm
        if masking.clip_norm is None and not added:
            raise PrivacyError(why_not_masked(job))
        masking = replace(masking, clip_norm=norm)
        uniform = job.aggregation.weighting == "uniform"
        rotation = derive_seed(job.seed, round, "rotation").to_bytes(8, "little")
        drawn = (shared_sample(job), sample_key(job, round))
        if isinstance(job.privacy, DistributedLevel):
            noise = distributed_noise(job, columns)
            size = most_summed(job) or 0
            if invited > size:
                raise PrivacyError(f"{invited} silos where noise for {size} was agreed on")
            parameters = _parameters(size, job, masking, noise.bits, 1)
            return cls(parameters, columns, True, None, noise, rotation, {}, *drawn)
        room = invited if masking.group_size is None else largest_group(masking.group_size, invited)
        bound = 1 if uniform else largest_weight(room)
        parameters = _parameters(invited, job, masking, masking.ring_bits, bound)
        rotation = rotation if masking.ring_bits <= ROTATED_UP_TO else b""
        bounds = job.evaluation.before(round)
        tested = (Metric(f"{_BEFORE}{name}", bounds[name], LARGEST_TEST) for name in sorted(bounds))
        tally = Tally.of(parameters, (Metric(_LOSS, LOSS_BOUND, bound), *tested))
        if added and norm < exact_norm(columns, added):
            raise PrivacyError(
                f"privacy.clip_norm = {norm:g}: digits of exact sums are not clipped, and their "
                f"norm may be {exact_norm(columns, added):g}; `roundtable analyse` sets it"
            )
        found = replace(cls(parameters, columns, uniform, tally, None, rotation, bounds, *drawn), added=added)
        # Refused here, before a round, where the ring has no room for so many.
        _ = found.quantiser
        return found

    @property
    def grouped(self) -> bool:
        """Whether the cohort is split into groups, with one mean each."""
        return self.parameters.group_size > 0

    @property
    def fewest(self) -> int:
        """The survivors below which a silo must not help to unmask: their noise would be too little."""
        return max(MINIMUM_COHORT, self.noise.survivors if self.noise is not None else 0)

    @property
    def values(self) -> int:
        """Values of an update that each silo submits."""
        return self.columns if self.sample is None else self.sample.most(self.columns)

    @property
    def quantiser(self) -> Quantiser:
        """How an update without noise is rounded."""
        return Quantiser.of(self.parameters, self.values if self.rotation else 0)

    @property
    def length(self) -> int:
        """Ring elements that each silo submits."""
        return self.noise.length if self.noise is not None else self.values + len(self._tail)

    @property
    def upload_bytes(self) -> int:
        """The size of a masked vector."""
        return wire_bytes(self.length, self.parameters.ring_bits)

    def session(self, job: str, round: int, attempt: int, subject: bytes) -> Session:
        """The protocol's name for an attempt at a sum of updates by a `subject_of`."""
        return Session(job, round, attempt, self.length, subject)

    def encode(
        self,
        update: npt.NDArray[np.float32],
        examples: int,
        loss: float | None,
        before: Mapping[str, tuple[float, int]] | None = None,
        rounding: np.random.Generator | None = None,
        noise: NoiseSource | None = None,
    ) -> VectorSource:
        """A silo's vector, from its float32 update [columns]; `rounding` and `noise` are for simulations.

        `before` are (sum, examples) of the model that the round began with, for the names in `bounds`; a
        name that is missing, or whose mean is not finite, adds nothing, nor does such a loss. An
        update of digits is masked as it is.

        Raises InvalidUpdate for an update that is not finite.
        """
        if self.sample is not None:
            update = self.sample.take(update, self.key)
        if self.noise is not None:
            tensor = torch.from_numpy(np.array(update))
            return ArraySource(encode(tensor, self.noise, self.rotation, noise or SecureNoise()))
        bound = self.parameters.weight_bound
        weight = 1 if self.uniform else min(max(examples, 1), bound)
        tail = np.zeros(len(self._tail), dtype=np.uint32)
        if self.added:
            return self._digits(update, tail)
        source = QuantisedUpdate(update, weight, self.quantiser, tail, rounding, self._rotate)
        counters = {"weight": weight, "examples": examples, "clipped": int(source.clipped)}
        means = {f"{_BEFORE}{name}": (s / n, n) for name, (s, n) in (before or {}).items() if n > 0}
        measured = means if loss is None else {_LOSS: (loss, weight), **means}
        finite = {name: pair for name, pair in measured.items() if math.isfinite(pair[0])}
        tail[:] = self._tail.encode(counters, finite)
        return source

    def decode(self, total: Ring, silos: int, cohort: int) -> SecureMean:
        """The mean over `silos` of the `cohort`, or of the group; AggregationError for sums that honest
        silos cannot make, PrivacyError for one with less noise than was promised."""
        if self.noise is not None:
            # The denominator is the cohort that was agreed on, or the group that was drawn: both are public.
            denominator = cohort if self.grouped else self.noise.cohort
            noisy = decode(total, self.noise, self.rotation, silos).div_(denominator)
            charge = {"charge": self.noise.charge.to_json(), "noise_multiplier": self.noise.noise_multiplier}
            account = {"level": "distributed", "silos": silos, **charge}
            return SecureMean(self._whole(noisy), silos, account=account, divisor=denominator)
        counters, metrics = self._tail.decode(total[self.values :], silos)
        weight = counters["weight"]
        if not silos <= weight <= silos * self.parameters.weight_bound:
            raise AggregationError(
                f"{silos} silos give a total weight of {weight}, which no honest silos can: one of them "
                "submitted something else than an update"
            )
        if self.added:
            mean = torch.from_numpy((total[: self.columns] / weight).astype(np.float32))
        else:
            mean = torch.from_numpy(self.quantiser.decode_mean(total[: self.values], weight))
        if self.rotation:
            Rotation(self.rotation, self.values).back(mean)
        training = {"loss": metrics.pop(_LOSS)} if _LOSS in metrics else {}
        before = {name.removeprefix(_BEFORE): sums for name, sums in metrics.items()}
        account = {"silos": silos, "cohort": cohort, "weight": weight}
        account |= {"examples": counters["examples"], "clipped": counters["clipped"]}
        return SecureMean(self._whole(mean), silos, training, account, before)

    def _whole(self, mean: Tensor) -> Tensor:
        """The mean [columns] that one of the values that were sent stands for."""
        return mean if self.sample is None else self.sample.spread(mean, self.columns, self.key)

    def _digits(self, update: npt.NDArray[np.float32], tail: Ring) -> VectorSource:
        """Whole numbers as they are, each small enough that all silos' add up within the ring."""
        digits = np.asarray(update).astype(np.uint32)
        if not ((digits == update) & (digits <= largest_digit(self.added))).all():
            raise InvalidUpdate("range", "exact sums are masked as digits, and these are other numbers")
        tail[:] = self._tail.encode({"weight": 1, "examples": 1, "clipped": 0})
        return ArraySource(np.concatenate([digits, tail]))

    @property
    def _rotate(self) -> Rotate | None:
        if not self.rotation:
            return None
        rotation = Rotation(self.rotation, self.values)
        return lambda vector: rotation.forward(torch.from_numpy(vector))

    @property
    def _tail(self) -> Tally:
        assert self.tally is not None
        return self.tally


def subject_of(config: str, model: str) -> bytes:
    """What silos train by, as all of them have to have been told it: the job's text and the digest of the
    file with the round's model, 32 bytes.

    Were some given a model that gives no gradients, or a job with a learning rate of nothing, the sum would
    be the update of the others (Pasquini et al. 2022, "Eluding Secure Aggregation in Federated Learning via
    Model Inconsistency").
    """
    told = hashlib.sha256(config.encode()).digest() + hashlib.sha256(model.encode()).digest()
    return hashlib.sha256(b"roundtable secagg subject\0" + told).digest()


def exact_norm(columns: int, added: int) -> float:
    """The largest L2 norm of so many digits of exact sums over at most `added` silos."""
    return math.sqrt(columns) * largest_digit(added)


def largest_weight(invited: int) -> int:
    """The bound on a silo's weight: more examples count as so many. It leaves `LEAST_LEVELS` of precision."""
    return max(1, min(LARGEST_WEIGHT, ((1 << LARGEST_RING) - 1) // (2 * invited * LEAST_LEVELS)))


def fewest_survivors(job: JobConfig, invited: int) -> int:
    """The survivors without which a sum of so many silos is not unmasked; 0 on a full graph or in groups.

    0, too, where no parameters serve so many: the attempt is refused with the reason when it begins.
    """
    masking = masking_of(job.privacy)
    if masking is None or masking.group_size is not None or invited <= FULL_GRAPH_UP_TO:
        return 0
    try:
        return _parameters(invited, job, masking, LARGEST_RING, 1).least
    except PrivacyError:
        return 0


def _parameters(
    invited: int, job: JobConfig, masking: Masking, ring_bits: int, weight_bound: int
) -> SecAggParameters:
    """For as many dropouts as the job allows for, or as many as a cohort of this size can bear."""
    hidden_among = masking.group_size or invited
    if invited < hidden_among or hidden_among < MINIMUM_COHORT:
        raise PrivacyError(
            f"secure aggregation takes at least {max(hidden_among, MINIMUM_COHORT)} silos, or it hides "
            f"nothing; there are {invited}"
        )
    ring: dict[str, Any] = {
        "ring_bits": ring_bits,
        "clip_norm": 1.0 if masking.clip_norm is None else masking.clip_norm,
        "weight_bound": weight_bound,
    }
    corruption = colluding_share(job, hidden_among)
    chosen = None
    for dropped in range(math.floor(masking.dropout_tolerance * hidden_among), 0, -1):
        try:
            chosen = choose_parameters(hidden_among, dropped / hidden_among, corruption, **ring)
            break
        except PrivacyError:
            continue
    chosen = chosen or choose_parameters(hidden_among, 0.0, corruption, **ring)
    if masking.group_size is None:
        return chosen
    return replace(chosen, group_size=masking.group_size, capacity=largest_group(masking.group_size, invited))

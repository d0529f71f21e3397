"""What a round has received from its clients: every update, their mean, or the means of groups.

The three are all that a driver can bring to `combine`. Which one it brings follows from the job: rows
where updates are sent in the clear, a mean or the means of groups out of secure aggregation, and a mean
from backends of a simulation that add updates up where they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor

from roundtable.aggregation import UpdateMatrix
from roundtable.core.observability.metric_sums import add_up
from roundtable.engine.messages import Update
from roundtable.privacy import SecureMean

SUMMED = ("silos", "weight", "examples", "clipped")
COMMON = ("level", "charge", "noise_multiplier")


@dataclass(frozen=True)
class Rows:
    """Every update of the round: row i of `matrix`, [n, d], is the update of `updates[i]`.

    `norms` are the clients' whose row was measured on arrival, up to 1e-3 of each.
    """

    matrix: UpdateMatrix
    updates: Sequence[Update]
    norms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RegionModel:
    """What a region has in the place of the global model [d], and the weight of what it last added up."""

    vector: Tensor
    weight: float


@dataclass(frozen=True)
class Mean:
    """The mean of a round's updates, float32 [d], of which no single one is known.

    `combine` takes the vector over and may write the new model into it. `weights` are the shares of the
    clients where these are no secret, `examples` what each has trained on, `steps` what each was
    given by its speed; `training` are the round's summed
    training metrics as (sum, count), `before` those of the model that the round began with; `account` is what
    the round's record says of how the mean was made. `divisor` is by how many the sum was divided, if not by
    those that are in it. `excluded` maps clients whose update was left out where the mean was made to the
    reason; `regions` are the models with which regions go on by themselves. `staleness` is how many models
    older than the newest that of all these updates was.
    """

    vector: Tensor
    weights: Mapping[str, float] = field(default_factory=dict)
    training: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    account: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    examples: Mapping[str, int] = field(default_factory=dict)
    divisor: float = 0.0
    steps: Mapping[str, int] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, RegionModel] = field(default_factory=dict)
    staleness: int = 0

    @classmethod
    def of_secure_sum(cls, mean: SecureMean) -> Mean:
        """The mean that secure aggregation has unmasked."""
        return cls(
            mean.vector,
            training=mean.training,
            account=mean.account,
            before=mean.before,
            divisor=mean.divisor,
        )

    def of_age(self, staleness: int) -> Mean:
        """The same of updates that were all trained from a model so many models older than the newest."""
        return replace(self, staleness=staleness)


@dataclass(frozen=True)
class GroupMean:
    """One group of secure aggregation: its members, how many are in its mean, and their total weight.

    `spoiled` says why its sum cannot be one of honest silos; its row is then not finite.
    """

    members: tuple[str, ...]
    silos: int
    weight: int
    spoiled: str = ""


@dataclass(frozen=True)
class GroupMeans:
    """The means of a round's groups: row i of `matrix` is the mean of `groups[i]`.

    Each group's sum comes out of secure aggregation. A hostile silo spoils the mean of its own group, so a
    rule that withstands f hostile rows withstands f hostile silos, wherever they are. `lost` maps the
    silos of groups without a sum to the reason.
    """

    matrix: UpdateMatrix
    groups: tuple[GroupMean, ...]
    lost: Mapping[str, str]
    training: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    account: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        matrix: UpdateMatrix,
        decoded: Sequence[tuple[tuple[str, ...], SecureMean | str]],
        lost: Mapping[str, str],
    ) -> GroupMeans:
        """From each group's members with its mean, or with the reason why it has none."""
        groups = []
        account: dict[str, Any] = {"cohort": len(lost)}
        whole = [mean for _, mean in decoded if not isinstance(mean, str)]
        for members, mean in decoded:
            account["cohort"] += len(members)
            if isinstance(mean, str):
                groups.append(GroupMean(members, 0, 0, mean))
                continue
            own = mean.account
            groups.append(GroupMean(members, mean.silos, own.get("weight", mean.silos)))
            account |= {name: own[name] for name in COMMON if name in own}
            account |= {name: account.get(name, 0) + own[name] for name in SUMMED if name in own}
        training = add_up(mean.training for mean in whole)
        before = add_up(mean.before for mean in whole)
        return cls(matrix, tuple(groups), dict(lost), training, account, before)


Received: TypeAlias = Rows | Mean | GroupMeans

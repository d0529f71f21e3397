"""A round of which the means of groups are known and no single update: a robust rule over those means.

Each group's sum comes out of secure aggregation. A hostile silo spoils the mean of its own group, so a
rule that withstands f hostile rows withstands f hostile silos, wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from roundtable.aggregation import ClientRow, Context, UpdateMatrix, aggregate, find_rule
from roundtable.core.seeds import derive_seed
from roundtable.engine.combine import Combined, ServerState, combine_mean
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import SecureMean

SUMMED = ("silos", "weight", "examples", "clipped")
COMMON = ("level", "charge", "noise_multiplier")


@dataclass(frozen=True)
class GroupMean:
    """One group: its members, how many of them are in its mean, and their total weight.

    `spoiled` says why its sum cannot be one of honest silos; its row is then not finite.
    """

    members: tuple[str, ...]
    silos: int
    weight: int
    spoiled: str = ""


@dataclass(frozen=True)
class GroupMeans:
    """What the secure sums of a round's groups tell: row i of `matrix` is the mean of `groups[i]`.

    `lost` maps the silos of groups without a sum to the reason.
    """

    matrix: UpdateMatrix
    groups: tuple[GroupMean, ...]
    lost: Mapping[str, str]
    training: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    account: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        matrix: UpdateMatrix,
        decoded: Sequence[tuple[tuple[str, ...], SecureMean | str]],
        lost: Mapping[str, str],
    ) -> GroupMeans:
        """From each group's members with its mean, or with the words why it cannot be one."""
        groups = []
        account: dict[str, Any] = {"cohort": len(lost)}
        training: dict[str, tuple[float, int]] = {}
        for members, mean in decoded:
            account["cohort"] += len(members)
            if isinstance(mean, str):
                groups.append(GroupMean(members, 0, 0, mean))
                continue
            told = mean.account
            groups.append(GroupMean(members, mean.silos, told.get("weight", mean.silos)))
            account |= {name: told[name] for name in COMMON if name in told}
            account |= {name: account.get(name, 0) + told[name] for name in SUMMED if name in told}
            for name, (total, count) in mean.training.items():
                before = training.get(name, (0.0, 0))
                training[name] = (before[0] + total, before[1] + count)
        return cls(matrix, tuple(groups), dict(lost), training, account)


def combine_groups(
    plan: Plan,
    means: GroupMeans,
    model: Tensor,
    state: ServerState,
    *,
    round: int,
    seed: int,
    diagnose: bool = False,
) -> Combined:
    """The outcome of round `round`: the plan's rule over the groups' means, each row one group.

    The record names the groups; `excluded` holds the silos whose group was lost or spoiled, with the
    reason. A spoiled group counts as one of the rule's f. Raises AggregationError where too few are left.
    """
    labels = [f"group-{number:04d}" for number in range(1, len(means.groups) + 1)]
    rows = [ClientRow(label, max(1, g.weight), None) for label, g in zip(labels, means.groups, strict=True)]
    result = aggregate(
        means.matrix,
        rows,
        replace(plan.aggregation, weighting="examples"),
        derive_seed(seed, round, "aggregation"),
        context=Context(previous=state.previous),
        diagnose=diagnose,
    )
    broken = {exclusion.client: exclusion.message for exclusion in result.excluded}
    excluded, shown = dict(means.lost), []
    for label, group in zip(labels, means.groups, strict=True):
        if label in broken:
            excluded |= dict.fromkeys(
                group.members, f"the sum of its group: {group.spoiled or broken[label]}"
            )
        row = {"members": list(group.members), "silos": group.silos, "weight": group.weight}
        shown.append(row | ({"share": result.weights[label]} if label in result.weights else {}))
    account = {**means.account, "groups": shown}
    combined = combine_mean(plan, result.vector, model, state, round=round, charge=account)
    after = combined.state
    if find_rule(plan.aggregation.rule).takes("previous"):
        after = replace(after, previous=result.vector)
    return replace(combined, state=after, excluded=excluded, diagnosis=result.diagnosis.to_dict())

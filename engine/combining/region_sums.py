"""Sums by region: each region adds its own updates up, and only the sums meet.

With rounds that stay within a region this is hierarchical FedAvg (Liu et al. 2020, Client-Edge-Cloud
Hierarchical Federated Learning, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from roundtable.aggregation import AggregationConfig, ClientRow, TensorMatrix, UpdateMatrix
from roundtable.aggregation.rules.mean import mean
from roundtable.aggregation.validation import screen
from roundtable.aggregation.weighting import row_weights
from roundtable.core.errors import AggregationError
from roundtable.engine.combining.received import Mean, RegionModel, Rows
from roundtable.engine.messages import Update


@dataclass(frozen=True)
class _RegionSum:
    """What one region sends: the mean of its updates [d], by how much it counts, and its clients' shares."""

    vector: Tensor
    weight: float
    shares: Mapping[str, float]


def sum_by_region(
    config: AggregationConfig,
    rows: Rows,
    members: Mapping[str, Sequence[str]],
    model: Tensor,
    held: Mapping[str, RegionModel],
    *,
    goes_up: bool,
) -> Mean:
    """The mean of the regions' means, by the weight of the clients in each.

    `members` are the clients of `rows` that each region has, of every region there is. `model` [d] is the
    global one, `held` what regions have instead of it; each update is relative to what its region has.
    Clients are added in the order of their names, regions in the order of theirs, each time by the rule
    `mean` of the flat sum: from one model of all, the result differs from the flat one by float32 rounding
    alone. Where the round does not go up, the mean says what each region goes on with, and its weight. A
    region none of whose clients has answered keeps its model, and counts as it last did; an update that is
    not finite is left out by its region.
    Raises AggregationError where no region has a usable update, InvalidUpdate where the validation policy
    says fail.
    """
    names = [update.client for update in rows.updates]
    clients = [_row(update) for update in rows.updates]
    screening = screen(rows.matrix, clients, config.validation, None, False)
    excluded = {exclusion.client: exclusion.message for exclusion in screening.excluded}
    place_of = {names[place]: place for place in screening.kept}
    sums = {
        region: _sum_of(config, rows, clients, [place_of[name] for name in sorted(here) if name in place_of])
        for region, here in sorted(members.items())
    }
    if all(part is None for part in sums.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in excluded.items())
        raise AggregationError(f"no region has a usable update in this round: {reasons or 'nobody answered'}")
    after, moved, weights = {}, [], []
    for region, part in sums.items():
        before = held.get(region, RegionModel(model, 0.0))
        weight = before.weight if part is None else part.weight
        change = None if region not in held else before.vector - model
        if part is not None:
            change = part.vector if change is None else change + part.vector
        if change is not None and weight:
            moved.append(change)
            weights.append(weight)
        if not goes_up:
            vector = before.vector if part is None else before.vector + part.vector
            after[region] = RegionModel(vector, weight)
    total = sum(weights)
    return Mean(
        mean(TensorMatrix.from_vectors(moved), np.array(weights)).vector,
        {
            name: share * part.weight / total
            for part in sums.values()
            if part is not None
            for name, share in part.shares.items()
        },
        examples={update.client: update.examples for update in rows.updates},
        steps={update.client: update.steps for update in rows.updates if update.steps is not None},
        excluded=excluded,
        regions=after,
    )


def parts_of(updates: Sequence[Update]) -> list[tuple[Update, ...]]:
    """The updates by what was received: each by itself, or those of a relay's sum together.

    Updates are in the order of names, parts in the order of the relays' names or of their silos' own: that of
    `sum_by_region`, whatever came first.
    """
    parts: dict[tuple[str, str], list[Update]] = {}
    for update in sorted(updates, key=lambda update: update.client):
        place = (update.relay, update.digest) if update.relay else (update.client, "")
        parts.setdefault(place, []).append(update)
    return [
        tuple(parts[place]) for place in sorted(parts, key=lambda place: (place[0], parts[place][0].client))
    ]


def mean_of_parts(config: AggregationConfig, matrix: UpdateMatrix, parts: Sequence[Sequence[Update]]) -> Mean:
    """The mean of what relays and silos have sent: row i of `matrix` is the mean of the updates `parts[i]`.

    Each part counts by the weights of its updates. From that of the updates in one sum it differs by float32
    rounding alone. AggregationError where nothing has any weight.
    """
    weights = [row_weights([_row(each) for each in part], config.weighting, config.weights) for part in parts]
    result = mean(matrix, np.array([part.sum() for part in weights]))
    total = float(sum(part.sum() for part in weights))
    updates = [update for part in parts for update in part]
    shares = np.concatenate(weights) / total
    return Mean(
        result.vector,
        dict(zip((update.client for update in updates), shares.tolist(), strict=True)),
        examples={update.client: update.examples for update in updates},
        steps={update.client: update.steps for update in updates if update.steps is not None},
    )


def _row(update: Update) -> ClientRow:
    return ClientRow(update.client, update.examples, update.loss)


def _sum_of(
    config: AggregationConfig, rows: Rows, clients: Sequence[ClientRow], places: Sequence[int]
) -> _RegionSum | None:
    """What a region whose clients' rows are at `places` sends; None where it has none."""
    if not places:
        return None
    here = [clients[place] for place in places]
    weights = row_weights(here, config.weighting, config.weights)
    result = mean(rows.matrix.select(places), weights)
    shares = weights / weights.sum()
    return _RegionSum(
        result.vector,
        float(weights.sum()),
        dict(zip((client.name for client in here), shares.tolist(), strict=True)),
    )

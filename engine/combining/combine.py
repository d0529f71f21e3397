"""What `Aggregate` means: what a round has received and the old model give the new model.

validate → pre-aggregate → aggregate → central noise → server optimizer. Pure: the drivers bring what was
received (in memory or as mapped files) and store what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roundtable.aggregation import AggregationResult, ClientRow, RuleContext, TensorMatrix, aggregate
from roundtable.aggregation.rows.reductions import is_finite
from roundtable.aggregation.rows.sketches import sketches
from roundtable.aggregation.taking import ColumnSink
from roundtable.core.algorithms.contract import ClientShare
from roundtable.core.encodings import Encoding, StreamKey
from roundtable.core.errors import AggregationError
from roundtable.core.model_delta import published
from roundtable.core.privacy_table import OwnNoise
from roundtable.core.seeds import derive_seed
from roundtable.engine.combining.block_step import TOO_FAR, block_step, needs_no_whole, works_by_blocks
from roundtable.engine.combining.factor_merge import merge_error, merged
from roundtable.engine.combining.noisy_sums import with_correlated_noise, with_fresh_noise
from roundtable.engine.combining.received import GroupMeans, Mean, Received, Rows
from roundtable.engine.combining.round_delta import RoundAccount, RoundDelta
from roundtable.engine.combining.server_state import ServerState
from roundtable.engine.combining.server_step import ServerStep
from roundtable.engine.combining.staleness import discounted
from roundtable.engine.combining.update_history import remembered, sums_with
from roundtable.engine.combining.vector_places import InMemory, VectorPlaces
from roundtable.engine.diverse_groups import direction_text
from roundtable.engine.messages import Aggregated, Step
from roundtable.engine.validation.round_noise import CorrelatedRounds, FreshNoise, SiloNoise
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import (
    NoiseSource,
    SecureNoise,
)

_SKETCHED = 128
"""Places of a sketch: the cosine of two is off by about 0.09."""


@dataclass(frozen=True)
class Combined:
    """The new model's vector [d] as silos get it, empty where a driver's places took it; the state for the
    next round, and the account of what was done.

    `delta` is the encoded change from the old model to it, where the job sends that; None where it does not.
    """

    vector: Tensor
    state: ServerState
    account: RoundAccount
    delta: bytes | None = None

    def event(
        self, step: Step, model: str, optimizer: str, guarantee: Mapping[str, float], delta: str = ""
    ) -> Aggregated:
        """The engine's event, once model, state and delta are stored under these names.

        `guarantee` are the figures of the new model's guarantee (ε, δ); they go into the round's charge.
        """
        account = self.account
        return Aggregated(
            step,
            model,
            optimizer,
            excluded=account.excluded,
            weights=account.weights,
            diagnosis=account.diagnosis,
            charge={**account.charge, **guarantee},
            training=account.training,
            before=account.before,
            delta=delta,
            directions=account.directions,
        )


Publish = Callable[[Encoding, Tensor, Tensor, ServerState], tuple[Tensor, bytes]]
"""What silos get next [d] and the bytes of the change, of (encoding, what they hold [d], the exact model [d],
the next round's state)."""


def _published(encoding: Encoding, held: Tensor, exact: Tensor, state: ServerState) -> tuple[Tensor, bytes]:
    return published(encoding, held, exact)


def combine(
    plan: Plan,
    received: Received,
    model: Tensor,
    state: ServerState,
    *,
    round: int,
    seed: int,
    noise: NoiseSource | None = None,
    diagnose: bool = False,
    root_update: Tensor | None = None,
    population: int = 1,
    publish: Publish = _published,
    attempt: int = 1,
    places: VectorPlaces | None = None,
) -> Combined:
    """The outcome of round `round` (from 1).

    `model` is the global vector as silos have it, float32 [d]; it is left alone. Where the plan encodes the
    way down, the exact one is in the state, and the new one is published as far as the encoding tells it.
    `noise` is the source of central noise, the operating system's unless given; `root_update` [d] is for
    rules that compare with training on trusted data; `population`, how many clients there are, for
    algorithms with a server's part; `publish` makes what silos get of the exact model in the state; `attempt`
    tells random-k its places; `places` are where the new vectors go, memory unless given. Raises
    AggregationError where what was received gives no sound answer.
    """
    noise, places = noise or SecureNoise(), places or InMemory()
    stepping = block_step(plan, model, state, round, places) if needs_no_whole(plan, received) else None
    delta = _delta_of(plan, received, state, round, seed, noise, diagnose, root_update, stepping)
    lost = _merged(plan, received, delta, model)
    if plan.estimates:
        delta = _estimated(delta, received, state)
    if plan.thinned is not None:  # After the noise, which hides what was clipped, and not d/k times that.
        key = StreamKey(seed, round=round, attempt=attempt)
        delta = replace(delta, vector=plan.thinned.made_up(delta.vector, key))
    basis = None
    if plan.common is not None:
        size = model.numel() - plan.common.basis_size
        factors = plan.common.at(model[size:], round)
        model, basis = model[:size], factors.following(delta.vector)
        delta = replace(delta, vector=factors.expand(delta.vector))
    present = divisor = _present(received, delta.account)
    work = _work(received, delta.account) if plan.server is not None else ()
    match plan.noise, received:
        case ((FreshNoise(mechanism) | CorrelatedRounds(mechanism)), _):
            # How many there were may be a secret: the model must not tell it.
            present = divisor = mechanism.expected_cohort
        case _, Mean():
            divisor = received.divisor or present
    told: Mapping[str, tuple[float, int]] = {}
    if plan.server is None and works_by_blocks(plan.optimizer):
        if stepping is None:
            stepping = block_step(plan, model, state, round, places)
            stepping.take_all(delta.vector)
        optimizer, vector = stepping.end()
    else:
        exact = model if state.exact is None else state.exact
        optimizer, vector, told = ServerStep(
            plan, exact, delta.vector, round, present, max(population, math.ceil(present)), divisor, work
        ).take(state.optimizer)
        if not is_finite(vector):
            raise AggregationError(TOO_FAR)
        if plan.down is None:
            vector = places.keep(vector)
    account = replace(delta.account, training={**delta.account.training, **lost, **told})
    if basis is not None:  # Nothing else goes down in a form of its own then.
        vector = places.keep(torch.cat([vector, basis]))
    if plan.down is None:
        return Combined(vector, replace(delta.state, optimizer=optimizer), account)
    after = replace(delta.state, optimizer=optimizer, exact=vector)
    held, data = publish(plan.down.in_round(round), model, vector, after)
    return Combined(places.keep(held), after, account, data)


def _merged(
    plan: Plan, received: Received, delta: RoundDelta, model: Tensor
) -> Mapping[str, tuple[float, int]]:
    """Has the algorithm merge clients' factors where it does; what that, or averaging them, has lost."""
    merging = plan.server.algorithm if plan.server is not None and plan.server.algorithm.merges() else None
    shares = delta.account.weights
    if not isinstance(received, Rows):
        if merging is not None:
            raise AggregationError(
                "the algorithm merges single clients' factors, and a sum of updates has none"
            )
        return {}
    if merging is not None:
        return merged(merging, plan.factors, received, shares, model, delta.vector)
    return merge_error(plan.factors, received, shares, model)


def _delta_of(
    plan: Plan,
    received: Received,
    state: ServerState,
    round: int,
    seed: int,
    noise: NoiseSource,
    diagnose: bool,
    root_update: Tensor | None,
    sink: ColumnSink | None,
) -> RoundDelta:
    """What was received, as the plan's rule or noise makes one of it."""
    match received, plan.noise:
        case Rows(), FreshNoise():
            return with_fresh_noise(plan, plan.noise, received, state, noise)
        case Rows(), CorrelatedRounds():
            return with_correlated_noise(plan, plan.noise, received, state, round, noise)
        case Rows(), _:
            return _of_rows(plan, received, state, round, seed, noise, diagnose, root_update, sink)
        case Mean(), _:
            return _of_mean(plan, received, round, noise)
        case GroupMeans(), _:
            return _of_groups(plan, received, state, round, seed, diagnose)


def _estimated(delta: RoundDelta, received: Received, state: ServerState) -> RoundDelta:
    """G + mean of the differences C(Δᵢ − gᵢ): the mean of what all silos have sent so far (Richtárik et al.
    2021, algorithm 2). AggregationError where a silo is missing or new: G would hold what it never sent."""
    silos = tuple(sorted(update.client for update in received.updates)) if isinstance(received, Rows) else ()
    if delta.account.excluded:
        name, reason = next(iter(delta.account.excluded.items()))
        raise AggregationError(f"EF21 goes on from every silo's update, and that of {name} is out: {reason}")
    if state.silos and state.silos != silos:
        other = sorted(set(state.silos) ^ set(silos))[0]
        raise AggregationError(
            f"EF21 (transfer.feedback) needs the same silos in each round, and {other} was in one of the two "
            'last only: ask all of them to come back, or start a new job with feedback = "on"'
        )
    if state.estimate is not None:
        delta.vector.add_(state.estimate)
    return replace(delta, state=replace(delta.state, estimate=delta.vector.clone(), silos=silos))


def _present(received: Received, account: RoundAccount) -> float:
    """Updates that are in the aggregate, as far as that is known."""
    match received:
        case Rows():
            return len(received.updates) - len(account.excluded)
        case Mean():
            return len(received.weights) or int(received.account.get("silos", 0))
        case GroupMeans():
            return sum(group.silos for group in received.groups)


def _work(received: Received, account: RoundAccount) -> list[ClientShare]:
    """Each update's, as far as single ones are known."""
    shares = account.weights
    match received:
        case Rows():
            known = {update.client: (update.examples, update.steps) for update in received.updates}
        case Mean():
            known = {name: (count, received.steps.get(name)) for name, count in received.examples.items()}
        case GroupMeans():
            known = {}
    return [ClientShare(shares[client], *found) for client, found in known.items() if client in shares]


def try_rule(
    plan: Plan,
    rows: Rows,
    state: ServerState,
    *,
    round: int,
    seed: int,
    root_update: Tensor | None = None,
) -> Tensor:
    """The aggregate [d] that `combine` would give to the server optimizer, for those who only ask: attackers
    in a simulation who try a rule before they send. Plans with central noise have no rule."""
    rows = discounted(rows, round, plan.discount)
    return _aggregated(plan, rows, state, _sums(plan, rows, state), round, seed, False, root_update).vector


def _of_rows(
    plan: Plan,
    rows: Rows,
    state: ServerState,
    round: int,
    seed: int,
    noise: NoiseSource,
    diagnose: bool,
    root_update: Tensor | None,
    sink: ColumnSink | None,
) -> RoundDelta:
    """The job's rule over single updates."""
    rows = discounted(rows, round, plan.discount)
    sums = _sums(plan, rows, state)
    result = _aggregated(plan, rows, state, sums, round, seed, diagnose, root_update, sink)
    past = remembered(state.past, sums, rows.updates, result.diagnosis.clients) if sums is not None else {}
    account = RoundAccount(
        excluded={exclusion.client: exclusion.message for exclusion in result.excluded},
        weights=result.weights,
        diagnosis=result.diagnosis.to_dict(),
        charge=_noise_of_silos(plan, round, noise),
        directions=_directions(rows, seed) if plan.sketched else {},
    )
    return RoundDelta(result.vector, ServerState(previous=_previous(plan, result), past=past), account)


def _directions(rows: Rows, seed: int) -> dict[str, str]:
    """What is kept of where each update points; of one that points nowhere nothing."""
    found = sketches(rows.matrix, derive_seed(seed, "directions"), _SKETCHED)
    texts = {each.client: direction_text(row) for each, row in zip(rows.updates, found, strict=True)}
    return {client: text for client, text in texts.items() if text}


def _of_mean(plan: Plan, mean: Mean, round: int, noise: NoiseSource) -> RoundDelta:
    """A mean that was made elsewhere, scaled by what its staleness has left of it.

    Nobody is excluded from it here, and regions may go on from it.
    """
    left = plan.discount(mean.staleness)
    if not is_finite(mean.vector):
        raise AggregationError("the mean of the round's updates is not finite")
    account = RoundAccount(
        excluded=mean.excluded,
        weights=mean.weights,
        charge={**_noise_of_silos(plan, round, noise), **mean.account},
        training=mean.training,
        before=mean.before,
    )
    vector = mean.vector if left == 1.0 else mean.vector.mul_(left)
    return RoundDelta(vector, ServerState(regions=mean.regions), account)


def _of_groups(
    plan: Plan, means: GroupMeans, state: ServerState, round: int, seed: int, diagnose: bool
) -> RoundDelta:
    """The job's rule over the means of groups.

    The record names the groups; excluded are the silos whose group was lost or spoiled, with the reason.
    A spoiled group counts as one of the rule's f.
    """
    labels = [f"group-{number:04d}" for number in range(1, len(means.groups) + 1)]
    rows = [ClientRow(label, max(1, g.weight), None) for label, g in zip(labels, means.groups, strict=True)]
    by_weight = replace(plan.aggregation, weighting="examples", weight_ratio=None, norm_ratio=None)
    chance = derive_seed(seed, round, "aggregation")
    context = RuleContext(previous=state.previous)
    result = aggregate(means.matrix, rows, by_weight, chance, context=context, diagnose=diagnose)
    broken = {exclusion.client: exclusion.message for exclusion in result.excluded}
    excluded, groups = dict(means.lost), []
    for label, group in zip(labels, means.groups, strict=True):
        if label in broken:
            reason = f"the sum of its group: {group.spoiled or broken[label]}"
            excluded |= dict.fromkeys(group.members, reason)
        entry = {"members": list(group.members), "silos": group.silos, "weight": group.weight}
        groups.append(entry | ({"share": result.weights[label]} if label in result.weights else {}))
    account = RoundAccount(
        excluded=excluded,
        diagnosis=result.diagnosis.to_dict(),
        charge={**means.account, "groups": groups},
        training=means.training,
        before=means.before,
    )
    return RoundDelta(result.vector, ServerState(previous=_previous(plan, result)), account)


def _sums(plan: Plan, rows: Rows, state: ServerState) -> Tensor | None:
    """Each client's updates of all rounds added up [n, d], for rules that look at them."""
    return sums_with(state.past, rows) if plan.aggregation.takes("history") else None


def _previous(plan: Plan, result: AggregationResult) -> Tensor | None:
    """The aggregate, for rules that start from it in the next round."""
    return result.vector if plan.aggregation.takes("previous") else None


def _aggregated(
    plan: Plan,
    rows: Rows,
    state: ServerState,
    sums: Tensor | None,
    round: int,
    seed: int,
    diagnose: bool,
    root_update: Tensor | None,
    sink: ColumnSink | None = None,
) -> AggregationResult:
    norms = rows.norms
    clients = [ClientRow(u.client, u.examples, u.loss, norms.get(u.client)) for u in rows.updates]
    context = RuleContext(state.previous, root_update, TensorMatrix(sums) if sums is not None else None)
    chance = derive_seed(seed, round, "aggregation")
    return aggregate(
        rows.matrix, clients, plan.aggregation, chance, context=context, diagnose=diagnose, sink=sink
    )


def _noise_of_silos(plan: Plan, round: int, noise: NoiseSource) -> Mapping[str, Any]:
    """What the record says where each silo adds its noise itself; its cost is in the silo's own account."""
    privacy = plan.privacy
    if not isinstance(privacy, OwnNoise):
        return {}
    account: dict[str, Any] = {
        "level": privacy.level,
        "clip_norm": privacy.clip_norm,
        "guarantee": noise.guarantee,
    }
    if isinstance(plan.noise, SiloNoise):
        account["noise_multiplier"] = plan.noise.noise_multiplier
        account["silo_charge"] = plan.noise.charge(round).to_json()
    return account

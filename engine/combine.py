"""What `Aggregate` means: a round's updates and the old model give the new model.

validate → pre-aggregate → aggregate → central noise → server optimizer. Pure: the drivers bring
the rows (in memory or mapped files) and store what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from roundtable.aggregation import (
    Aggregate,
    ClientRow,
    Context,
    OptimizerState,
    TensorMatrix,
    UpdateMatrix,
    aggregate,
)
from roundtable.aggregation.rows.reductions import is_finite
from roundtable.core.errors import AggregationError, EncodingError
from roundtable.core.layout import Layout
from roundtable.core.models import Model
from roundtable.core.seeds import derive_seed
from roundtable.engine.messages import Update
from roundtable.engine.staleness import discounted
from roundtable.engine.update_history import remembered, sums_with
from roundtable.engine.validation.round_plan import Plan, PrivacyPlan
from roundtable.privacy import BandedFTRL, CorrelatedNoise, NoiseSource, local_gaussian_charge


@dataclass(frozen=True)
class ServerState:
    """What passes from round to round beside the model: the server optimizer's vectors and counters,
    the last aggregate where the rule starts from it, the clip norm where it adapts, of noise that is
    correlated over rounds the last draws `[bands − 1, d]` with the number of rounds that had theirs, and
    the sum of each client's updates so far where the rule compares them."""

    optimizer: OptimizerState = field(default_factory=OptimizerState)
    previous: Tensor | None = None
    clip_norm: float | None = None
    drawn: Tensor | None = None
    draws: int = 0
    past: Mapping[str, Tensor] = field(default_factory=dict)

    def to_model(self) -> Model:
        """As an artifact: vectors become tensors, numbers metadata; `from_model` is exact."""
        vectors = {f"optimizer.{name}": value for name, value in self.optimizer.vectors.items()}
        if self.previous is not None:
            vectors["previous"] = self.previous
        metadata = {f"optimizer.{name}": str(value) for name, value in self.optimizer.scalars.items()}
        if self.clip_norm is not None:
            metadata["clip_norm"] = self.clip_norm.hex()
        if self.drawn is not None:
            vectors |= {f"drawn.{slot}": noise for slot, noise in enumerate(self.drawn)}
            metadata["draws"] = str(self.draws)
        vectors |= {f"past.{client}": total for client, total in self.past.items()}
        layout = Layout.of(vectors)
        return Model(layout, layout.flatten(vectors), metadata=metadata)

    @classmethod
    def from_model(cls, model: Model) -> ServerState:
        """The state that `to_model` wrote. Raises EncodingError for another kind of artifact."""
        tensors = model.state_dict()
        vectors = {n.removeprefix("optimizer."): t for n, t in tensors.items() if n.startswith("optimizer.")}
        numbers = {
            n.removeprefix("optimizer."): v for n, v in model.metadata.items() if n.startswith("optimizer.")
        }
        clip_norm = model.metadata.get("clip_norm")
        try:
            scalars = {name: int(value) for name, value in numbers.items()}
            bound = float.fromhex(clip_norm) if clip_norm is not None else None
            draws = int(model.metadata.get("draws", 0))
        except ValueError as error:
            raise EncodingError(f"the server optimizer's state cannot be read: {error}") from error
        slots = sum(name.startswith("drawn.") for name in tensors)
        drawn = torch.stack([tensors[f"drawn.{slot}"] for slot in range(slots)]) if slots else None
        if "draws" in model.metadata and drawn is None:
            drawn = torch.empty(0, 0)
        past = {name.removeprefix("past."): t for name, t in tensors.items() if name.startswith("past.")}
        return cls(OptimizerState(vectors, scalars), tensors.get("previous"), bound, drawn, draws, past)


@dataclass(frozen=True)
class Combined:
    """The new model's vector [d], the state for the next round, and the account of what was done."""

    vector: Tensor
    state: ServerState
    excluded: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    charge: Mapping[str, Any] = field(default_factory=dict)


def initial_server_state(plan: Plan, columns: int) -> ServerState:
    """The state before round 1."""
    clip_norm = plan.central.mechanism.bound if plan.central and plan.central.mechanism.adaptive else None
    drawn = plan.central.ftrl.init(columns).history if plan.central and plan.central.ftrl else None
    return ServerState(plan.optimizer.init(columns), clip_norm=clip_norm, drawn=drawn)


def combine(
    plan: Plan,
    matrix: UpdateMatrix,
    updates: Sequence[Update],
    model: Tensor,
    state: ServerState,
    *,
    round: int,
    seed: int,
    noise: NoiseSource | None = None,
    diagnose: bool = False,
    root_update: Tensor | None = None,
) -> Combined:
    """The outcome of round `round` (from 1): row i of `matrix` is the update of `updates[i]`.

    `model` is the global vector, float32 [d]; it is left alone. `noise` is needed by plans with
    central noise, `root_update` [d] by rules that compare with training on trusted data. Raises
    AggregationError where the updates give no sound answer.
    """
    if plan.central is not None:
        if noise is None:
            raise AggregationError("this job adds noise centrally, and no source of noise was given")
        return _with_noise(plan, plan.central, matrix, updates, model, state, round, noise)
    matrix = discounted(matrix, updates, round, plan.staleness_exponent)
    sums = sums_with(state.past, matrix, updates) if plan.aggregation.takes("history") else None
    result = _aggregated(plan, matrix, updates, state, sums, round, seed, diagnose, root_update)
    optimizer, vector = plan.optimizer.apply(state.optimizer, model, result.vector, round - 1)
    previous = result.vector if plan.aggregation.takes("previous") else None
    past = remembered(state.past, sums, updates, result.diagnosis.clients) if sums is not None else {}
    return Combined(
        _finite(vector),
        ServerState(optimizer, previous, past=past),
        excluded={exclusion.client: exclusion.message for exclusion in result.excluded},
        weights=result.weights,
        diagnosis=result.diagnosis.to_dict(),
        charge=_noise_of_silos(plan, noise),
    )


def try_rule(
    plan: Plan,
    matrix: UpdateMatrix,
    updates: Sequence[Update],
    state: ServerState,
    *,
    round: int,
    seed: int,
    root_update: Tensor | None = None,
) -> Tensor:
    """The aggregate [d] that `combine` would give to the server optimizer, for those who only ask: attackers
    in a simulation who try a rule before they send. Plans with central noise have no rule."""
    matrix = discounted(matrix, updates, round, plan.staleness_exponent)
    sums = sums_with(state.past, matrix, updates) if plan.aggregation.takes("history") else None
    return _aggregated(plan, matrix, updates, state, sums, round, seed, False, root_update).vector


def _aggregated(
    plan: Plan,
    matrix: UpdateMatrix,
    updates: Sequence[Update],
    state: ServerState,
    sums: Tensor | None,
    round: int,
    seed: int,
    diagnose: bool,
    root_update: Tensor | None,
) -> Aggregate:
    rows = [ClientRow(update.client, update.examples, update.loss) for update in updates]
    context = Context(state.previous, root_update, TensorMatrix(sums) if sums is not None else None)
    chance = derive_seed(seed, round, "aggregation")
    return aggregate(matrix, rows, plan.aggregation, chance, context=context, diagnose=diagnose)


def combine_mean(
    plan: Plan, mean: Tensor, model: Tensor, state: ServerState, *, round: int, charge: Mapping[str, Any]
) -> Combined:
    """The outcome of round `round` where all that is known of the updates is their mean, float32 [d].

    Nobody is excluded and no weights are told: a secure sum hides them. Raises AggregationError for a
    model that is not finite.
    """
    optimizer, vector = plan.optimizer.apply(state.optimizer, model, mean, round - 1)
    return Combined(_finite(vector), ServerState(optimizer), charge=charge)


def _with_noise(
    plan: Plan,
    central: PrivacyPlan,
    matrix: UpdateMatrix,
    updates: Sequence[Update],
    model: Tensor,
    state: ServerState,
    round: int,
    noise: NoiseSource,
) -> Combined:
    mechanism = central.at(state.clip_norm)
    correlated = _correlated(central.ftrl, state, round, matrix.columns) if central.ftrl else None
    draw = correlated.draw(noise) if correlated else None
    result = mechanism.prepare(matrix, noise, correlated=draw)
    optimizer, vector = plan.optimizer.apply(state.optimizer, model, result.vector, round - 1)
    clip_norm = result.next_clip.clip_norm if result.next_clip else None
    excluded = {updates[row].client: "the update holds values that are not finite" for row in result.rejected}
    charge = {
        "level": plan.privacy.level,
        "charge": central.charge_of(round).to_json(),
        "clip_norm": mechanism.bound,
        "noise_multiplier": central.noise_multiplier,
        "standard_deviation": result.standard_deviation,
        "guarantee": result.guarantee,
    }
    after = ServerState(optimizer, clip_norm=clip_norm)
    if correlated is not None and draw is not None:
        following = correlated.after(draw)
        after = replace(after, drawn=following.history, draws=following.done)
    return Combined(_finite(vector), after, excluded, charge=charge)


def _correlated(ftrl: BandedFTRL, state: ServerState, round: int, columns: int) -> CorrelatedNoise:
    """The noise that this round's depends on: a copy, since an attempt that fails must leave it alone."""
    if state.drawn is None or state.draws != round - 1:
        raise AggregationError(
            f"the correlated noise of {state.draws} rounds is stored, and round {round} needs that of "
            f"{round - 1}: without it the whole run has no guarantee. Start a new job"
        )
    history = state.drawn.clone() if state.drawn.numel() else torch.empty(0, columns)
    return CorrelatedNoise(ftrl, history, state.draws)


def _noise_of_silos(plan: Plan, noise: NoiseSource | None) -> Mapping[str, Any]:
    """What the record says where each silo adds its noise itself; its cost is in the silo's own account."""
    privacy = plan.privacy
    if privacy.level not in ("client_local", "example"):
        return {}
    guarantee = noise is None or noise.guarantee
    account: dict[str, Any] = {
        "level": privacy.level,
        "clip_norm": privacy.clip_norm,
        "guarantee": guarantee,
    }
    if plan.silo_noise is not None:
        account["noise_multiplier"] = plan.silo_noise
        account["silo_charge"] = local_gaussian_charge(plan.silo_noise).to_json()
    return account


def _finite(vector: Tensor) -> Tensor:
    if not is_finite(vector):
        raise AggregationError(
            "the new model is not finite although the aggregate is: lower the server's learning rate"
        )
    return vector

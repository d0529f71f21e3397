"""Sums of clipped updates with the coordinator's noise: drawn anew each round, or correlated over rounds."""

from __future__ import annotations

import torch

from roundtable.core.errors import AggregationError
from roundtable.engine.combining.received import Rows
from roundtable.engine.combining.round_delta import RoundAccount, RoundDelta
from roundtable.engine.combining.server_state import ServerState
from roundtable.engine.validation.round_noise import CorrelatedRounds, FreshNoise
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import (
    CentralDP,
    CentralResult,
    Charge,
    CorrelatedNoise,
    MatrixMechanism,
    NoiseSource,
)


def with_fresh_noise(
    plan: Plan, fresh: FreshNoise, rows: Rows, state: ServerState, noise: NoiseSource
) -> RoundDelta:
    """The sum of clipped updates with independent noise, over the cohort that was expected."""
    mechanism = fresh.at(state.clip_norm)
    result = mechanism.prepare(rows.matrix, noise)
    after = ServerState(clip_norm=result.next_clip.clip_norm if result.next_clip else None)
    account = _noisy_account(plan, mechanism, result, rows, fresh.charge, fresh.noise_multiplier)
    return RoundDelta(result.vector, after, account)


def with_correlated_noise(
    plan: Plan, rounds: CorrelatedRounds, rows: Rows, state: ServerState, round: int, noise: NoiseSource
) -> RoundDelta:
    """The same with noise that depends on that of earlier rounds."""
    correlated = _correlated(rounds.ftrl, state, round, rows.matrix.columns)
    draw = correlated.draw(noise)
    result = rounds.mechanism.prepare(rows.matrix, noise, correlated=draw)
    following = correlated.after(draw)
    after = ServerState(drawn=following.history, draws=following.done)
    charge = rounds.ftrl.charge(round)
    account = _noisy_account(plan, rounds.mechanism, result, rows, charge, rounds.noise_multiplier)
    return RoundDelta(result.vector, after, account)


def _noisy_account(
    plan: Plan, mechanism: CentralDP, result: CentralResult, rows: Rows, charge: Charge, multiplier: float
) -> RoundAccount:
    names = [rows.updates[row].client for row in result.rejected]
    return RoundAccount(
        excluded=dict.fromkeys(names, "the update holds values that are not finite"),
        charge={
            "level": plan.privacy.level,
            "charge": charge.to_json(),
            "clip_norm": mechanism.bound,
            "noise_multiplier": multiplier,
            "standard_deviation": result.standard_deviation,
            "guarantee": result.guarantee,
        },
    )


def _correlated(ftrl: MatrixMechanism, state: ServerState, round: int, columns: int) -> CorrelatedNoise:
    """The noise that this round's depends on: a copy, since an attempt that fails must leave it alone."""
    if state.drawn is None or state.draws != round - 1:
        raise AggregationError(
            f"the correlated noise of {state.draws} rounds is stored, and round {round} needs that of "
            f"{round - 1}: without it the whole run has no guarantee. Start a new job"
        )
    kept = ftrl.factorisation.kept
    if len(state.drawn) != kept:
        raise AggregationError(
            f"the stored state of the correlated noise has {len(state.drawn)} vectors, and the job's noise "
            f"({ftrl.factorisation}) goes on from {kept}: it is another run's. Start a new job"
        )
    history = state.drawn.clone() if state.drawn.numel() else torch.empty(0, columns)
    return CorrelatedNoise(ftrl, history, state.draws)

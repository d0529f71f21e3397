"""Makes a silo's rounds private over its ranks: by DP-SGD, or by noise on the whole update.

A round is paid for once, by rank 0, when its steps are done and before anything of it is written: a group
that breaks before that has given nothing out. One that is withdrawn is paid for. A round that is done again
has new samples and new noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roundtable.client.training.local_work import Stopped
from roundtable.client.training.private_training import fit_privately, own_noise
from roundtable.client.training.silo_account import Payment, Protection
from roundtable.cluster.parallel.shards import deltas
from roundtable.cluster.stepping.sharded_optimizer import sharded_correction
from roundtable.cluster.train.rank_trainer import RankTrainer
from roundtable.cluster.train.round_reports import StepReport, Watch, Wishes
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.privacy_table import Private
from roundtable.core.seeds import derive_seed, isolated_randomness
from roundtable.privacy import Charge, add_gaussian, local_gaussian_charge
from roundtable.privacy.example_level import Sources, secure_sources
from roundtable.privacy.mechanisms.clipping import clip_factor


class RoundCharge:
    """Checks a round's charge before its first step, and pays it before anything of the round leaves."""

    def __init__(self, check: Payment, pay: Payment) -> None:
        self._check = check
        self._pay = pay
        self._due: tuple[Private, Charge] | None = None

    def note(self, privacy: Private, charge: Charge) -> None:
        """Notes the charge, as a `Payment`; raises BudgetExceeded on rank 0 where the account is short."""
        if dist.get_rank() == 0:
            self._check(privacy, charge)
        self._due = (privacy, charge)

    def settle(self, group: dist.ProcessGroup | None) -> None:
        """Charges the account; every rank waits until that is on disk."""
        assert self._due is not None
        if dist.get_rank() == 0:
            self._pay(*self._due)
        dist.barrier(group)
        self._due = None


def fit_examples_privately(
    trainer: RankTrainer,
    data: Any,
    round: int,
    round_charge: RoundCharge,
    watch: Watch,
    wishes: Wishes | None = None,
    control: dist.ProcessGroup | None = None,
    sources: Sources = secure_sources,
) -> None:
    """One round of DP-SGD (Abadi et al. 2016): every rank clips and sums, rank 0 adds the noise to the sum.

    Each rank samples from its own part of the examples. Reports have no loss and no norm, which are private.
    Raises Stopped, on every rank, after the step in which that was wished. The round is paid for then too,
    over the group `control`: whoever withdraws it learns how long its steps took.
    """
    wishes = wishes or Wishes()
    rate = trainer.begin(round)
    ranks = trainer.meshes.root.size()
    protection = Protection(round_charge.note, sources, trainer.mode)
    ended = time.perf_counter()

    def report(step: int, steps: int) -> None:
        nonlocal ended
        now = time.perf_counter()
        seconds, ended = now - ended, now
        watch(
            StepReport(
                step=step,
                steps=steps,
                examples=0,
                loss=math.nan,
                norm=math.nan,
                learning_rate=rate,
                seconds=seconds,
                waiting=0.0,
                memory=0,
            )
        )
        try:
            wishes.obey(trainer.device)
        except Stopped:
            round_charge.settle(control)
            raise

    seed = derive_seed(trainer.job.seed, round, trainer.client, "training", trainer.meshes.data_rank)
    assert trainer.optimizer is not None
    trainer.replica.train()
    with isolated_randomness(seed, trainer.device):
        fit_privately(
            trainer.task,
            trainer.replica.model,
            trainer.optimizer,
            data,
            trainer.job,
            round,
            sharded_correction(make_algorithm(trainer.job.algorithm).step(), trainer.replica.parameters()),
            trainer.device,
            protection,
            group=trainer.meshes.one("dp").get_group() if ranks > 1 else None,
            physical_batch=trainer.strategy.micro_batch,
            watch=report,
        )
    trainer.mode = protection.mode
    trainer.finish()


def noise_on_parts(
    trainer: RankTrainer, start: Tensor, round_charge: RoundCharge, sources: Sources = secure_sources
) -> Callable[[Tensor], Tensor]:
    """Returns the function that makes a part of the update private: clipped to C as a whole, noise σ = z · C.

    The norm is a sum over the ranks' parts. Every entry of the update belongs to one rank, which draws its
    noise: together they are the noise that one process would add. `start` is the mapped global vector.
    """
    privacy, clip_norm, multiplier = own_noise(trainer.job)
    round_charge.note(privacy, local_gaussian_charge(multiplier))
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    for _, _, part in deltas(trainer.replica.tensors(), trainer.places, start, trainer.meshes):
        total += part.double().square().sum().to(trainer.device)
    dist.all_reduce(total)
    factor = clip_factor(math.sqrt(float(total)), clip_norm)
    source = sources("noise")

    def protect(part: Tensor) -> Tensor:
        clipped = part.flatten() * factor
        return add_gaussian(clipped, multiplier * clip_norm, source).vector.view(part.shape)

    return protect

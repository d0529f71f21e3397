"""What a silo does so that what leaves it is private already: DP-SGD, or noise on its update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.client.batch_tensors import moved
from roundtable.client.training.batches import as_tensors, asking, count_examples
from roundtable.client.training.loaders import base_of, collate_of, drops_last, own_sampler
from roundtable.client.training.sgd import RoundSchedule
from roundtable.client.training.silo_account import Protection
from roundtable.core.config import JobConfig
from roundtable.core.errors import NoExamples, PrivacyError
from roundtable.core.layout import Layout
from roundtable.core.privacy_table import ClientLocalLevel, ExampleLevel
from roundtable.core.task import Task
from roundtable.privacy import (
    add_gaussian,
    example_training,
    local_gaussian,
    local_gaussian_charge,
    noise_for,
    sums_charges,
    sums_noise,
)
from roundtable.privacy.example_level import make_private

CANNOT_SAMPLE = (
    'privacy.level = "example" samples from a known number of examples, and training data that can only be '
    "iterated have none: return a map-style data set"
)


def fit_privately(
    task: Task,
    module: nn.Module,
    optimizer: Any,
    data: Any,
    job: JobConfig,
    round: int,
    correct: Callable[[], None] | None,
    device: torch.device,
    protection: Protection,
    *,
    group: dist.ProcessGroup | None = None,
    physical_batch: int = 256,
    watch: Callable[[int, int], None] | None = None,
    before_batch: Callable[[], None] | None = None,
) -> int:
    """One round of DP-SGD, paid for before its first step; gives the number of steps.

    `correct` changes the noisy gradients: a proximal term depends on no example. `watch` is called with
    (steps taken, steps in all) and may raise, as may `before_batch`: the round stays paid for, since whoever
    stops it learns how long its steps took. In a `group` all processes have the whole data set and call
    this together: each samples from examples of its own, so that a batch is drawn as by one process.
    Raises PrivacyError for a model, a loss or data that cannot be made private, BudgetExceeded for
    what the silo's account does not hold.
    """
    examples = count_examples(data)
    if examples is None:
        raise PrivacyError(CANNOT_SAMPLE)
    if own_sampler(data) is not None or drops_last(data):
        raise PrivacyError(
            "the DataLoader of the training data has a sampler of its own or drop_last, and example-level "
            "privacy samples by itself, each example alike: return the data set, or a DataLoader "
            "with shuffle=True"
        )
    if examples == 0:
        raise NoExamples("the training data set is empty: there are zero examples to learn from")
    config, steps = example_training(job, examples)
    fetch, own = _own_part(_fetch(data, device), examples, group)
    with make_private(
        module,
        optimizer,
        task.loss,
        fetch,
        own,
        config,
        total_steps=steps * job.rounds,
        mode=protection.mode,
        physical_batch=physical_batch,
        sources=protection.sources,
        group=group,
    ) as training:
        protection.mode = training.mode
        protection.pay(config, training.charge(steps))
        schedule = RoundSchedule(optimizer, job, round, steps)
        for taken, indices in enumerate(asking(training.batches(steps), before_batch), 1):
            schedule.before(taken)
            training.step(indices, correct)
            if watch is not None:
                watch(taken, steps)
    return steps


def _own_part(
    fetch: Callable[[Tensor], Any], examples: int, group: dist.ProcessGroup | None
) -> tuple[Callable[[Tensor], Any], int]:
    """Every `size`-th example is one process's; each of them has at least one."""
    if group is None:
        return fetch, examples
    size, rank = group.size(), dist.get_rank(group)
    if examples < size:
        raise PrivacyError(
            f"{size} processes share out fewer examples than that, so some would have none to sample from; "
            "use fewer devices"
        )
    return lambda indices: fetch(indices * size + rank), len(range(rank, examples, size))


def only_parameters(delta: Tensor, module: nn.Module, layout: Layout) -> None:
    """Buffers that training may have filled from examples stay as they were: no noise covers them."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for spec in layout.averaged:
        if spec.name not in trained:
            delta[spec.offset : spec.offset + spec.size] = 0.0


def add_own_noise(delta: Tensor, job: JobConfig, protection: Protection) -> Tensor:
    """The update clipped, with the silo's own noise, paid for before."""
    privacy, clip_norm, noise = own_noise(job)
    protection.pay(privacy, local_gaussian_charge(noise))
    return local_gaussian(delta, clip_norm, noise, protection.sources("noise")).vector


def own_noise(job: JobConfig) -> tuple[ClientLocalLevel, float, float]:
    """(privacy, C, z) of level client_local: updates are clipped to C and get noise of σ = z · C."""
    privacy = job.privacy
    if not isinstance(privacy, ClientLocalLevel):
        raise PrivacyError(f"privacy.level = {privacy.level!r} has no noise of a silo's own on its update")
    # How many silos there are makes no difference to noise that hides this one from everybody.
    return privacy, privacy.clip_norm, noise_for(job, 1, 1)


class SumRelease:
    """Makes a job's exact sums of one round fit to leave; `made` says whether it was asked to."""

    def __init__(self, job: JobConfig, round: int, protection: Protection) -> None:
        assert isinstance(job.privacy, ExampleLevel), "other levels release no sums"
        self._job = job
        self._round = round
        self._privacy = job.privacy.model_copy(update={"epsilon": None})
        self._protection = protection
        self.made = False

    def noised(self, sums: npt.NDArray[np.float64], about: bytes) -> npt.NDArray[np.float64]:
        """`sums` with their noise; what was released before in this round, where it was asked about the same.
        PrivacyError for a job whose settings do not agree, BudgetExceeded where the silo's account does not
        hold it."""
        protection = self._protection
        noise = sums_noise(self._job)
        self.made = True
        kept = protection.release
        if kept is not None and (before := kept.load(sums.size, about)) is not None:
            return before
        # The job's epsilon is of the job alone, as sums_noise has checked; what all may cost, the silo says.
        protection.pay(self._privacy, sums_charges(self._job, noise)[self._round - 1])
        exact = torch.from_numpy(np.ascontiguousarray(sums, dtype=np.float64))
        released = add_gaussian(exact, noise, protection.sources("noise")).vector.numpy()
        if kept is not None:
            kept.keep(released, about)
        return released


def _fetch(data: Any, device: torch.device) -> Callable[[Tensor], Any]:
    tensors = as_tensors(data)
    if tensors is not None:
        return lambda indices: tuple(tensor[indices].to(device) for tensor in tensors)

    base, together = base_of(data), collate_of(data)

    def collate(indices: Tensor) -> Any:
        return moved(together([base[int(index)] for index in indices]), device)

    return collate

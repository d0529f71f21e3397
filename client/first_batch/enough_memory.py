"""Whether the memory there is suffices for a step of training, before the first one, and what would fit.

An estimate is rather too small (`step_memory`), so that what it refuses would not have fitted. It takes
seconds, and is made for large models alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from roundtable.client.first_batch.step_memory import NotEstimated, StepMemory, bytes_of, step_memory
from roundtable.client.training.algorithm_round import begun
from roundtable.client.training.local_work import LocalWork
from roundtable.client.training.micro_batches import CannotSplit, parts
from roundtable.client.training.training_loop import make_optimizer
from roundtable.core.algorithms.factors.factor_pairs import factor_pairs
from roundtable.core.algorithms.factors.own_ranks import RankedAlgorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import InsufficientMemory
from roundtable.core.foundation.pretrained_task import PretrainedTask
from roundtable.core.machine.process_facts import free_memory, held_memory, memory_table
from roundtable.core.quantities import format_bytes
from roundtable.core.task import Task, in_context

_log = logging.getLogger("roundtable.memory")
_ALL, _SMALL, _TIGHT = 6, 0.1, 0.85
"""So many times its weights are hardly less than a model's step needs; as a share of what there is, what is
not looked at, and from where on somebody is told."""


@dataclass(frozen=True)
class Room:
    """Bytes that training may still take on a device, and in words whose they are."""

    free: int
    words: str


def room_on(device: torch.device, memory: int | None = None, gpu_memory: int | None = None) -> Room | None:
    """`memory` and `gpu_memory` are the most that this process may hold; None where nobody tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        free += torch.cuda.memory_reserved(device) - held
        rooms = [Room(free, "free on the GPU")]
        rooms += [] if gpu_memory is None else [Room(gpu_memory - held, "left by [policy] max_gpu_memory")]
        return min(rooms, key=lambda room: room.free)
    free_here = free_memory()
    rooms = []
    if free_here is not None:
        rooms.append(Room(free_here + memory_table().get("SwapFree", 0), "free for this process"))
    if memory is not None and (own := held_memory()) is not None:
        allowed = f"this silo allows {memory >> 20} MiB ([policy] max_memory)"
        rooms.append(Room(max(0, memory - own), allowed))
    return min(rooms, key=lambda room: room.free, default=None)


@dataclass(frozen=True)
class TriedStep:
    """A step of a client's `work` on a `batch` of `examples` (None: nobody has one), in each of so many
    `processes`.

    `held` are the bytes that a process has of it already where it trains, `beside` what all need besides: the
    updates. `cluster`: whether a silo's could take the step. `rank`: of its factors, if it was set for the
    step.
    """

    task: Task
    work: LocalWork
    module: nn.Module
    context: Context
    batch: Any
    examples: int
    held: int
    beside: int = 0
    processes: int = 1
    cluster: bool = True
    rank: int | None = None
    known: dict[Any, StepMemory] = field(default_factory=dict)

    def memory(self, examples: int, *, checkpointing: bool = False) -> StepMemory:
        """With no more than so many examples at once. Raises NotEstimated or CannotSplit."""
        key = self.rank, examples, checkpointing
        if key not in self.known:
            batch = self.batch
            if batch is not None and examples < self.examples:
                batch, _ = next(parts(batch, self.examples, examples))
            # What a loss sets on its task would be tensors without values.
            told, rules = in_context(copy.copy(self.task), self.context), self.work.rules()
            optimizer = partial(make_optimizer, told, job=self.work.job, step=rules.step(), round=1)
            with ExitStack() as entered:

                def change(module: nn.Module) -> None:
                    if checkpointing:
                        _checkpointed(module)
                    if rules.resizes:
                        entered.enter_context(
                            rules.while_training(begun(self.work, self.context, ()), module)
                        )

                device = self.context.device
                self.known[key] = step_memory(told, self.module, batch, optimizer, change, device)
        return self.known[key]

    def needed(self, examples: int, **how: bool) -> int:
        """Bytes of all processes."""
        one = self.memory(examples, **how)
        most = one.peak
        if examples < self.examples:
            # From the second part on all gradients are there.
            most = max(most, one.weights + one.optimizer + one.gradients + one.activations)
        return self.processes * most + self.beside

    def there(self, room: Room) -> int:
        """Bytes that all processes may have."""
        return room.free + self.processes * self.held

    def fits(self, room: Room) -> bool:
        """Whether it has room without being tight. Raises NotEstimated."""
        there = self.there(room)
        small = _ALL * self.processes * bytes_of(self.module) <= _SMALL * there
        return small or self.needed(self.examples) <= _TIGHT * there


def check_room(step: TriedStep, room: Room | None, halved: Sequence[int] = ()) -> str:
    """What is to be said of memory that hardly suffices; "" where it does, or where nobody knows.

    Raises InsufficientMemory for a step that has no room, with what would fit, or with which part of the
    batch, of `halved` examples once, twice and so on, does.
    """
    if room is None:
        return ""
    there = step.there(room)
    try:
        if step.fits(room):
            return ""
        needed = step.needed(step.examples)
        says = f"{_needs(step)}, and {has(step, room)}"
        if needed <= there:
            return f"memory is tight: {says}"
        for halvings, examples in enumerate(halved if step.batch is not None else (), 1):
            if examples < step.examples and step.needed(examples) <= _TIGHT * there:
                raise InsufficientMemory(says, halvings)
    except NotEstimated as error:
        _log.debug("the memory of a training step is not known beforehand: %s", error)
        return ""
    except CannotSplit:
        pass
    raise InsufficientMemory(f"{says}. {_remedies(step, there)}")


def _needs(step: TriedStep) -> str:
    one = step.memory(step.examples)
    terms = {
        "weights": one.weights,
        "gradients": one.gradients,
        "optimizer": one.optimizer,
        f"activations of {step.examples} example{'s' * (step.examples != 1)}": one.activations,
        "updates": step.beside,
    }
    said = ", ".join(f"{name} {format_bytes(value)}" for name, value in terms.items() if value)
    each = f"; all but the updates in each of {step.processes} processes" if step.processes > 1 else ""
    total = format_bytes(step.needed(step.examples))
    rank = _rank_of(step)
    which = f" with factors of rank {rank}" if rank else ""
    return f"a training step{which} needs at least {total} of memory ({said}{each})"


def has(step: TriedStep, room: Room) -> str:
    """What memory there is, for people."""
    held = step.processes * step.held
    model = f", {format_bytes(held)} of it taken by the model already" if held else ""
    return f"there are {format_bytes(step.there(room))} ({room.words}{model})"


def _remedies(step: TriedStep, there: int) -> str:
    found = list(_changes(step, there))
    fits = [f"{what} ({format_bytes(needed)})" for what, needed in found if needed <= there]
    others = [f"{what} ({format_bytes(needed)})" for what, needed in found if needed > there]
    said = [f"What would fit, by estimate: {'; or '.join(fits)}"] if fits else []
    if others:
        said.append(f"Not enough alone: {', '.join(others)}")
    ranks = ", or give the silo a [cluster], whose ranks share weights and optimizer out"
    said.append(f"Otherwise take a smaller model{ranks if step.cluster else ''}")
    return ". ".join(said)


def _changes(step: TriedStep, there: int) -> Iterator[tuple[str, int]]:
    """What needs less, with the bytes that it would need; of batches the largest half that fits."""
    one, task = step.memory(step.examples), step.task
    needed = step.needed(step.examples)
    if step.processes > 1:
        yield "simulation.workers = 1", (needed - step.beside) // step.processes + step.beside
    try:
        examples, less = step.examples, needed
        while step.batch is not None and examples > 1 and less > there:
            examples //= 2
            less = step.needed(examples)
        if examples < step.examples:
            yield f"algorithm.batch_size = {examples}", less
    except (NotEstimated, CannotSplit):
        pass
    yield from _smaller_rank(step, there)
    if _can_checkpoint(step.module) and step.batch is not None:
        try:
            yield (
                "gradient checkpointing ([task] checkpointing = true)",
                step.needed(step.examples, checkpointing=True),
            )
        except NotEstimated as error:
            _log.debug("checkpointing is not estimated: %s", error)
    if not isinstance(task, PretrainedTask):
        return
    if task.method == "full":
        saved = step.processes * (one.gradients + one.optimizer) + step.beside
        yield '[task] method = "lora"', needed - saved
    elif task.precision == "float32":
        yield '[task] precision = "bfloat16"', needed - step.processes * one.weights // 2
    if step.batch is not None:
        half = needed - step.processes * min(one.activations, one.peak - one.weights - one.optimizer) // 2
        yield f"[task] length = {task.length // 2}", half


def _smaller_rank(step: TriedStep, there: int) -> Iterator[tuple[str, int]]:
    """The largest rank below the client's own that fits, halved from that on; 1 where none does."""
    rank, found = _rank_of(step) // 2, ("", 0)
    while rank and (not found[0] or found[1] > there):
        found = f"factors of rank {rank}", of_rank(step, rank).needed(step.examples)
        rank //= 2
    if found[0]:
        yield found


def _rank_of(step: TriedStep) -> int:
    """The most of the client's factors by the job; 0 where it is not by the job that they have a rank."""
    rules = step.work.rules()
    if not isinstance(rules, RankedAlgorithm):
        return 0
    return max(rules.job_ranks(step.context.site, factor_pairs(step.work.layout.model)), default=0)


def of_rank(step: TriedStep, rank: int) -> TriedStep:
    """The same step of a client whose factors have this rank."""
    rules = step.work.rules()
    assert isinstance(rules, RankedAlgorithm)
    work = replace(step.work, algorithm=rules.of_rank(step.context.site, rank))
    return replace(step, work=work, rank=rank)


def _can_checkpoint(module: Any) -> bool:
    return callable(getattr(module, "gradient_checkpointing_enable", None)) and not getattr(
        module, "is_gradient_checkpointing", False
    )


def _checkpointed(module: Any) -> None:
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.enable_input_require_grads()

"""Traces a task's loss as often as it takes to tell what every pass changes; tries a batch and its halves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from roundtable.client.batch_tensors import examples_in
from roundtable.client.first_batch.step_memory import quietly
from roundtable.client.training.micro_batches import parts
from roundtable.cluster.parallel.anatomy import Rewritten, attributes_of
from roundtable.cluster.parallel.experts import Experts
from roundtable.cluster.parallel.forward_trace import Trace, trace
from roundtable.cluster.parallel.pipeline_stages import FixedOutput
from roundtable.core.errors import TaskError
from roundtable.core.seeds import isolated_randomness
from roundtable.core.task import Task, initial_state

# Numbers of a made-up output beyond which it has some of a sequence's places, and how many of each kind.
_MOST_NUMBERS, _PLACES = 1 << 23, 8
# Bytes of a model that is made and run to try it, and operations of its trial.
_SMALL, _LITTLE = 64 << 20, 1e10
# Of how many roundings of its numbers the difference of two passes may be.
_ROUNDINGS = 16


def settled_trace(
    task: Task, mode: FakeTensorMode | None, model: nn.Module, batch: Any, bfloat16: bool = False
) -> Trace:
    """The trace with what every pass changes: tables that the first one alone makes are no change.

    Raises TaskError where two passes draw from one generator of the task's own.
    """
    before = attributes_of(model)
    traced = trace(task, mode, model, batch, bfloat16)
    after = attributes_of(model)
    same = before.keys() == after.keys() and all(_alike(each, after[name]) for name, each in before.items())
    if same and not traced.rewritten and not traced.generators:
        return traced
    second = trace(task, mode, model, batch)
    kept = [id(each) for _, each in traced.generators]
    if own := next((name for name, each in second.generators if id(each) in kept), None):
        raise TaskError(
            f"{own or 'the loss'} draws random numbers from a generator of its own, which knows neither "
            "steps nor ranks: a round that is done again, and a block that is computed again, would draw "
            "others; draw from torch's default generator, which is seeded for each step"
        )
    counted = {
        name: value
        for name, value in after.items()
        if not isinstance(value, Tensor) and attributes_of(model).get(name) != value
    }
    numbers = [Rewritten(name, name.rpartition(".")[0], weight=False, by_batch=False) for name in counted]
    traced.rewritten = (*second.rewritten, *numbers)
    if traced.rewritten and traced.examples > 1:
        traced.rewritten = _by_examples(
            traced, counted, lambda fewer: trace(task, mode, model, fewer), model, batch
        )
    return traced


def _by_examples(
    traced: Trace, counted: Mapping[str, float], again: Callable[[Any], Trace], model: nn.Module, batch: Any
) -> tuple[Rewritten, ...]:
    """What a pass changes, told of another with an example less whether it depends on how many there are."""
    reached = attributes_of(model)
    for name, value in counted.items():
        owner, _, key = name.rpartition(".")
        vars(model.get_submodule(owner))[key] = value

    def without_last(tensor: Tensor) -> Tensor:
        return tensor[:-1] if tensor.dim() and len(tensor) == traced.examples else tensor

    try:
        found = again(tree_map_only(Tensor, without_last, batch))
    except Exception:  # noqa: BLE001 - a loss may want batches of one length
        return traced.rewritten
    fewer, now = {each.name: each.numbers for each in found.rewritten}, attributes_of(model)
    return tuple(
        replace(
            each,
            by_batch=each.by_batch
            or fewer.get(each.name, each.numbers) != each.numbers
            or (each.name in counted and now[each.name] != reached[each.name]),
        )
        for each in traced.rewritten
    )


def _alike(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and bool(one == other))


@dataclass(frozen=True)
class BatchTrial:
    """What a small model with values showed.

    `whole`: a batch's loss, or its gradient, is another than the mean of its halves', None where nobody can
    tell. `evaluations`: what an evaluation changes, so that the next one comes out otherwise; "" for nothing.
    """

    whole: bool | None = None
    evaluations: str = ""


def try_batch(task: Task, traced: Trace, model: nn.Module, flops: float, batch: Any) -> BatchTrial:
    """Runs a small model on a batch of a few examples, again, and on its halves.

    `model` says how large it is, `flops` how much work an example is.
    A loss may take more of a model than one output, and a model may compare examples itself: neither shows on
    made-up outputs. In training mode, unless layers draw numbers or keep something there.
    """
    bytes_of_all = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    examples = examples_in(batch)
    if bytes_of_all > _SMALL or flops * examples > _LITTLE or any(map(_is_routed, model.modules())):
        return BatchTrial()
    try:
        with quietly():
            made = initial_state(task, 0)
            assert isinstance(made, nn.Module)
            model = made.eval()
            losses = [_loss_with(task, model, batch) for _ in range(2)]
            settled = _numbers_of(model)
            losses += [_loss_with(task, model, batch) for _ in range(2)]
            if losses[1] != losses[2] or losses[2] != losses[3]:
                now = _numbers_of(model)
                changed = (name for name, value in settled.items() if not torch.equal(value, now[name]))
                return BatchTrial(evaluations=next(changed, "the model"))
            model.train(not (traced.draws or traced.rewritten or traced.normalised or has_statistics(model)))
            whole = _gradient(task, model, batch)
            if not torch.equal(whole[:1], _gradient(task, model, batch, seed=2)[:1]):
                return BatchTrial()  # By chance.
            halves = torch.zeros_like(whole)
            for half, size in parts(batch, examples, (examples + 1) // 2):
                halves += _gradient(task, model, half) * (size / examples)
    except Exception:  # noqa: BLE001 - foreign code, which need not run on part of a batch
        return BatchTrial()
    if not (whole.isfinite().all() and halves.isfinite().all()):
        return BatchTrial()
    # What a model in two bytes rounds differs between a batch and its halves, too.
    rounding = _ROUNDINGS * max(torch.finfo(each.dtype).eps for each in model.parameters())
    losses_alike = math.isclose(
        float(whole[0]), float(halves[0]), rel_tol=max(1e-3, rounding), abs_tol=max(1e-6, rounding)
    )
    gap, largest = (float(each.abs().max()) for each in ((whole - halves)[1:], whole[1:]))
    return BatchTrial(not losses_alike or gap > max(1e-2, rounding) * largest)


def _is_routed(module: nn.Module) -> bool:
    """Whether how full experts are depends on how many examples there are, of which others know."""
    return isinstance(module, Experts)


def _loss_with(task: Task, model: nn.Module, batch: Any, seed: int = 1) -> float:
    # A task may change its batch.
    with isolated_randomness(seed, torch.device("cpu")):
        return float(task.loss(model, copy.deepcopy(batch)).detach())


def _gradient(task: Task, model: nn.Module, batch: Any, seed: int = 1) -> Tensor:
    """The loss, and behind it its gradient: [1 + d]."""
    trained = [each for each in model.parameters() if each.requires_grad]
    with isolated_randomness(seed, torch.device("cpu")):
        loss = task.loss(model, copy.deepcopy(batch))
        found = torch.autograd.grad(loss, trained, allow_unused=True)
    own = (torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True))
    return torch.cat([loss.detach().double().view(1), *(each.detach().double().flatten() for each in own)])


def _numbers_of(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and numbers and tensors in attributes, as they are now."""
    found = {**attributes_of(model), **dict(model.named_buffers())}
    return {name: torch.as_tensor(each).detach().clone() for name, each in found.items()}


def has_statistics(model: nn.Module) -> bool:
    """Whether a layer takes statistics over a batch while it trains."""
    return any(isinstance(each, (_BatchNorm, _InstanceNorm)) for each in model.modules())


def is_whole_loss(task: Task, traced: Trace, batches: Sequence[Any]) -> bool:
    """Whether a batch's loss is another than the mean of its examples' losses.

    Of the first batch for which the loss takes a made-up output in the place of the model's, two parts are
    tried. Where none does, as the model computes its own loss, a mean over classes tells that leaves out
    labels of which examples have different numbers.
    """
    call = next((each for each in traced.calls if each.name == ""), None)
    chance = any(each.name == "" for each in traced.draws)
    if call is not None and call.output and call.output[0] == traced.examples and not chance:
        for batch in batches:
            if (found := _differs_in_parts(task, call.output[1:], batch, traced.ignored)) is not None:
                return found
    labels = [leaf for leaf in tree_leaves(batches[0]) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    counts = [(leaf == each).flatten(1).sum(1) for leaf in labels for each in traced.ignored]
    return any(bool((each != each[0]).any()) for each in counts)


def _differs_in_parts(task: Task, shape: Sequence[int], batch: Any, ignored: Collection[int]) -> bool | None:
    """None where the loss does not take a made-up output."""
    length = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)
    cut = length // 2 - (length % 2 == 0)
    if cut < 1:
        return None
    if len(shape) > 1 and length * math.prod(shape) > _MOST_NUMBERS:
        places = _telling_places(batch, shape[0], ignored)
        batch = tree_map_only(Tensor, partial(_at_places, places=places, whole=shape[0]), batch)
        shape = len(places), *shape[1:]
    generator = torch.Generator().manual_seed(1)
    wide = 3.0 * torch.randn(length, *shape, generator=generator)
    for made in (wide, wide.sigmoid(), wide.double(), wide.sigmoid().double()):

        def loss_of(first: int, after: int, made: Tensor = made) -> float:
            def part(tensor: Tensor) -> Tensor:
                return tensor[first:after] if tensor.dim() and len(tensor) == length else tensor

            with isolated_randomness(1, torch.device("cpu")), torch.no_grad():
                return float(task.loss(FixedOutput(made[first:after]), tree_map_only(Tensor, part, batch)))

        try:
            whole, one, other = loss_of(0, length), loss_of(0, cut), loss_of(cut, length)
        except Exception:  # noqa: BLE001 - a loss may want probabilities, or more of a model than an output
            continue
        if math.isfinite(whole):
            mean = (cut * one + (length - cut) * other) / length
            return not math.isclose(whole, mean, rel_tol=1e-3, abs_tol=1e-6)
    return None


def _telling_places(batch: Any, length: int, ignored: Collection[int]) -> list[int]:
    """Places of a sequence that stand for all: some evenly apart, and some that examples mask unlike."""
    unlike = torch.zeros(length, dtype=torch.bool)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and leaf.shape[1] in (length, length + 1):
            for value in (0, *ignored):
                masked = leaf[:, -length:] == value
                unlike |= (masked != masked[0]).any(0)
    found = unlike.nonzero().flatten().tolist()
    return sorted({*range(0, length, -(-length // _PLACES)), *found[:_PLACES], *found[-_PLACES:]})


def _at_places(tensor: Tensor, places: Sequence[int], whole: int) -> Tensor:
    """A tensor of a batch at these places of the sequence; one that has the next token too keeps its last."""
    for dimension, size in enumerate(tensor.shape):
        if dimension and size in (whole, whole + 1):
            taken = [*places, whole] if size > whole else places
            tensor = tensor.index_select(dimension, torch.tensor(taken))
    return tensor

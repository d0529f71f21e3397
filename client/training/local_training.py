"""Local training: one function, for silos and for simulated clients alike.

It is a pure function of what it is given: the module's tensors outside the vector and every
global random generator are put back as they were found, so that a module may serve one client
after the other and any order of clients gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.client.training.algorithm_round import AlgorithmRound, trained_slices
from roundtable.client.training.arrays import arrays_of, fit_result, state_of
from roundtable.client.training.batches import Batch, asking, ordered_batches
from roundtable.client.training.local_work import BeforeBatch, Execution, LocalUpdate, LocalWork
from roundtable.client.training.micro_batches import CannotSplit
from roundtable.client.training.module_state import borrowed, outside
from roundtable.client.training.optimizer_state import restore_state, state_tensors
from roundtable.client.training.private_training import (
    SumRelease,
    add_own_noise,
    fit_privately,
    only_parameters,
)
from roundtable.client.training.sgd import make_correction
from roundtable.client.training.silo_account import Protection
from roundtable.client.training.stream_batches import RoundBatches
from roundtable.client.training.training_loop import TrainingLoop, train_second, watched
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.passes import copy_with
from roundtable.core.algorithms.round_context import Context
from roundtable.core.config import JobConfig
from roundtable.core.errors import InvalidUpdate, PrivacyError, TaskError
from roundtable.core.layout import Layout
from roundtable.core.observability.unnoised_parts import unnoised_part
from roundtable.core.privacy_table import ClientLocalLevel, ExampleLevel, NoPrivacy, OwnNoise
from roundtable.core.seeds import derive_seed, isolated_randomness
from roundtable.core.task import AnyTask, ArrayTask, Site, Task, in_context


def split_data(task: AnyTask, site: Site) -> tuple[Any, Any]:
    """(training data, test data) of a site; an ArrayTask has one object for both."""
    data = task.data(site)
    site.check_asked(f"{type(task).__name__}.data()")
    if isinstance(task, ArrayTask):
        return data, data
    if not (isinstance(data, (tuple, list)) and len(data) == 2):
        raise TaskError(
            f"{type(task).__name__}.data() returned {type(data).__name__}, not the pair (train, test)"
        )
    return data[0], data[1]


def train(
    task: AnyTask,
    model: nn.Module | Mapping[str, Tensor],
    data: Any,
    work: LocalWork,
    execution: Execution = Execution(),  # noqa: B008 - a frozen value
) -> LocalUpdate:
    """Trains from the global vector on the training data of one client.

    The order of batches comes from the stream (job.seed, round, client, "batches"), everything else random
    from (…, "training"). An update that the silo itself makes private (levels example and client_local) tells
    neither loss nor metrics nor its number of examples.

    Raises NoExamples for an empty data set, InvalidUpdate for a loss or weights that are not
    finite, LayoutError for a model that is not the layout's, PrivacyError for a protection that is
    asked of the silo and not there, CannotSplit where parts of batches would train another model, Stopped
    where `execution.before_batch` does, and whatever the task raises.
    """
    # An ArrayTask's data are its own affair: it takes them whole.
    context = work.context(None if isinstance(task, ArrayTask) else data, torch.device(execution.device))
    check_privacy(work.job, execution.protection is not None)
    by_example = isinstance(work.job.privacy, ExampleLevel)
    _check_divisible(task, by_example and not work.rules().answers, execution)
    seed = derive_seed(work.job.seed, work.round, work.client, "training")
    with isolated_randomness(seed, torch.device(execution.device)):
        if work.rules().answers:
            update = _answered(data, work, execution, context)
        elif isinstance(task, ArrayTask):
            update = _train_arrays(in_context(task, context), model, data, work, execution, seed)
        else:
            update = _train_module(task, module_of(model), data, work, execution, context)
    return _protected(update, work.job, execution.protection)


def _check_divisible(task: AnyTask, by_example: bool, execution: Execution) -> None:
    """Raises PrivacyError or CannotSplit where the task's training cannot be divided as is asked."""
    if execution.micro_batch is not None and (isinstance(task, ArrayTask) or by_example):
        raise CannotSplit("this training takes no batches that could be split")
    if isinstance(task, ArrayTask) and by_example:
        raise PrivacyError(
            'privacy.level = "example" bounds the gradient of every example, and an ArrayTask gives '
            'none: write a Task with a model and a loss, or use level "client_local"'
        )


def _train_module(
    task: Task, module: nn.Module, data: Any, work: LocalWork, execution: Execution, context: Context
) -> LocalUpdate:
    task, device = in_context(task, context), context.device
    job, layout = work.job, work.layout.model
    by_example = isinstance(job.privacy, ExampleLevel)
    module = module.to(device)
    vector = work.vector[: layout.size]
    with borrowed(module, layout, vector, work.local), ExitStack() as hooks:
        start = vector if is_plain(layout) else layout.flatten(module, torch.empty_like(vector))
        measure = partial(whole_loss, task, module, data, work, device, execution.before_batch)
        trained = trained_slices(module, layout)
        rules = AlgorithmRound(work, context, trained, measure)
        rules.begins(module)
        hooks.enter_context(rules.algorithm.while_training(rules.round, module))
        parameters = [p for p in module.parameters() if p.requires_grad]
        batches = RoundBatches(data, work, device)
        correct = make_correction(rules.step, parameters, rules.constants(module, parameters))
        loop = TrainingLoop(task, module, parameters, work, rules, execution)
        keep = job.algorithm.optimizer_state == "keep"
        if keep:
            restore_state(loop.optimizer, module, work.local or {})
        own = None if rules.second is None else copy_with(module, layout, rules.second.start)
        seen: list[Batch] = []
        module.train()
        if execution.protection is not None and by_example:
            loop.steps = fit_privately(
                task,
                module,
                loop.optimizer,
                data,
                job,
                work.round,
                correct,
                device,
                execution.protection,
                before_batch=execution.before_batch,
            )
        else:
            # A loss on its way is as exact as one that arrives.
            progress = execution.progress if isinstance(job.privacy, NoPrivacy) else None
            asked = asking(batches, execution.before_batch)
            taken = asked if own is None else _remembered(asked, seen)
            loop.fit(taken, correct, watched(progress, work, data))
        hooks.close()
        rules.leaves(module)
        if execution.arrives is not None:
            assert is_plain(layout)
            rules.arrived(execution.arrives())
            start = rules.round.vector
        row = torch.empty(work.layout.sent.size) if execution.out is None else execution.out
        delta = row[: layout.size]
        layout.flatten(module, delta).sub_(start)
        if own is not None:
            train_second(task, own, rules, seen, loop.steps, execution)
            rules.ends_second(layout.flatten(own).cpu())
        if by_example:
            only_parameters(delta, module, layout)
        mine = outside(module, layout, "local")
        if keep:
            mine |= state_tensors(loop.optimizer, module)
    _check_finite(delta, job)
    mine |= rules.end(row, loop.steps) | batches.kept()
    if by_example:
        return LocalUpdate(row, 1, loop.steps, math.nan, {}, mine)
    return LocalUpdate(row, loop.examples(data), loop.steps, loop.loss, loop.metrics(), mine)


def _remembered(batches: Iterable[Batch], seen: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        seen.append(batch)
        yield batch


def whole_loss(
    task: Task,
    module: nn.Module,
    data: Any,
    work: LocalWork,
    device: torch.device,
    before_batch: BeforeBatch | None = None,
) -> tuple[float, Tensor]:
    """Mean loss and its gradient [d] over all of a client's training data, at the weights in the module.

    As in training: in that mode, with chance from the stream (job.seed, round, client, "measuring"). Running
    statistics and all global generators are left as they were.
    """
    seed = derive_seed(work.job.seed, work.round, work.client, "measuring")
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    module.train()
    try:
        with isolated_randomness(seed, device):
            return _summed_loss(task, module, data, work, device, before_batch)
    finally:
        for name, buffer in module.named_buffers():
            buffer.detach().copy_(buffers[name])


def _summed_loss(
    task: Task,
    module: nn.Module,
    data: Any,
    work: LocalWork,
    device: torch.device,
    before_batch: BeforeBatch | None,
) -> tuple[float, Tensor]:
    layout, batch_size = work.layout.model, work.job.algorithm.batch_size
    loss_sum, seen = 0.0, 0
    total = torch.zeros(layout.size)
    named = dict(module.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    # Not the layout's views: of another type than float32 those are copies.
    places = {spec.name: total[spec.offset : spec.offset + spec.size] for spec in layout.averaged}
    for batch in asking(ordered_batches(data, batch_size, device), before_batch):
        loss = task.loss(module, batch.data)
        gradients = torch.autograd.grad(loss, [named[name] for name in trained], allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None and name in places:
                places[name].add_(gradient.flatten().cpu(), alpha=batch.size)
        loss_sum, seen = loss_sum + float(loss.detach()) * batch.size, seen + batch.size
    return loss_sum / max(1, seen), total / max(1, seen)


def _train_arrays(
    task: ArrayTask,
    model: nn.Module | Mapping[str, Tensor],
    data: Any,
    work: LocalWork,
    execution: Execution,
    seed: int,
) -> LocalUpdate:
    job, layout, vector = work.job, work.layout, work.vector
    if job.algorithm.optimizer_state == "keep":
        raise TaskError("optimizer_state = 'keep': an ArrayTask has no optimizer here; set 'drop'")
    local = {**local_of(model, layout), **(work.local or {})}
    options = {**job.algorithm.model_dump(), "round": work.round, "seed": seed}
    result = task.fit(arrays_of(layout, vector, local), data, options)
    weights, examples, metrics = fit_result(result, task)
    state = state_of(layout, weights)
    start = vector if is_plain(layout) else layout.flatten({**state, **layout.unflatten(vector)})
    out = torch.empty(layout.size) if execution.out is None else execution.out
    delta = layout.flatten(state, out).sub_(start)
    _check_finite(delta, job)
    mine = {spec.name: state[spec.name] for spec in layout.tensors if spec.rule == "local"}
    loss = metrics["loss"][0] / examples if "loss" in metrics else math.nan
    return LocalUpdate(delta, examples, 1, loss, metrics, mine)


def _answered(data: Any, work: LocalWork, execution: Execution, context: Context) -> LocalUpdate:
    """What an algorithm that does not train makes of the data; of how many they are, nothing is told."""
    row = torch.empty(work.layout.sent.size) if execution.out is None else execution.out
    rules = AlgorithmRound(work, context, ())
    release = None
    if isinstance(work.job.privacy, ExampleLevel):
        assert execution.protection is not None, "checked before the work began"
        release = SumRelease(work.job, work.round, execution.protection)
        rules.round = replace(rules.round, noised=release.noised)
    kept = rules.answer(data, row)
    if release is not None and not release.made:
        raise PrivacyError(
            f"algorithm {work.job.algorithm.name!r} answers without the noise that its job promises"
        )
    return LocalUpdate(row, 1, 1, math.nan, {}, kept)


def _protected(update: LocalUpdate, job: JobConfig, protection: Protection | None) -> LocalUpdate:
    """With the silo's own noise where the job asks for it, and then without anything exact beside it."""
    if not isinstance(job.privacy, ClientLocalLevel) or protection is None:
        return update
    update.delta.copy_(add_own_noise(update.delta, job, protection))
    return replace(update, examples=1, loss=math.nan, metrics={})


def is_plain(layout: Layout) -> bool:
    """Whether the model holds the vector exactly, so that local − global needs no rounded copy of it."""
    return all(spec.dtype in ("float32", "float64") for spec in layout.averaged)


def local_of(model: nn.Module | Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The initial values of arrays that stay at the client."""
    if isinstance(model, nn.Module):
        return {}
    return {s.name: model[s.name] for s in layout.tensors if s.rule == "local" and s.name in model}


def module_of(model: nn.Module | Mapping[str, Tensor]) -> nn.Module:
    """The module of a Task; TaskError for arrays."""
    if not isinstance(model, nn.Module):
        raise TaskError(f"a Task trains a torch.nn.Module, not a {type(model).__name__}")
    return model


def check_privacy(job: JobConfig, protected: bool = False) -> None:
    """Raises PrivacyError where the silo must keep the guarantee and nobody here does.

    `protected` says that there is a silo's own protection, with an account to charge.
    Client-level privacy is kept where updates are combined, which bounds each of them and adds the noise.
    """
    if isinstance(job.privacy, OwnNoise) and not protected:
        raise PrivacyError(
            f"privacy.level = {job.privacy.level!r} is work of the silo's agent, and nobody does it here: "
            "nothing leaves without the protection that the job promises"
        )


def check_evaluation(job: JobConfig, layout: Layout) -> None:
    """Raises PrivacyError where metrics would tell exactly what the job promises to blur."""
    own = unnoised_part(job.privacy, layout) or (
        job.algorithm.name if make_algorithm(job.algorithm).keeps_own() else ""
    )
    if own and not isinstance(job.privacy, NoPrivacy):
        raise PrivacyError(
            f"evaluation with {own!r} under privacy.level = {job.privacy.level!r}: metrics would be of what "
            "stays at this silo without noise, and do not leave it, however public its test data are"
        )
    if not isinstance(job.privacy, NoPrivacy) and not job.privacy.public_evaluation:
        raise PrivacyError(
            "evaluation: metrics on private test data leave no silo under differential privacy; where the "
            "test data are public, the job says so by privacy.public_evaluation = true"
        )


def _check_finite(delta: Tensor, job: JobConfig) -> None:
    if not math.isfinite(delta.sum(dtype=torch.float64).item()):
        raise InvalidUpdate(
            "non_finite",
            "training ended with weights that are not finite; lower [algorithm] learning_rate "
            f"(now {job.algorithm.learning_rate}) or set max_gradient_norm",
        )

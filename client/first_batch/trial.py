"""Tries one batch of one client as training and evaluation would, and keeps what can be told of it.

Nothing of it counts: the model is one of its own, and every global random generator is put back.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.client.batch_tensors import moved, tensors_in
from roundtable.client.first_batch.carried_state import (
    Carried,
    carried_state,
    gradient_figures,
    put_back,
    state_of,
)
from roundtable.client.first_batch.classes import Classes, classes_of, scores_in
from roundtable.client.streams.iterables import from_the_beginning
from roundtable.client.training.batches import as_tensors, count_examples
from roundtable.client.training.loaders import base_of, collate_of, drops_last
from roundtable.client.training.local_training import split_data
from roundtable.client.training.local_work import steps_of
from roundtable.client.training.metrics import Metrics, checked
from roundtable.core.algorithms.round_context import Context
from roundtable.core.config import JobConfig
from roundtable.core.errors import InsufficientMemory, NoExamples, TaskError
from roundtable.core.seeds import derive_seed, isolated_randomness, seed_all
from roundtable.core.task import ArrayTask, Site, Task, in_context, initial_state

_CPU = torch.device("cpu")
_SAME = 1e-4


@dataclass
class Trial:
    """What one batch of one client showed, as far as it came: None where nobody knows.

    loss: of the untrained model in training mode. after: of the same batch behind one step of SGD at the
    job's learning rate; None for an optimizer of the task's own. doubled: how many times the loss of the
    batch taken twice is that of the batch. lone: what training on a batch of a single example raised.
    again: the loss once more of the same weights, batch and random numbers. carried: what then moved its
    gradient. warned: what PyTorch warned of. tight: that memory hardly suffices.
    act and error: what failed, and how.
    """

    client: str
    clients: int
    batch_size: int
    asked_site: bool = True
    asked_shard: bool = True
    examples: int | None = None
    test_examples: int | None = None
    drops_last: bool = False
    shapes: str = ""
    trained: int = 0
    frozen: int = 0
    untouched: tuple[str, ...] = ()
    classes: Classes | None = None
    loss: float | None = None
    again: float | None = None
    carried: Carried | None = None
    after: float | None = None
    doubled: float | None = None
    lone: str = ""
    tested: int = 0
    metrics: Metrics = field(default_factory=dict)
    warned: tuple[str, ...] = ()
    tight: str = ""
    act: str = ""
    error: Exception | None = None

    @property
    def loss_moved(self) -> bool:
        """Whether the loss was another when it was asked again."""
        if self.loss is None or self.again is None or not math.isfinite(self.loss):
            return False
        return not math.isclose(self.again, self.loss, rel_tol=_SAME, abs_tol=_SAME)


class _SeenSite(Site):
    """A site that remembers whether the task asked which one it is, and for its share."""

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in ("name", "index", "shard"):
            object.__setattr__(self, "asked", True)
        if name == "shard":
            object.__setattr__(self, "asked_shard", True)
        return super().__getattribute__(name)


def try_batch(
    task: Task | ArrayTask,
    job: JobConfig,
    site: Site,
    device: torch.device = _CPU,
    beside: Site | None = None,
    enough: Callable[[Task, nn.Module, Any, Context], str] = lambda *step: "",
) -> Trial:
    """Opens a site's data, makes the model, and tries a batch of each: loss, gradient, a step, metrics.

    The data of `beside`, another client's, are opened only where the first's set something on the task.
    `enough` is given task, model, batch and context before the first pass, tells whether memory is tight, and
    raises InsufficientMemory. What else fails is in `Trial.error`; nothing that the task raises passes. An
    ArrayTask, which trains as a whole, only opens its data.
    """
    seen = _SeenSite(site.name, site.index, site.count, site.options, site.partition)
    trial = Trial(site.name, site.count, job.algorithm.batch_size)
    seed = derive_seed(job.seed, 0, site.name, "first batch")
    with isolated_randomness(seed, device), warnings.catch_warnings():
        # What is tried again warns again.
        warnings.simplefilter("ignore")
        try:
            _try(trial, task, job, seen, device, seed, beside, enough)
        except InsufficientMemory:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a task raises is what is to be told of it
            trial.error = error
    return trial


def _try(
    trial: Trial,
    task: Any,
    job: JobConfig,
    site: _SeenSite,
    device: torch.device,
    seed: int,
    beside: Site | None,
    enough: Callable[[Task, nn.Module, Any, Context], str],
) -> None:
    trial.act = "data"
    had = _own(task)
    object.__setattr__(site, "asked", False)
    object.__setattr__(site, "asked_shard", False)
    training, test = split_data(task, site)
    trial.asked_site = bool(site.__dict__["asked"])
    trial.asked_shard = bool(site.__dict__["asked_shard"])
    if isinstance(task, ArrayTask):
        trial.act = ""
        return
    trial.examples, trial.test_examples = count_examples(training), count_examples(test)
    trial.drops_last = drops_last(training)
    batch = moved(first_examples(training, trial.batch_size), device)
    trial.shapes = shapes_of(batch)
    trial.act = "model"
    module = initial_state(task, job.seed)
    assert isinstance(module, nn.Module)
    rate, steps = job.algorithm.learning_rate, steps_of(job, trial.examples, drop_last=trial.drops_last)
    context = Context(job.title, 1, trial.client, steps, device, job.seed, rate)
    trial.tight = enough(task, module, batch, context)
    module.to(device).train()
    for parameter in module.parameters():
        if parameter.requires_grad:
            trial.trained += parameter.numel()
        else:
            trial.frozen += parameter.numel()
    told = in_context(task, context)
    seeded = partial(seed_all, seed, device)
    kept = state_of(module)
    figures = _try_training(trial, told, module, kept, batch, job, seeded)
    if trial.test_examples != 0 and job.evaluation.every:
        told = in_context(task, replace(context, steps=0))
        _try_evaluation(trial, told, module, first_examples(test, job.evaluation_batch), device)
    trial.act = "second loss"

    def gradient() -> None:
        seeded()
        module.train().zero_grad(set_to_none=True)
        told.loss(module, batch).backward()

    def between() -> None:
        """What another client does to the task: its data, its examples."""
        changes = beside if beside is not None and _set_since(had, task) else None
        other = told if changes is None else in_context(task, replace(context, site=changes.name))
        with suppress(Exception):  # They fail in their round, if they do.
            size = max(2, trial.batch_size // 2)
            if changes is None and trial.examples is None:
                # A stream is not read again: it may cost much, or be read once.
                examples = _mapped(batch, lambda tensor: tensor[:size] if tensor.dim() else tensor)
            else:
                data = training if changes is None else split_data(task, changes)[0]
                examples = moved(first_examples(data, size), device)
            seeded()
            other.loss(module, batch if examples is None else examples)

    names = partial(_set_since, had, task)
    told = in_context(task, context)
    trial.carried = carried_state(task, module, kept, figures, gradient, between, names, odd=trial.loss_moved)
    trial.act = ""


def _set_since(had: Mapping[str, Any], task: Any) -> tuple[str, ...]:
    """What data() has set on the task, by name; not what it has filled."""
    return tuple(f"self.{name}" for name, value in _own(task).items() if had.get(name) is not value)


def _own(task: Any) -> dict[str, Any]:
    return dict(getattr(task, "__dict__", {}))


def _try_training(
    trial: Trial,
    task: Any,
    module: nn.Module,
    kept: Mapping[str, Tensor],
    batch: Any,
    job: JobConfig,
    seeded: Callable[[], None],
) -> Tensor:
    """The figures of the batch's gradient."""
    trial.act = "loss"
    with _outputs(module) as outputs, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seeded()
        try:
            loss = task.loss(module, batch)
        finally:
            trial.classes = classes_of(batch, outputs)
            trial.warned = tuple(dict.fromkeys(str(each.message).strip() for each in caught))
    _check_loss(loss)
    trial.loss = float(loss.detach())
    trial.act = "gradient"
    if not trial.trained:
        raise TaskError(
            "every weight of the model is frozen (requires_grad is False), so there is nothing to train: "
            "leave some of them trainable in model()"
        )
    loss.backward()
    named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    trial.untouched = tuple(name for name, each in named if each.grad is None)
    figures = gradient_figures(module)
    trial.act = "second loss"
    put_back(module, kept)
    seeded()
    trial.again = float(task.loss(module, batch).detach())
    if getattr(type(task), "optimizer", Task.optimizer) is Task.optimizer:
        trial.after = _after_a_step(task, module, batch, job, seeded)
    trial.act = ""
    module.eval()
    with torch.no_grad():  # Else it would hold twice what a step holds for its gradient.
        trial.doubled = _doubled(task, module, batch, seeded)
    module.train()
    if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()):
        trial.lone = _lone(task, module, batch)
    module.zero_grad(set_to_none=True)
    return figures


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TaskError(f"loss() returned a {type(loss).__name__}, not a tensor with one value")
    if loss.numel() != 1:
        raise TaskError(
            f"loss() returned a tensor of shape {list(loss.shape)}, not one value: take its mean (with "
            "PyTorch's losses, leave out reduction)"
        )


def _after_a_step(
    task: Any, module: nn.Module, batch: Any, job: JobConfig, seeded: Callable[[], None]
) -> float:
    """The loss behind one step of plain SGD; the weights are put back."""
    moves = [
        (each, each.grad) for each in module.parameters() if each.requires_grad and each.grad is not None
    ]
    rate = job.algorithm.rate_share(1, job.algorithm.steps or 1) * job.algorithm.learning_rate
    norm = math.sqrt(sum(float(gradient.square().sum()) for _, gradient in moves))
    most = job.algorithm.max_gradient_norm
    rate *= 1.0 if most is None or norm <= most else most / norm
    with torch.no_grad():
        for each, gradient in moves:
            each.add_(gradient, alpha=-rate)
    try:
        seeded()
        return float(task.loss(module, batch).detach())
    finally:
        with torch.no_grad():
            for each, gradient in moves:
                each.add_(gradient, alpha=rate)


def _doubled(task: Any, module: nn.Module, batch: Any, seeded: Callable[[], None]) -> float | None:
    """1 for a mean over examples, 2 for a sum; None where the batch cannot be taken twice."""
    size = _length(batch)
    twice = _mapped(batch, lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor)
    if size is None or twice is None:
        return None
    try:
        seeded()
        once = float(task.loss(module, batch))
        seeded()
        both = float(task.loss(module, twice))
    except Exception:  # noqa: BLE001 - a loss may count on its batch's size: then nothing is known of it
        return None
    return both / once if abs(once) > 1e-6 else None


def _lone(task: Any, module: nn.Module, batch: Any) -> str:
    """What BatchNorm makes of a batch of one example, in its words; "" for nothing odd."""
    one = _mapped(batch, lambda tensor: tensor[:1] if tensor.dim() else tensor)
    if one is None:
        return ""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        with torch.no_grad():
            task.loss(module, one)
    except ValueError as error:
        return str(error) if "more than 1 value per channel" in str(error) else ""
    except Exception:  # noqa: BLE001 - a mistake in another place has been found by the whole batch
        return ""
    finally:
        module.load_state_dict(state)
    return ""


def _try_evaluation(trial: Trial, task: Any, module: nn.Module, batch: Any, device: torch.device) -> None:
    module.eval()
    batch = moved(batch, device)
    trial.tested = _length(batch) or 0
    with torch.no_grad():
        trial.act = "measured loss"
        task.loss(module, batch)
        trial.act = "metrics"
        if getattr(task, "metrics", None) is not None:
            trial.metrics = checked(task.metrics(module, batch), task, reserved="loss")


def first_examples(data: Any, size: int) -> Any:
    """A batch of as many examples, spread evenly over a data set whose length is known: a sorted one shows
    all of its classes. Raises NoExamples for an empty one."""
    examples, base = count_examples(data), base_of(data)
    if examples == 0:
        raise NoExamples("the training data set is empty: there are zero examples to learn from")
    tensors = as_tensors(data)
    if examples is None:
        return collate_of(data)(list(islice(from_the_beginning(base), size)))
    examples = count_examples(base) or 0
    size = min(size, examples)
    rows = [number * examples // size for number in range(size)]
    if tensors is not None:
        return tuple(tensor[rows].clone() for tensor in tensors)
    return collate_of(data)([base[row] for row in rows])


def shapes_of(batch: Any) -> str:
    """The tensors of a batch, in words: "[32, 2] float32, [32] int64"."""
    found = [f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in tensors_in(batch)]
    return ", ".join(found[:6]) + (", …" if len(found) > 6 else "") or type(batch).__name__


def _length(batch: Any) -> int | None:
    """The examples of a batch whose tensors agree about it."""
    lengths = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with its tensors changed; None for one that holds anything else."""
    if isinstance(batch, Tensor):
        return change(batch)
    if type(batch) is dict:
        parts = {name: _mapped(value, change) for name, value in batch.items()}
        return None if any(part is None for part in parts.values()) else parts
    if type(batch) in (tuple, list):
        values = [_mapped(value, change) for value in batch]
        return None if any(value is None for value in values) else type(batch)(values)
    return None


@contextmanager
def _outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """What the module gives when it is called, the latest last."""
    found: list[Tensor] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        if (scores := scores_in(output)) is not None:
            found.append(scores.detach())

    handle = module.register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()

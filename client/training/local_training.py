"""Local training: one function, for silos and for simulated clients alike.

It is a pure function of what it is given: the module's tensors outside the vector and every
global random generator are put back as they were found, so that a module may serve one client
after the other and any order of clients gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundtable.client.training.algorithms import Correction, make_algorithm
from roundtable.client.training.arrays import arrays_of, fit_result, state_of
from roundtable.client.training.batches import Batch, count_examples, ordering_of, training_batches
from roundtable.client.training.metrics import Metrics
from roundtable.client.training.micro_batches import CannotSplit, backward_in_parts, check_splittable
from roundtable.client.training.module_state import borrowed, isolated_randomness, outside
from roundtable.client.training.optimizer_state import restore_state, state_tensors
from roundtable.client.training.private_training import add_own_noise, fit_privately, only_parameters
from roundtable.client.training.sgd import SGD
from roundtable.client.training.silo_account import Protection
from roundtable.core.config import JobConfig
from roundtable.core.errors import InvalidUpdate, PrivacyError, TaskError
from roundtable.core.layout import Layout
from roundtable.core.privacy_table import ClientLocalLevel, ExampleLevel, NoPrivacy, OwnNoise
from roundtable.core.seeds import derive_seed
from roundtable.core.task import AnyTask, ArrayTask, Site, Task

Progress = Callable[[int, int, float], None]

# Reading a loss back waits for the device, so losses are looked at so many at a time.
_CHECK_EVERY = 16


@dataclass(frozen=True)
class LocalUpdate:
    """What one client's training gives.

    `delta` is local − global, float32 of shape [layout.size]; `examples` the size of the training
    set; `loss` the mean training loss over the round; `metrics` named (sum, count), the loss among
    them; `local` the tensors with rule `local` as training left them.
    """

    delta: Tensor
    examples: int
    steps: int
    loss: float
    metrics: Metrics = field(default_factory=dict)
    local: dict[str, Tensor] = field(default_factory=dict)


def split_data(task: AnyTask, site: Site) -> tuple[Any, Any]:
    """(training data, test data) of a site; an ArrayTask has one object for both."""
    data = task.data(site)
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
    job: JobConfig,
    layout: Layout,
    vector: Tensor,
    *,
    round: int,
    client: str,
    device: str | torch.device = "cpu",
    local: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
    out: Tensor | None = None,
    protection: Protection | None = None,
    micro_batch: int | None = None,
) -> LocalUpdate:
    """Trains from the global `vector` on the training data of one client.

    `local` are the client's own tensors with rule `local`; where it has none yet, those in `model`
    serve. `progress` is called with (examples seen, examples to see, recent loss). `out`, if given,
    receives the delta: float32 on CPU of shape [layout.size]. The order of batches comes from the
    stream (job.seed, round, client, "batches"), everything else random from (…, "training"). `protection`
    serves where the silo itself makes the update private (levels example and client_local); such an
    update tells neither loss nor metrics nor its number of examples. With `micro_batch`, no more than so many
    examples are in memory at once: the same batches, their gradients added up from parts.

    Raises NoExamples for an empty data set, InvalidUpdate for a loss or weights that are not
    finite, LayoutError for a model that is not the layout's, PrivacyError for a protection that is
    asked of the silo and not there, CannotSplit where parts of batches would train another model, and
    whatever the task raises.
    """
    check_privacy(job, protection is not None)
    by_example = isinstance(job.privacy, ExampleLevel)
    device = torch.device(device)
    seed = derive_seed(job.seed, round, client, "training")
    with isolated_randomness(seed, device):
        if micro_batch is not None and (isinstance(task, ArrayTask) or by_example):
            raise CannotSplit("this training takes no batches that could be split")
        if isinstance(task, ArrayTask):
            if by_example:
                raise PrivacyError(
                    'privacy.level = "example" bounds the gradient of every example, and an ArrayTask gives '
                    'none: write a Task with a model and a loss, or use level "client_local"'
                )
            if job.algorithm.optimizer_state == "keep":
                raise TaskError("optimizer_state = 'keep': an ArrayTask has no optimizer here; set 'drop'")
            local = {**local_of(model, layout), **(local or {})}
            update = _fit_arrays(task, data, job, layout, vector, round, seed, local, out)
            return _protected(update, job, protection)
        module = module_of(model).to(device)
        with borrowed(module, layout, vector, local):
            start = vector if _is_plain(layout) else layout.flatten(module, torch.empty_like(vector))
            parameters = [p for p in module.parameters() if p.requires_grad]
            correction = make_algorithm(job.algorithm).begin(parameters)
            # A loss on its way is as exact as one that arrives.
            told = progress if isinstance(job.privacy, NoPrivacy) else None
            run = _Run(task, module, parameters, job, round, told, micro_batch)
            keep = job.algorithm.optimizer_state == "keep"
            if keep:
                restore_state(run.optimizer, module, local or {})
            module.train()
            if protection is not None and by_example:
                run.steps = fit_privately(
                    task, module, run.optimizer, data, job, correction, device, protection
                )
            else:
                batches = training_batches(data, **ordering_of(job, round, client), device=device)
                run.fit(batches, correction, _total(data, job))
            delta = torch.empty(layout.size) if out is None else out
            layout.flatten(module, delta).sub_(start)
            if by_example:
                only_parameters(delta, module, layout)
            mine = outside(module, layout, "local")
            if keep:
                mine |= state_tensors(run.optimizer, module)
    _check_finite(delta, job)
    if by_example:
        return LocalUpdate(delta, 1, run.steps, math.nan, {}, mine)
    update = LocalUpdate(delta, run.examples(data), run.steps, run.loss, run.metrics(), mine)
    return _protected(update, job, protection)


def _protected(update: LocalUpdate, job: JobConfig, protection: Protection | None) -> LocalUpdate:
    """With the silo's own noise where the job asks for it, and then without anything exact beside it."""
    if not isinstance(job.privacy, ClientLocalLevel) or protection is None:
        return update
    update.delta.copy_(add_own_noise(update.delta, job, protection))
    return LocalUpdate(update.delta, 1, update.steps, math.nan, {}, update.local)


class _Optimizer(Protocol):
    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...


class _Run:
    """The training loop of one round."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        job: JobConfig,
        round: int,
        progress: Progress | None,
        micro_batch: int | None,
    ) -> None:
        self._task = task
        self._module = module
        self._parameters = parameters
        self._max_norm = job.algorithm.max_gradient_norm
        self.optimizer = _make_optimizer(task, parameters, job, round)
        self._place = f"round {round}"
        self._progress = progress
        self._micro_batch = micro_batch
        self._pending: list[tuple[Tensor, int, int]] = []
        self._loss_sum = 0.0
        self._seen = 0
        self.steps = 0

    def fit(self, batches: Iterator[Batch], correction: Correction | None, total: int) -> None:
        """Takes one optimizer step for each batch."""
        task, module, optimizer, pending = self._task, self._module, self.optimizer, self._pending
        for batch in batches:
            optimizer.zero_grad()
            if self._micro_batch is None:
                loss = task.loss(module, batch.data)
                if self.steps == 0:
                    _check_loss(loss, task)
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                if self.steps == 0:
                    check_splittable(task, module, batch, self._micro_batch)
                loss = backward_in_parts(task, module, batch, self._micro_batch)
            if correction is not None:
                correction()
            if self._max_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
            optimizer.step()
            self.steps += 1
            pending.append((loss.detach(), batch.epoch, batch.size))
            if len(pending) == _CHECK_EVERY:
                self._look(total)
        if pending:
            self._look(total)
        optimizer.zero_grad()

    @property
    def loss(self) -> float:
        """Mean over all examples seen."""
        return self._loss_sum / self._seen

    def metrics(self) -> Metrics:
        """The loss as (sum, count)."""
        return {"loss": (self._loss_sum, self._seen)}

    def examples(self, data: Any) -> int:
        """The data set's size; for a stream what was seen of it."""
        known = count_examples(data)
        return self._seen if known is None else known

    def _look(self, total: int) -> None:
        losses = torch.stack([loss for loss, _, _ in self._pending]).tolist()
        first = self.steps - len(losses) + 1
        for number, (loss, (_, epoch, size)) in enumerate(zip(losses, self._pending, strict=True), first):
            if not math.isfinite(loss):
                raise InvalidUpdate(
                    "non_finite",
                    f"the training loss is {loss} at step {number}, epoch {epoch} of {self._place}; lower "
                    "[algorithm] learning_rate, set max_gradient_norm, or look for bad values in the data",
                )
            self._loss_sum += loss * size
            self._seen += size
        self._pending.clear()
        if self._progress is not None:
            self._progress(self._seen, total, losses[-1])


def _make_optimizer(task: Task, parameters: Sequence[nn.Parameter], job: JobConfig, round: int) -> _Optimizer:
    table = job.algorithm
    decay = table.learning_rate_decay ** (round - 1)
    make: Callable[[Iterable[nn.Parameter]], Any] | None = getattr(task, "optimizer", None)
    own = make(parameters) if make is not None else None
    if own is None:
        return SGD(parameters, table.learning_rate * decay, table.momentum, table.weight_decay)
    for group in own.param_groups:
        group["lr"] *= decay
    optimizer: _Optimizer = own
    return optimizer


def _fit_arrays(
    task: ArrayTask,
    data: Any,
    job: JobConfig,
    layout: Layout,
    vector: Tensor,
    round: int,
    seed: int,
    local: Mapping[str, Tensor] | None,
    out: Tensor | None,
) -> LocalUpdate:
    options = {**job.algorithm.model_dump(), "round": round, "seed": seed}
    result = task.fit(arrays_of(layout, vector, local), data, options)
    weights, examples, metrics = fit_result(result, task)
    state = state_of(layout, weights)
    start = vector if _is_plain(layout) else layout.flatten({**state, **layout.unflatten(vector)})
    delta = layout.flatten(state, torch.empty(layout.size) if out is None else out).sub_(start)
    _check_finite(delta, job)
    mine = {spec.name: state[spec.name] for spec in layout.tensors if spec.rule == "local"}
    loss = metrics["loss"][0] / examples if "loss" in metrics else math.nan
    return LocalUpdate(delta, examples, 1, loss, metrics, mine)


def _is_plain(layout: Layout) -> bool:
    """Whether the model holds the vector exactly, so that local − global needs no rounded copy of it."""
    return all(spec.dtype in ("float32", "float64") for spec in layout.averaged)


def local_of(model: nn.Module | Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The initial values of arrays that stay at the client."""
    if isinstance(model, nn.Module):
        return {}
    return {s.name: model[s.name] for s in layout.tensors if s.rule == "local" and s.name in model}


def _total(data: Any, job: JobConfig) -> int:
    """Examples to see in a round."""
    table = job.algorithm
    if table.steps is not None:
        return table.steps * table.batch_size
    return table.passes * (count_examples(data) or 0)


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


def check_evaluation(job: JobConfig) -> None:
    """Raises PrivacyError where metrics would tell exactly what the job promises to blur."""
    if not isinstance(job.privacy, NoPrivacy) and not job.privacy.public_evaluation:
        raise PrivacyError(
            "evaluation: metrics on private test data leave no silo under differential privacy; where the "
            "test data are public, the job says so by privacy.public_evaluation = true"
        )


def _check_loss(loss: Any, task: Task) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(f"{type(task).__name__}.loss() must return a scalar tensor, not {found}")


def _check_finite(delta: Tensor, job: JobConfig) -> None:
    if not math.isfinite(delta.sum(dtype=torch.float64).item()):
        raise InvalidUpdate(
            "non_finite",
            "training ended with weights that are not finite; lower [algorithm] learning_rate "
            f"(now {job.algorithm.learning_rate}) or set max_gradient_norm",
        )

"""Which tasks an algorithm goes together with, by its declarations: refused before round 1."""

from __future__ import annotations

from roundtable.client.analysis_task import AnalysisTask
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, ModelMismatch, PrivacyError, TaskError
from roundtable.core.foundation.model_difference import pins_difference
from roundtable.core.foundation.pretrained_task import PretrainedTask
from roundtable.core.layout import Layout
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.task import AnyTask, ArrayTask, Task, lacks, told
from roundtable.privacy.example_level import check_model

_STAY = ("local", "drop")
_OF_SGD = ("learning_rate", "momentum", "weight_decay")


def check_task_with(job: JobConfig, algorithm: ClientAlgorithm, task: AnyTask, layout: Layout) -> None:
    """Raises ConfigError, naming the algorithm, for a task whose training it could not change as it must, and
    PrivacyError for one of which no silo could bound the gradient of each example. ModelMismatch where the
    base here has another tokenizer, configuration or whatever else of it the layout pins.

    What needs data (whether a loss is the mean over its examples) is found before the first step.
    """
    if isinstance(job.privacy, ExampleLevel) and not job.releases_sums:
        _check_sampled(task)
    if isinstance(task, PretrainedTask):
        _check_pins(task, layout)
    said, kind = f"algorithm {algorithm.table.name!r}", type(task).__name__
    if algorithm.answers != isinstance(task, AnalysisTask):
        raise ConfigError(
            f'{said} and {kind}: task = "analysis" and name = "analysis" go together, and neither with '
            "anything else; `roundtable analyse` writes such a job"
        )
    buffers = [spec.name for spec in layout.averaged if spec.kind == "buffer"]
    if buffers and not algorithm.composition.averaged_buffers:
        raise ConfigError(
            f"{said} moves all that travels by what it knows of gradients, and {buffers[0]!r} of {kind} is a "
            'buffer, which has none: set [model] buffers = "local", or use normalisation without '
            "running statistics"
        )
    stays = [spec.name for spec in layout.tensors if spec.kind == "parameter" and spec.rule in _STAY]
    if stays and (algorithm.step().corrected or not algorithm.composition.local_parameters):
        raise ConfigError(
            f"{said} corrects each step by what it knows of the parameters that travel, and {stays[0]!r} of "
            f"{kind} does not: leave [model] local, only and drop out, or choose another algorithm",
            key=("model",),
        )
    method = algorithm.composition.task_method
    if method and not callable(getattr(task, method, None)):
        raise ConfigError(f"{said} needs {method}(model, batch) of the task, and {kind} has no such method")
    if isinstance(task, ArrayTask):
        if not algorithm.composition.arrays:
            raise ConfigError(
                f"{said} changes the steps of training, and {kind} is an ArrayTask, which trains with code "
                'of its own: use name = "fedavg", and do in fit() what the algorithm would do'
            )
        return
    own = getattr(type(task), "optimizer", Task.optimizer) is not Task.optimizer
    if own and not algorithm.composition.own_optimizers:
        raise ConfigError(
            f"{said} counts on steps of SGD as [algorithm] describes them, and {kind} brings an optimizer of "
            "its own: leave out its optimizer(), or, of a class that is not yours, set `optimizer = "
            "rt.Task.optimizer` in one over it"
        )
    if own:
        _check_own_optimizer(algorithm.table, task)


def _check_pins(task: PretrainedTask, layout: Layout) -> None:
    try:
        here = task.frozen_beside_pretrained()
    except TaskError as error:
        raise ModelMismatch(str(error)) from error
    if differs := pins_difference(here, (spec.name for spec in layout.tensors), task):
        raise ModelMismatch(differs)


def _check_sampled(task: AnyTask) -> None:
    if isinstance(task, ArrayTask) or lacks(task):
        raise PrivacyError(
            'privacy.level = "example" bounds the gradient of every example: it needs a Task with a model, '
            'data and a loss, not an ArrayTask or a script; for those use level "client_local"'
        )
    if isinstance(task, PretrainedTask) and task.inseparable:
        raise PrivacyError(
            'privacy.level = "example" clips the gradient of each row, and none can be had of '
            f"{type(task).__name__} with {task.inseparable}"
        )
    check_model(task.model())


def _check_own_optimizer(table: AlgorithmTable, task: Task) -> None:
    """Refuses what the job says of SGD where nobody would look at it, and a learning rate that is that of SGD
    for want of another."""
    if isinstance(task, PretrainedTask) and "learning_rate" not in table.model_fields_set:
        usual = type(table).model_fields["learning_rate"].default
        raise ConfigError(
            f"algorithm.learning_rate is not set: its default, {usual}, is one of SGD, and AdamW at that "
            f"rate spoils a pretrained model; {type(task).__name__} wants one near 2e-4 for adapters, 2e-5 "
            "for all weights",
            key=("algorithm", "learning_rate"),
        )
    ignored = ["momentum", "weight_decay"] if "optimizer" in told(task) else [*_OF_SGD]
    for key in ignored:
        value, usual = getattr(table, key), type(table).model_fields[key].default
        if value != usual:
            remedy = "leave it out"
            if key == "learning_rate":
                remedy += ", or have optimizer(parameters, context) take context.learning_rate"
            raise ConfigError(
                f"algorithm.{key} = {value} would be ignored: {type(task).__name__} brings an optimizer of "
                f"its own; {remedy}",
                key=("algorithm", key),
            )

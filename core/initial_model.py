"""The model that a job starts from, and the flat vector that it is: the task's own, under the job's seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape

import torch
from torch import Tensor, nn

from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, RoundtableError, TaskError
from roundtable.core.layout import Layout
from roundtable.core.models import Model
from roundtable.core.plugins.doors import described
from roundtable.core.task import AnyTask, initial_state


def initial_model(job: JobConfig, task: AnyTask, algorithm: ClientAlgorithm | None = None) -> Model:
    """The same bytes wherever it is made: by `job submit`, in a simulation, at a silo.

    `algorithm` None: the one that the job names, which is then no file.

    Raises TaskError if the task's model cannot be made or has no tensor that travels, ConfigError if a
    pattern in `[model]` names none of its tensors, LayoutError for a tensor that cannot be carried.
    """
    try:
        made = initial_state(task, job.seed)
    except RoundtableError:
        raise
    except Exception as error:
        raise TaskError(f"task {job.task.name!r}: making its model failed: {described(error)}") from error
    layout = job_layout(job, algorithm or make_algorithm(job.algorithm), made)
    _check_patterns(job, layout)
    if layout.size == 0:
        raise TaskError(
            f"task {job.task.name!r}: no tensor of its model travels, and {len(layout.frozen)} are frozen "
            "(requires_grad = False in model()); leave some to be trained, and check [model] travel, only, "
            "local and drop in the job file"
        )
    state: Mapping[str, Tensor] = made.state_dict() if isinstance(made, nn.Module) else made
    local = {
        spec.name: state[spec.name].detach()
        for spec in layout.tensors
        if spec.rule == "local" and spec.alias_of is None
    }
    metadata = {"job": job.title, "task": job.task.name, "round": "0"}
    return Model(layout, initial_vector(layout, made), local, metadata)


def hooked_parameter(module: nn.Module) -> str | None:
    """The name of a parameter with a hook of its own on its gradient, which goes with that very tensor: what
    computes a step over other tensors, or gradients of single examples, would leave it out."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    return None


def job_layout(job: JobConfig, algorithm: ClientAlgorithm, made: nn.Module | Mapping[str, Tensor]) -> Layout:
    """The layout that every party to the job derives from the task's model, alike to the last place."""
    rules = job.model.rules()
    own = algorithm.local_tensors(made) if isinstance(made, nn.Module) else ()
    if own:
        rules = replace(rules, local=(*rules.local, *map(escape, own)))
    layout = Layout.of(made, rules)
    if algorithm.places:
        shapes: list[dict[str, tuple[int, ...]]] = [{}, {}]
        for place in algorithm.places:
            shapes[not place.sent][place.name] = (layout.size,) if place.shape is None else place.shape
        layout = layout.with_places(*shapes)
    common = job.common_rank
    return layout if common is None else layout.with_basis(common.over(layout.sent).basis_size)


def initial_vector(layout: Layout, made: nn.Module | Mapping[str, Tensor]) -> Tensor:
    """The model's values, and zeros in all places behind it: float32 [layout.size]."""
    if layout.model.size == layout.size:
        return layout.flatten(made)
    vector = torch.zeros(layout.size)
    layout.model.flatten(made, vector[: layout.model.size])
    return vector


def whole_model(job: JobConfig, task: AnyTask, model: Model) -> Model:
    """The model with its frozen tensors, made by the task. LayoutError where those are not the job's."""
    if not model.lacking:
        return model
    made = initial_state(task, job.seed)
    state: Mapping[str, Tensor] = made.state_dict() if isinstance(made, nn.Module) else made
    model.layout.model.check(state)
    model.layout.check_frozen(state)
    return with_frozen(model, state)


def with_frozen(model: Model, state: Mapping[str, Tensor]) -> Model:
    """The model with its frozen tensors out of a state dict that has them."""
    frozen = {spec.name: state[spec.name].detach() for spec in model.layout.frozen}
    return replace(model, local={**model.local, **frozen})


def travel_note(job: JobConfig, layout: Layout) -> str | None:
    """What of a model does not travel though no pattern names it, in sentences; None for nothing."""
    sentences = []
    if frozen := layout.frozen:
        size = layout.model.size
        whole = size + sum(spec.size for spec in frozen)
        sentences.append(
            f"{size:,} of {whole:,} values travel ({size / whole:.1%}): {len(frozen)} frozen tensors, such "
            f"as {frozen[0].name!r}, are made by every silo itself and checked before it trains "
            "([model] travel)."
        )
    stated = (*job.model.only, *job.model.local)
    staying = [
        spec.name
        for spec in layout.tensors
        if job.model.only and spec.rule == "local" and spec.kind == "parameter"
        if not any(fnmatchcase(spec.name, pattern) for pattern in stated)
    ]
    if staying:
        sentences.append(
            f"{len(staying)} tensors are trained and stay at each silo, as [model] only leaves them out: "
            f"{', '.join(staying[:5])}{', ...' if len(staying) > 5 else ''}."
        )
    return " ".join(sentences) or None


def _check_patterns(job: JobConfig, layout: Layout) -> None:
    """A pattern that fits nothing is a slip of the pen: a tensor travels, or stays, that was not to."""
    names = [spec.name for spec in layout.tensors]
    for key in ("only", "local", "drop"):
        for pattern in getattr(job.model, key):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"model.{key}: the pattern {pattern!r} fits none of the model's {len(names)} tensors, "
                    f"such as {', '.join(map(repr, names[-3:]))}"
                )

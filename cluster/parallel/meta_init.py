"""Makes models whose parameters take no memory, and gives them memory later, tied as they were made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from roundtable.core.errors import TaskError
from roundtable.core.initial_model import hooked_parameter
from roundtable.core.layout import Layout
from roundtable.core.seeds import derive_seed, isolated_randomness
from roundtable.core.task import Task


@contextmanager
def without_weights(seed: int = 0, *, of_torch: int | None = None) -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, and real buffers.

    One parameter under two names stays one. `seed` is that of the global generators, for buffers that are
    drawn, `of_torch` another one for torch's alone.
    """
    register = nn.Module.register_parameter
    known = WeakIdKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        _refuse_lazy(type(module).__name__, parameter)
        if parameter is not None and not parameter.is_meta:
            if parameter not in known:
                known[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                known[parameter].__dict__.update(parameter.__dict__)
            parameter = known[parameter]
        register(module, name, parameter)

    with (
        patch.object(nn.Module, "register_parameter", on_meta),
        isolated_randomness(seed, torch.device("cpu")),
    ):
        if of_torch is not None:
            torch.default_generator.manual_seed(of_torch)
        yield


def model_on_meta(task: Task, seed: int = 0) -> nn.Module:
    """The task's model under the job's seed, without memory for its parameters.

    Raises TaskError for parameters that share their memory without being one: only the names of one parameter
    can be kept together when each gets memory of its own; and for gradients that a cluster would not take
    as one process does: with hooks of their own, or sparse.
    """
    with without_weights(derive_seed(seed, "model")):
        try:
            model = task.model()
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            said = str(error).splitlines()[0][:200]
            raise TaskError(
                f"{type(task).__name__}.model() computes with values of weights, which have none yet where a "
                f"cluster makes it ({said}); {_OF_SHAPES}"
            ) from error
    _check_kind(task, model)
    # As for training: a model's own train() may keep some of its layers in evaluation.
    model.train()
    seen: dict[tuple[int, int], str] = {}
    for name, parameter in model.named_parameters():
        place = parameter.untyped_storage()._cdata, int(parameter.storage_offset())
        first = seen.setdefault(place, name) if parameter.numel() else name
        if first != name:
            raise shared_memory(first, name)
    return model


# Who parametrizes a layer does not know what its values are needed for.
_OF_SHAPES = (
    "make it of shapes alone, and leave values to what is loaded (torch's orthogonal, which completes a "
    'weight to a matrix: orthogonal_map = "householder" and use_trivialization = False)'
)


def _refuse_lazy(kind: str, tensor: Tensor | None) -> None:
    if tensor is not None and is_lazy(tensor):
        raise TaskError(
            f"model() makes a {kind}, whose shape follows from the first batch, and a cluster shares a model "
            "out by its shapes before there is one; state its input size (nn.Linear for nn.LazyLinear)"
        )


_PLAIN = frozenset(vars(nn.Module()))
# Kept in step by the class itself.
_OWN_LISTS = {nn.RNNBase: "_flat_weights"}


def plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module's code has set on it beside submodules, parameters and buffers."""
    skipped = {key for kind, key in _OWN_LISTS.items() if isinstance(module, kind)}
    for key, value in vars(module).items():
        if key not in _PLAIN and key not in skipped:
            yield key, value


def plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors with memory among them, in lists, tuples and dicts too."""
    for key, value in plain_attributes(module):
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                yield key, leaf


def _check_kind(task: Task, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.model() returned a {type(model).__name__}; a cluster trains an nn.Module"
        )
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            _refuse_lazy(type(module).__name__, tensor)
    if (name := hooked_parameter(model)) is not None:
        raise TaskError(
            f"{name} has a hook on its gradient, and a cluster makes parameters anew, without it: "
            "change gradients in the task's optimizer, or what they are of in the model's forward"
        )
    memory = {each.untyped_storage()._cdata: name for name, each in model.named_parameters()}
    for name, module in model.named_modules():
        for key, leaf in plain_tensors(module):
            of = memory.get(leaf.untyped_storage()._cdata, "")
            if leaf.numel() and (of or isinstance(leaf, nn.Parameter)):
                raise TaskError(
                    f"{name + '.' if name else ''}{key} holds {of or 'a parameter'} beside the model's own "
                    "places for parameters, and a cluster gives those memory anew, so that it would hold a "
                    "stale one; use nn.ParameterList or nn.ParameterDict, or read a weight where it is used"
                )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise TaskError(
                f"{name or 'the model'} has sparse gradients, of which a cluster takes neither norm nor "
                "shards; leave out sparse=True"
            )


def check_shared_memory(model: nn.Module, layout: Layout) -> None:
    """Raises TaskError where the real model, whose layout this is, has two parameters in one memory."""
    tied = {id(parameter): name for name, parameter in model.named_parameters()}
    names = dict(model.named_parameters(remove_duplicate=False))
    for spec in layout.tensors:
        first, second = names.get(spec.alias_of or ""), names.get(spec.name)
        if first is not None and second is not None and tied[id(first)] != tied[id(second)]:
            raise shared_memory(tied[id(first)], spec.name)


def shared_memory(first: str, second: str) -> TaskError:
    """The error of a model with two parameters in one memory."""
    return TaskError(
        f"{first} and {second} share their memory but are two parameters, which a cluster cannot keep "
        "together; make them one: set the same nn.Parameter in both modules"
    )


def check_same_tensors(made: Iterable[str], real: Iterable[str], *, or_else: str = "") -> None:
    """Raises TaskError where a model made without weights has tensors of other names than the real one.

    What computes with weights while it is made (torch's `orthogonal`) may leave a tensor out where they have
    no values. `or_else` is said at the end, of another cause.
    """
    here = set(made)
    if odd := min(here.symmetric_difference(real), default=None):
        raise TaskError(
            f"model() makes {odd} {'only' if odd in here else 'not'} where weights have no values yet, as on "
            f"a cluster's ranks; {_OF_SHAPES}{or_else}"
        )


def tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names under which a model has one parameter: (the first, another)."""
    first: dict[int, str] = {}
    ties = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties.append((first[id(parameter)], name))
    return ties


def tie(model: nn.Module, ties: list[tuple[str, str]]) -> None:
    """Makes the names of each pair one parameter again: the first's."""
    for first, second in ties:
        module, _, key = second.rpartition(".")
        setattr(model.get_submodule(module), key, model.get_parameter(first))


def allocate(module: nn.Module, device: torch.device, *, buffers: torch.device | None = None) -> None:
    """Gives every parameter on the meta device memory, and moves buffers; values come from elsewhere.

    What was one tensor under several names still is. `buffers` is where those go, if not to the parameters.
    """
    ties = tied_names(module)
    placed: dict[int, tuple[Tensor, Tensor]] = {}

    def place(tensor: Tensor) -> Any:
        if id(tensor) not in placed:
            to = device if buffers is None or isinstance(tensor, nn.Parameter) else buffers
            moved = torch.empty_like(tensor, device=to) if tensor.is_meta else tensor.to(to)
            placed[id(tensor)] = tensor, moved
        return placed[id(tensor)][1]

    module._apply(place)  # type: ignore[no-untyped-call]
    tie(module, ties)

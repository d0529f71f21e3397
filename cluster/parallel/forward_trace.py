"""Traces a task's loss on tensors without memory: which modules are called, and what they keep.

Nothing is materialised: parameters, batch and activations are fake tensors, which have shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from roundtable.client.batch_tensors import give_float32
from roundtable.client.training.training_loop import check_loss
from roundtable.cluster.parallel.anatomy import (
    PassWrites,
    Rewritten,
    find_blocks,
    holder_of,
    reached_from,
    standing_alone,
)
from roundtable.cluster.parallel.checkpointing import COSTLY
from roundtable.cluster.parallel.meta_init import model_on_meta
from roundtable.cluster.parallel.shared_batch_norm import MicroBatch, share_batch_norms
from roundtable.cluster.parallel.unsaved_constants import empty_constants
from roundtable.core.errors import TaskError
from roundtable.core.task import Task

_ATEN = torch.ops.aten
_CLASSES = {_ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default}
_VALUES = (
    torch._subclasses.fake_tensor.DataDependentOutputException,
    torch._subclasses.fake_tensor.DynamicOutputShapeException,
)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: shapes of its positional tensors (None for other arguments) and its output."""

    name: str
    inputs: tuple[tuple[int, ...] | None, ...]
    output: tuple[int, ...] | None


@dataclass(frozen=True)
class Kept:
    """A tensor kept for the backward pass by the innermost module `name`.

    `weight`: it is a copy of a weight in another precision, and does not grow with the batch.
    """

    name: str
    bytes: int
    weight: bool = False


@dataclass(frozen=True)
class RandomDraw:
    """Random numbers that the innermost module `name` took for a tensor of `shape`, `sharded` by the plan."""

    name: str
    shape: tuple[int, ...]
    sharded: bool


@dataclass
class Trace:
    """The record of a forward pass of `examples` examples; `output` is the model's own, in bytes.

    `products` are the results of matrix products and attention: what selective checkpointing keeps. `draws`
    are in the order of the pass. `normalised` names modules that take statistics over a batch by themselves,
    `unused` the trained parameters that the loss does not depend on. `rewritten` is what the pass changes of
    the model, but for what shared batch normalisation keeps. `arguments` are what each module was first
    called with: (positional, by name). `generators` are those of the task's own that were drawn from, with
    the names of the modules. `outside` are weights that are read where no block, or model, that has them
    runs, `borrowed` layers whose weights others read, `ignored` labels that a mean over classes leaves out,
    `strayed` blocks, but for the last, whose output is read by something else than the next one.
    """

    examples: int
    calls: list[ModuleCall] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    products: list[Kept] = field(default_factory=list)
    draws: list[RandomDraw] = field(default_factory=list)
    normalised: list[str] = field(default_factory=list)
    output: int = 0
    unused: tuple[str, ...] = ()
    rewritten: tuple[Rewritten, ...] = ()
    arguments: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    generators: list[tuple[str, torch.Generator]] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)
    borrowed: set[str] = field(default_factory=set)
    ignored: set[int] = field(default_factory=set)
    strayed: set[str] = field(default_factory=set)

    @cached_property
    def whole_calls(self) -> int:
        """How often the loss calls the model, rather than parts of it; once the pass is over."""
        return sum(call.name == "" for call in self.calls)


class ShapesMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that may also go through products over experts in float32.

    torch's rule for shapes knows these in bfloat16 alone, its kernels for CPUs in float32 as well.
    """

    @override
    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As FakeTensorMode, one operation."""
        if func is not _ATEN._grouped_mm.default or args[0].dtype != torch.float32:
            return super().dispatch(func, types, args, kwargs)
        halves = tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, args)
        product: Any = super().dispatch(func, types, halves, kwargs)
        return product.float()


class NotTraceable(TaskError):
    """The task cannot run on fake tensors: it looks at values, or calls what they do not have."""


def fake_model(task: Task, dtype: torch.dtype | None = None) -> tuple[FakeTensorMode, nn.Module]:
    """The task's model with fake tensors on CPU, and the mode that they belong to.

    With `dtype`, floating-point parameters and buffers are of that type.
    """

    def kind(tensor: Tensor) -> torch.dtype:
        return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

    mode = ShapesMode(allow_non_fake_inputs=True)
    model = model_on_meta(task)
    share_batch_norms(model, None, MicroBatch())
    made: dict[int, nn.Parameter] = {}
    with mode:
        empty_constants(model, kind)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        empty = torch.empty(parameter.shape, dtype=kind(parameter))
                        made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                    module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, FakeTensor):
                    # What was made of weights is where they are, on the meta device.
                    here = torch.empty(buffer.shape, dtype=kind(buffer)) if buffer.is_meta else None
                    module._buffers[name] = (
                        mode.from_tensor(buffer.to(kind(buffer))) if here is None else here
                    )
    return mode, model


def trace(
    task: Task,
    mode: FakeTensorMode | None,
    model: nn.Module,
    batch: Any,
    bfloat16: bool = False,
    sharded: Callable[[], bool] = lambda: False,
) -> Trace:
    """Runs `task.loss(model, batch)` on fake tensors, or on real ones without a mode; `batch` is a real one.

    `sharded` says at any point of the pass whether activations are shards there, for the record of draws.
    Raises NotTraceable where the task's code needs values, and whatever else it raises.
    """
    fakes = batch if mode is None else tree_map_only(Tensor, mode.from_tensor, batch)
    result = Trace(_length(batch))
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    seen = weights | {
        leaf.untyped_storage()._cdata for leaf in tree_leaves(fakes) if isinstance(leaf, Tensor)
    }
    holding: list[Tensor] = []
    stack = [""]
    modules = dict(model.named_modules())

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            holding.append(tensor)
            weight = bfloat16 and _is_weight(modules[stack[-1]], tensor)
            result.kept.append(Kept(stack[-1], storage.nbytes(), weight))
        return tensor

    half = torch.autocast("cpu", torch.bfloat16, enabled=bfloat16)
    widening = give_float32(model) if bfloat16 else nullcontext()
    writes = PassWrites(model, fakes, fake=mode is not None)
    recorder = _CallRecorder(model, stack, result, sharded, writes)
    with widening, mode or nullcontext(), recorder, _named(model, stack, result, recorder.passed), half:
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = task.loss(model, fakes)
                check_loss(loss, task)
                reached = reached_from(loss)
                del loss
        except _VALUES as error:
            raise NotTraceable(
                f"{type(task).__name__}.loss() or the model looks at the values of tensors "
                f"({error.func}), so its memory cannot be measured without running it"
            ) from error
    parameters = model.named_parameters()
    result.unused = tuple(name for name, p in parameters if p.requires_grad and id(p) not in reached)
    result.rewritten = writes.found()
    return result


def unheard(how_far: str) -> None:
    """For who does not say how far it is."""


def draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an operation takes random numbers from a generator; attention may, with dropout."""
    if (
        torch.Tag.nondeterministic_seeded not in operation.tags
        or operation is _ATEN._fused_sdp_choice.default
    ):
        return False
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def _over_batch(operation: Any, args: Any) -> bool:
    """Whether an operation takes statistics over a batch; those of each example come with a batch of one."""
    name: str = operation._schema.name
    if "batch_norm" not in name or "backward" in name or len(args[0]) < 2:
        return False
    places = [place for place, each in enumerate(operation._schema.arguments) if each.name == "training"]
    return all(bool(args[place]) for place in places if place < len(args))


def _is_weight(module: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor that is kept is one of the module's own weights, cast."""
    shapes = {tuple(parameter.shape) for parameter in module.parameters(recurse=False)}
    return tuple(tensor.shape) in shapes or (tensor.dim() == 2 and tuple(tensor.shape)[::-1] in shapes)


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of costly operations, and of those that take random numbers; tells `writes` all."""

    def __init__(
        self,
        model: nn.Module,
        stack: list[str],
        result: Trace,
        sharded: Callable[[], bool],
        writes: PassWrites,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes = writes
        self._stack = stack
        self._found = result
        self._sharded = sharded
        found = find_blocks(model)
        self._following = dict(pairwise(found))
        # What blocks gave, by memory, and kept so that nothing else gets the address.
        self._passed: dict[int, tuple[str, Any]] = {}
        blocks = standing_alone(model, found)
        self._owners: dict[int, tuple[str, str, set[str]]] = {}
        for name, each in model.named_parameters(remove_duplicate=False):
            first = name, holder_of(name, blocks), set[str]()
            held = self._owners.setdefault(each.untyped_storage()._cdata, first)
            held[2].add(name.rpartition(".")[0])

    def passed(self, name: str, output: Any) -> None:
        """What a module gave."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not leaf.is_sparse:
                place = leaf.untyped_storage()._cdata
                if name in self._following:
                    self._passed[place] = name, leaf
                elif name in self._following.values():
                    # The last block's: in the memory of its input, where it adds in place.
                    self._passed.pop(place, None)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        drawn = draws(func, args, kwargs)
        self._writes.note(func, args, kwargs, output, drawn=drawn)
        self._note_sources(args)
        if func in _CLASSES and args[3] == 1:
            self._found.ignored.add(int(args[4]))
        if func in COSTLY:
            size = sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            self._found.products.append(Kept(self._stack[-1], size))
        if _over_batch(func, args):
            self._found.normalised.append(self._stack[-1])
        if drawn:
            first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            shape = () if first is None else tuple(first.shape)
            self._found.draws.append(RandomDraw(self._stack[-1], shape, self._sharded()))
        own = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator))
        self._found.generators += [
            (self._stack[-1], each) for each in own if each is not torch.default_generator
        ]
        return output

    def _note_sources(self, args: Any) -> None:
        """Which weights an operation takes outside of their layers, or of the block that gathers them, and
        what blocks gave outside of the next one.
        """
        running = self._stack[1:]
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor) and not leaf.is_sparse:
                place = leaf.untyped_storage()._cdata
                giver, _ = self._passed.get(place, ("", None))
                if giver and self._following[giver] not in running:
                    self._found.strayed.add(giver)
                name, holder, owners = self._owners.get(place, ("", "", set()))
                if name and self._stack[-1] not in owners:
                    self._found.borrowed.update(owners)
                if name and not any(each == holder or each.startswith(f"{holder}.") for each in running):
                    self._found.outside.setdefault(name, self._stack[-1])


@contextmanager
def _named(
    model: nn.Module, stack: list[str], result: Trace, passed: Callable[[str, Any], None]
) -> Iterator[None]:
    """Keeps the name of the running module on `stack`, and records each call; tells `passed` what it gave."""
    handles = []
    for name, module in model.named_modules():
        before, after = _hooks(name, stack, result, passed)
        handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(
    name: str, stack: list[str], result: Trace, passed: Callable[[str, Any], None]
) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        stack.append(name)
        result.arguments.setdefault(name, (inputs, named))

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        stack.pop()
        shapes = tuple(tuple(value.shape) if isinstance(value, Tensor) else None for value in inputs)
        shape = tuple(output.shape) if isinstance(output, Tensor) else None
        result.calls.append(ModuleCall(name, shapes, shape))
        passed(name, output)
        if name == "":
            result.output = sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

    return before, after


def _length(batch: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(leaves[0]) if leaves else 1

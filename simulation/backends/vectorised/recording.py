"""Records what a training step does as a list of tensor operations, without any of Python around it.

A dispatch mode sees every operation of the forward and of the backward pass with the very tensors
that it works on. Two tensors of the same memory, shape, strides and type are one value, so views
that change nothing and saved copies need no operation of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from typing_extensions import override

Operator = torch._ops.OpOverload
_READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_LEAVING = {"item", "tolist", "numpy", "data_ptr", "storage", "untyped_storage", "__array__", "__dlpack__"}
_LEAVING |= {"__float__", "__int__", "__bool__", "__index__", "__complex__"}
_LEAVING |= {"__repr__", "__format__", "__reduce_ex__"}
"""By these a tensor's values leave torch, and no operation tells of most."""


class Unrecordable(Exception):
    """The step cannot be run as a fixed list of operations; the message says why."""


@dataclass(frozen=True)
class Ref:
    """A value of the program, by number."""

    number: int


@dataclass(frozen=True)
class ValueLayout:
    """How a value lies in memory; `offset` counts values from the start of the memory at `storage`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its values lie one after the other, the last dimension fastest."""
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True


@dataclass(frozen=True)
class Call:
    """One operation: arguments hold `Ref` where the recorded call had a tensor; outputs are in order."""

    operator: Operator
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    outputs: tuple[Ref | None, ...]

    @property
    def reads(self) -> list[Ref]:
        """The values among the arguments."""
        leaves, _ = tree_flatten((self.arguments, dict(self.options)))
        return [leaf for leaf in leaves if isinstance(leaf, Ref)]

    @property
    def is_view(self) -> bool:
        """Whether every output is a window on an argument's memory, and nothing is written."""
        returns = self.operator._schema.returns
        return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)

    @property
    def writes(self) -> bool:
        """Whether an argument is changed in place."""
        return self.operator._schema.is_mutable


@dataclass
class Recording:
    """A step: `inputs` are filled in anew for each run, `constants` stay, `results` are what it gives.

    `counts` is what a step adds to counters of the model (BatchNorm's), which no operation does here.
    """

    kinds: dict[Ref, ValueLayout] = field(default_factory=dict)
    inputs: list[Ref] = field(default_factory=list)
    constants: dict[Ref, Tensor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    results: list[Ref | None] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def random(self) -> bool:
        """Whether a generator is drawn from (dropout)."""
        return any(torch.Tag.nondeterministic_seeded in call.operator.tags for call in self.calls)

    def same_as(self, other: Recording) -> str | None:
        """Why the two are not the same program; None if they are."""
        if len(self.calls) != len(other.calls):
            return f"one run took {len(self.calls)} operations and another {len(other.calls)}"
        for mine, theirs in zip(self.calls, other.calls, strict=True):
            if mine.operator is not theirs.operator or mine != theirs:
                return f"{mine.operator} did not have the same arguments in two runs"
        for ref, tensor in self.constants.items():
            twin = other.constants.get(ref)
            if twin is None or twin.shape != tensor.shape or not torch.equal(twin, tensor):
                return "a tensor that the step makes outside of the model differs between two runs"
        if self.counts != other.counts:
            return f"counters of the model moved by {self.counts} and by {other.counts}"
        return None if self.results == other.results else "two runs gave their results in different places"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self, inputs: Sequence[Tensor], counters: Mapping[str, Tensor], held: Sequence[Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self.recording = Recording()
        self._counters = {self._key(tensor): name for name, tensor in counters.items()}
        self._numbers: dict[tuple[Any, ...], Ref] = {}
        self._alive: list[Tensor] = []
        for tensor in inputs:
            self.recording.inputs.append(self._new(tensor))

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the guard against it would import the compiler, for seconds."""
        return False

    @override
    def __torch_dispatch__(
        self,
        func: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READING:
            raise Unrecordable("it reads a tensor's value into Python (item(), if, float())")
        if torch.Tag.dynamic_output_shape in func.tags and not _by_numbers(func, args):
            raise Unrecordable(f"how many values {func} gives depends on the data (as with a boolean mask)")
        if self._counters and self._counted(func, args, kwargs):
            return func(*args, **kwargs)
        arguments, options = tree_map(self._referred, (args, dict(kwargs)))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._check_targets(func, args, kwargs)
        outputs, _ = tree_flatten(result)
        known = [isinstance(out, Tensor) and self._key(out) in self._numbers for out in outputs]
        refs = tuple(self._output(out) for out in outputs)
        view = func is torch.ops.aten._unsafe_view.default or all(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        # A view of something that has the same place and shape already is that thing.
        if not (view and outputs and all(known)):
            self.recording.calls.append(Call(func, tuple(arguments), options, refs))
        return result

    def number_of(self, tensor: Tensor) -> Ref:
        """The value that a tensor holds; RuntimeError if the recording does not know it."""
        return self._numbers[self._key(tensor)]

    def _counted(self, func: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this only adds a number to a counter. Raises Unrecordable for any other use of one."""
        leaves = tree_flatten((args, dict(kwargs)))[0]
        used = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self._key(leaf) in self._counters]
        if not used:
            return False
        name = self._counters[self._key(used[0])]
        if func is not torch.ops.aten.add_.Tensor or args[0] is not used[0] or len(used) > 1 or kwargs:
            raise Unrecordable(f"it works with {name!r}, which stays at each client and is no float ({func})")
        self.recording.counts[name] = self.recording.counts.get(name, 0) + int(args[1])
        return True

    def _referred(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        ref = self._numbers.get(self._key(value))
        if ref is None:
            ref = self._new(value)
            self.recording.constants[ref] = value
        return ref

    def _output(self, value: Any) -> Ref | None:
        if not isinstance(value, Tensor):
            return None
        return self._numbers.get(self._key(value)) or self._new(value)

    def _new(self, tensor: Tensor) -> Ref:
        ref = Ref(len(self._alive))
        self._alive.append(tensor)
        self._numbers[self._key(tensor)] = ref
        self.recording.kinds[ref] = kind_of(tensor)
        return ref

    def _check_targets(self, func: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """What is written to must have been made within the step, or be held by the client."""
        kept = {*self.recording.inputs, *self.recording.constants}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[number] if number < len(args) else kwargs.get(argument.name)
                if not isinstance(target, Tensor) or target.untyped_storage().data_ptr() in self._held:
                    continue
                if self._numbers.get(self._key(target)) in kept:
                    raise Unrecordable(f"it changes a buffer of the model in place ({func})")

    @staticmethod
    def _key(tensor: Tensor) -> tuple[Any, ...]:
        if tensor.layout is not torch.strided:
            raise Unrecordable("it works with sparse tensors, as gradients of nn.Embedding(sparse=True) are")
        return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class _Watch(TorchFunctionMode):
    """Raises Unrecordable where values leave torch."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVING and args and isinstance(args[0], Tensor):
            raise Unrecordable(f"it reads a tensor's value into Python ({name})")
        return func(*args, **(kwargs or {}))


def _by_numbers(func: Operator, args: tuple[Any, ...]) -> bool:
    """Whether this is indexing by row numbers: its shape follows from theirs, unlike a mask's."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(part is None or part.dtype not in (torch.bool, torch.uint8) for part in args[1])


def kind_of(tensor: Tensor) -> ValueLayout:
    """How a tensor lies in memory."""
    storage = tensor.untyped_storage().data_ptr()
    return ValueLayout(
        tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), storage, tensor.dtype
    )


def record(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor],
    counters: Mapping[str, Tensor] | None = None,
    held: Sequence[Tensor] = (),
) -> Recording:
    """The operations of `function(*inputs)` and where its results are; steps of `counters` are counted, and
    the memory of `held` may be written.

    Raises Unrecordable where it reads values into Python or changes what it did not make.
    """
    recorder = _Recorder(inputs, counters or {}, held)
    with _Watch(), recorder:
        results = function(*inputs)
    recorder.recording.results = [None if r is None else recorder.number_of(r) for r in results]
    return recorder.recording


def refill(call: Call, values: Mapping[Ref, Tensor]) -> Any:
    """Runs one call with tensors in place of its references."""
    leaves, spec = tree_flatten((call.arguments, dict(call.options)))
    filled = [values[leaf] if isinstance(leaf, Ref) else leaf for leaf in leaves]
    arguments, options = tree_unflatten(filled, spec)
    return call.operator(*arguments, **options)

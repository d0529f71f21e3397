"""Counts what training on one example takes, on fake tensors: operations, bytes that are moved, calls.

The operations are the base of utilisation and, with the other two, of a step's predicted time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typing_extensions import override

from roundtable.client.first_batch.step_memory import quietly
from roundtable.cluster.parallel.forward_trace import fake_model
from roundtable.cluster.parallel.strategy import (
    by_entry,
    cannot_code_state,
    cannot_share_out,
    cannot_take_parts,
    take_kernels,
)
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.task import Task

_ATEN = torch.ops.aten
# They move nothing.
_FREE = {_ATEN._unsafe_view, _ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.new_empty_strided}
# Keys that a CPU's fused attention takes at once.
_KEYS = 512
# They compute next to nothing for each byte.
_CARRIERS = {
    *(_ATEN.add, _ATEN.add_, _ATEN.sub, _ATEN.sub_, _ATEN.mul, _ATEN.mul_, _ATEN.neg, _ATEN.where),
    *(_ATEN.copy_, _ATEN.clone, _ATEN._to_copy, _ATEN.cat, _ATEN.stack, _ATEN.sum, _ATEN.mean),
    *(_ATEN.fill_, _ATEN.zero_, _ATEN.zeros, _ATEN.zeros_like, _ATEN.new_zeros, _ATEN.ones_like),
    *(
        _ATEN.full,
        _ATEN.full_like,
        _ATEN.masked_fill,
        _ATEN.masked_fill_,
        _ATEN.relu,
        _ATEN.threshold_backward,
    ),
    *(_ATEN.embedding, _ATEN.embedding_dense_backward, _ATEN.index, _ATEN.index_select, _ATEN.gather),
    *(_ATEN.slice_backward, _ATEN.select_backward, _ATEN.nll_loss_forward, _ATEN.nll_loss_backward),
}
# They read as much of their first argument as they give back.
_LOOKUPS = {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather}


@dataclass(frozen=True)
class PassWork:
    """Of one example: operations of matrix products, attention and convolutions (`flops`); bytes that the
    other operators read and write, `carried` by those that add or copy, `moved` by those that compute. Of a
    pass, whatever its examples: bytes of weights read and of their gradients written, and calls of operators.

    `attention` is the part of `flops` that a CPU's fused kernel has; for it that kernel does `visited`
    operations of products and, with so many exponentials, `scores`.
    """

    flops: float = 0.0
    moved: float = 0.0
    weights: float = 0.0
    calls: float = 0.0
    carried: float = 0.0
    attention: float = 0.0
    visited: float = 0.0
    scores: float = 0.0

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(*map(add, self.values, other.values))

    @property
    def values(self) -> tuple[float, ...]:
        """The figures in the order of the fields."""
        own = self.flops, self.moved, self.weights, self.calls
        return *own, self.carried, self.attention, self.visited, self.scores


@dataclass(frozen=True)
class ExampleCost:
    """Operations of one training example: `flops` forward and backward, without what checkpointing repeats.

    `tokens` is the length of its sequence of tokens, 0 where it has none. `method` is counted, operator by
    operator, or 6N: six operations for each parameter and position of the model's output (Kaplan et al.
    2020, section 2.1), where the backward pass cannot run on fake tensors. `forward` is the work of each
    module's own operators by its name, `backward` that of all together.
    """

    flops: float
    tokens: int
    method: Literal["counted", "6N"]
    forward: Mapping[str, PassWork] = field(default_factory=dict)
    backward: PassWork = field(default_factory=PassWork)


def count_work(task: Task, batch: Any) -> ExampleCost:
    """The cost of `batch`, whose values do not matter, divided by its examples."""
    mode, model = fake_model(task)
    fakes = tree_map_only(Tensor, mode.from_tensor, batch)
    leaves = [leaf for leaf in tree_leaves(fakes) if isinstance(leaf, Tensor) and leaf.dim()]
    examples = len(leaves[0]) if leaves else 1
    seen, recorder = _Shapes(model), OperatorRecorder(model)
    with seen.hooks:
        try:
            with quietly(), mode, recorder:
                loss = task.loss(model, fakes)
                recorder.backward = True
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - code that wants values may raise anything
            return _by_size(model, seen, examples)
    forward, backward = recorder.found(examples)
    total = sum(work.flops for work in forward.values()) + backward.flops
    return ExampleCost(total, seen.tokens, "counted", forward, backward)


def _by_size(model: nn.Module, seen: _Shapes, examples: int) -> ExampleCost:
    """Two operations forward and four backward for each parameter and position, and nothing beside them."""
    positions = max(1, seen.positions // examples)
    own = {
        name: sum(p.numel() for p in module.parameters(recurse=False) if p.requires_grad)
        for name, module in model.named_modules()
    }
    size = {name: float(count) for name, count in own.items() if count}
    forward = {name: PassWork(2.0 * count * positions, 0.0, 4.0 * count, 1.0) for name, count in size.items()}
    whole = sum(forward.values(), PassWork())
    backward = PassWork(2 * whole.flops, 0.0, 2 * whole.weights, 2 * whole.calls)
    return ExampleCost(6.0 * sum(size.values()) * positions, seen.tokens, "6N", forward, backward)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of each module's own operators, and with `backward` set that of all together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = False
        self._forward: dict[str, PassWork] = defaultdict(PassWork)
        self._back = PassWork()
        self._stack = [""]
        self._weights = {tuple(p.shape) for p in model.parameters()}
        self._weights |= {shape[::-1] for shape in self._weights if len(shape) == 2}
        self._hooks = [
            hook
            for name, module in model.named_modules()
            for hook in (
                module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)),
                module.register_forward_hook(lambda *_: self._leave()),
            )
        ]

    def found(self, examples: int) -> tuple[dict[str, PassWork], PassWork]:
        """(by module of the forward pass, of the backward pass), of one example; the hooks are removed."""
        for hook in self._hooks:
            hook.remove()

        def of_one(work: PassWork) -> PassWork:
            one = PassWork(*(value / examples for value in work.values))
            return replace(one, weights=work.weights, calls=work.calls)

        return {name: of_one(work) for name, work in self._forward.items()}, of_one(self._back)

    def _leave(self) -> None:
        self._stack.pop()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not (func.is_view or func.namespace == "prim" or func.overloadpacket in _FREE):
            work = self._work(func, args, kwargs or {}, output)
            if self.backward:
                self._back += work
            else:
                self._forward[self._stack[-1]] += work
        return output

    def _work(self, func: Any, args: Any, kwargs: Any, output: Any) -> PassWork:
        count = _COUNTS.get(func.overloadpacket)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if func.overloadpacket in _LOOKUPS:
            read = written
        weights = sum(leaf.nbytes for leaf in (*read, *written) if tuple(leaf.shape) in self._weights)
        if count is not None:
            flops = float(count(*args, **kwargs, out_val=output))
            if (kernel := _KERNELS.get(func.overloadpacket)) is not None:
                scores, share = kernel(*args, **kwargs)
                attention = {"attention": flops, "visited": share * flops, "scores": scores}
                return PassWork(flops, 0.0, weights, 1.0, **attention)
            return PassWork(flops, 0.0, weights, 1.0)
        rest = sum(leaf.nbytes for leaf in (*read, *written)) - weights
        if func.overloadpacket in _CARRIERS:
            return PassWork(0.0, 0.0, weights, 1.0, carried=rest)
        return PassWork(0.0, rest, weights, 1.0)


class _Shapes:
    """Hooks that note the length of sequences: of tokens into an embedding, of vectors out of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens = self.positions = 0
        self.hooks = ExitStack()
        for part in model.modules():
            if isinstance(part, nn.Embedding):
                self.hooks.callback(part.register_forward_pre_hook(self._embedded).remove)
        self.hooks.callback(model.register_forward_hook(self._after_forward).remove)

    def _embedded(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() == 2:
            self.tokens = max(self.tokens, inputs[0].shape[1])

    def _after_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.dim():
            self.positions = output.numel() // output.shape[-1]


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of attention on a CPU, which torch's counter does not know."""
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(out: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Twice the forward pass, as for any product: what a kernel computes again is not the model's work."""
    return 2 * _attention(query, key, value)


def _visited(query: Any, key: Any, causal: bool) -> float:
    """Pairs of a query and a key that a CPU's fused attention visits, where `causal` leaves out blocks.

    Keys come in blocks of 512; queries, by how many there are, in blocks of 32, 64 or 256 (FlashAttention's
    loops in torch's FlashAttentionKernel.cpp). A block is left out where all its keys are after its queries.
    """
    rows, length, keys = query.shape[0] * query.shape[1], query.shape[2], key.shape[2]
    if not causal:
        return float(rows * length * keys)
    block = 32 if length < 192 else 64 if length < 768 else 256
    pairs = 0
    for first in range(0, length, block):
        last = min(first + block, length)
        pairs += (last - first) * min(keys, -(-last // _KEYS) * _KEYS)
    return float(rows * pairs)


def _forward_kernel(
    query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **kwargs: Any
) -> tuple[float, float]:
    """(scores, operations over those of the model) of a fused forward pass."""
    pairs = _visited(query, key, causal)
    return pairs, pairs / max(1.0, _visited(query, key, causal=False))


def _backward_kernel(
    out: Any, query: Any, key: Any, value: Any, of: Any, sums: Any, dropout: float, causal: bool, **rest: Any
) -> tuple[float, float]:
    """The same of a backward pass: five products where the model has four, and each score twice, once
    computed again and once for its gradient (Dao et al. 2022, algorithm 4).
    """
    pairs, share = _forward_kernel(query, key, value, dropout, causal)
    return 2.0 * pairs, 1.25 * share


def _grouped(rows: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    """Operations of a product over experts: each row meets the matrix of one of them."""
    return int(2 * rows.numel() * weights.shape[-1])


_COUNTS: dict[Any, Any] = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped,
}
_KERNELS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _forward_kernel,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward_kernel,
}


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes of state for each byte of parameters, a step's work, is it the task's own, is it `by_entry`, and
    why its state cannot be in 8 bits, shared out by ZeRO-1, or lie in parts.

    The work is the bytes that a step moves for each byte of gradients, and its calls for each parameter.
    """

    factor: float
    work: PassWork
    own: bool
    by_entry: bool
    cannot_code: str = ""
    cannot_share: str = ""
    cannot_part: str = ""


def optimizer_cost(task: Task) -> OptimizerCost:
    """What the task's optimizer costs, found on small parameters.

    Plain SGD, which is the default, reads the gradient and reads and writes the parameter. Raises ConfigError
    for an optimizer whose state is in tensors of a kind of its own, TaskError for one that cannot be made or
    takes no step by gradients alone.
    """
    optimizer = _on_small_parameters(task)
    if optimizer is None:
        return OptimizerCost(0.0, PassWork(moved=3.0, calls=1.0), own=False, by_entry=True)
    cannot_share, cannot_part = cannot_share_out(optimizer), cannot_take_parts(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameter = max(held, key=Tensor.numel)
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise TaskError(
            f"the task's optimizer {type(optimizer).__name__} takes no step by the gradients that are there "
            f"({type(error).__name__}: {error}); one that computes the loss again by a closure cannot be used"
        ) from error
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    own = next((type(value) for value in states if type(value) not in (Tensor, nn.Parameter)), None)
    if own is not None:
        raise ConfigError(
            f"the task's optimizer {type(optimizer).__name__} keeps its state in tensors of its own kind "
            f"({own.__name__}), which no checkpoint of a cluster can hold; use one with plain tensors, such "
            "as AdamW, with optimizer_bits = 8 or offload_optimizer = true where its state does not fit"
        )
    size = parameter.nbytes
    factor = sum(value.nbytes for value in states if value.numel() > 1) / size
    if by_entry(optimizer):
        take_kernels(optimizer)
    recorder = OperatorRecorder(nn.Module())
    with recorder:
        optimizer.step()
    work = sum(recorder.found(1)[0].values(), PassWork())
    # A fused kernel writes what it reads, weights and state, and gives nothing back that could be counted.
    fused = any(group.get("fused") for group in optimizer.param_groups)
    cost = PassWork(moved=3.0 + 2.0 * factor, calls=1.0)
    if not fused:
        cost = PassWork(moved=(work.moved + work.carried) / size, calls=work.calls)
    reasons = cannot_code_state(optimizer), cannot_share, cannot_part
    return OptimizerCost(factor, cost, True, by_entry(optimizer), *reasons)


def _on_small_parameters(task: Task) -> torch.optim.Optimizer | None:
    """The task's optimizer on a matrix and a vector, or on one of them: some take matrices alone."""
    make: Callable[[Iterable[nn.Parameter]], Any] | None = getattr(task, "optimizer", None)
    if make is None:
        return None
    failure: Exception | None = None
    for shapes in (((64, 64), (64,)), ((64, 64),), ((64,),)):
        parameters = [nn.Parameter(torch.zeros(each)) for each in shapes]
        try:
            made: torch.optim.Optimizer | None = make(parameters)
        except Exception as error:  # noqa: BLE001 - a task's code may raise anything
            failure = failure or error
        else:
            return made
    raise TaskError(
        f"{type(task).__name__}.optimizer() does not take parameters: {type(failure).__name__}: {failure}"
    ) from failure

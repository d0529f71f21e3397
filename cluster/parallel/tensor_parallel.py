"""Finds where a model can be split over tensor-parallel ranks, by the structure of its modules.

Within a block, a module whose linear layers all read the same input and whose last one brings the
result back to the block's width is split as a pair (Shoeybi et al. 2019, Megatron-LM, section 3): the
readers by columns, the last by rows. That covers attention and feed-forward parts; embeddings are split
over the vocabulary, the head by columns. Every split is tried on made-up numbers before it is offered. Norms
between them run on shards of the sequence (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundtable.cluster.parallel.anatomy import Anatomy
from roundtable.cluster.parallel.forward_trace import Trace
from roundtable.cluster.parallel.split_check import LayerSplit, linear, wrong_split

Style = Literal["column", "row", "vocabulary", "head"]
_HEADS = re.compile(r"((n|num)_?((kv|key_value|attention)_)?)?heads?|nhead|n_local_heads")


@dataclass(frozen=True)
class Stream:
    """How a module is given its activations: as the first of `inputs` positional arguments, or by `name`."""

    inputs: int
    name: str


@dataclass(frozen=True)
class TensorParallel:
    """Which linear and embedding layers are split, and how.

    `styles` maps module names; `inner` are the modules made of split pairs, with how they are given their
    input, as `entry` says of the first block; `packed` has the parts' sizes of layers that hold several.
    `norms` run on sequence shards where that is possible, else `no_sequence` says why not. `heads` are
    counts, as (module, attribute), that each rank has its part of. `whole` says what stays unsplit, and
    why. `draws`: the model takes random numbers (dropout).
    """

    styles: Mapping[str, Style]
    inner: Mapping[str, Stream] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    heads: tuple[tuple[str, str], ...] = ()
    no_sequence: str = ""
    whole: tuple[str, ...] = ()
    draws: bool = False
    packed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    entry: Stream = Stream(1, "")

    def refusal(self, model: nn.Module, degree: int) -> str:
        """Why the model cannot be split over so many ranks; empty if it can."""
        if not any(style in ("column", "row") for style in self.styles.values()):
            reasons = "; ".join(self.whole[:3]) or "it has no repeated blocks"
            return (
                f"no part of a block can be split by structure ({reasons}); give the task a tensor_parallel()"
            )
        for name, attribute in self.heads:
            count = getattr(model.get_submodule(name), attribute)
            if count % degree:
                return f"{name}.{attribute} = {count} does not divide over tp = {degree}"
        for name, style in self.styles.items():
            shape = model.get_parameter(f"{name}.weight").shape
            size = shape[1] if style == "row" else shape[0]
            if name in self.packed and (odd := [part for part in self.packed[name] if part % degree]):
                return f"a part of {name} has {odd[0]} columns, which do not divide over tp = {degree}"
            if style in ("column", "row") and int(size) % degree:
                return f"{name} has {int(size)} {style}s, which do not divide over tp = {degree}"
        return ""


def find_tensor_parallel(model: nn.Module, anatomy: Anatomy, traced: Trace) -> TensorParallel:
    """Finds the splits of a model, real or fake, in its blocks and one traced pass."""
    order = [call.name for call in traced.calls]
    finder = _Finder(model, traced)
    styles: dict[str, Style] = {}
    inner: dict[str, Stream] = {}
    whole: list[str] = []
    heads: list[tuple[str, str]] = []
    packed: dict[str, tuple[int, ...]] = {}
    for block in anatomy.blocks:
        for name, _ in model.get_submodule(block).named_modules(prefix=block):
            split = finder.split(name)
            if isinstance(split, str):
                whole += [split] if split and split not in whole else []
                continue
            styles.update({f"{name}.{key}": "column" for key in split.readers})
            styles[f"{name}.{split.last}"] = "row"
            heads.extend((name, key) for key in split.counts)
            packed.update({f"{name}.{key}": sizes for key, sizes in split.packed.items()})
            if name != block:
                inner[name] = _stream(traced, name)
    entry = _stream(traced, anatomy.blocks[0]) if anatomy.blocks else Stream(1, "")
    if styles:
        styles.update(_ends(model, anatomy, order))
    norms, no_sequence = _norms(model, anatomy, styles, inner, traced)
    return TensorParallel(
        styles=styles,
        inner=inner,
        norms=norms,
        heads=tuple(heads),
        no_sequence=no_sequence,
        whole=tuple(whole),
        draws=bool(traced.draws),
        packed=packed,
        entry=entry,
    )


def _stream(traced: Trace, name: str) -> Stream:
    """How a module is given the activations that blocks hand on."""
    inputs, named = traced.arguments.get(name, ((), {}))
    if inputs and isinstance(inputs[0], Tensor):
        return Stream(len(inputs), "")
    keys = (key for key, value in named.items() if isinstance(value, Tensor) and value.dim() == 3)
    return Stream(len(inputs), next(keys, ""))


def from_task(task: object, model: nn.Module, traced: Trace) -> TensorParallel | None:
    """The task's own plan: its `tensor_parallel(model)` maps names of layers to column, row or vocabulary."""
    plan: Callable[[nn.Module], Mapping[str, Style]] | None = getattr(task, "tensor_parallel", None)
    if plan is None:
        return None
    styles = dict(plan(model))
    heads: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if any(key.rpartition(".")[0] == name for key in styles):
            heads.extend((name, key) for key, value in vars(module).items() if _is_heads(key, value))
    return TensorParallel(
        styles, heads=tuple(heads), no_sequence="the task gives its own plan", draws=bool(traced.draws)
    )


class _Finder:
    """Finds the splits of modules; those of one kind, called alike, are tried once."""

    def __init__(self, model: nn.Module, traced: Trace) -> None:
        self._model = model
        self._traced = traced
        self._order = [call.name for call in traced.calls]
        self._known: dict[Any, LayerSplit | str] = {}

    def split(self, name: str) -> LayerSplit | str:
        """How a module is split; a reason where it cannot be, empty where it has no layers to split."""
        module = self._model.get_submodule(name)
        if isinstance(module, nn.MultiheadAttention):
            return "nn.MultiheadAttention keeps q, k and v in one parameter"
        linears = {key: part for key, part in module.named_children() if isinstance(part, nn.Linear)}
        called = [key for key in linears if f"{name}.{key}" in self._order]
        called.sort(key=lambda key: self._order.index(f"{name}.{key}"))
        if len(called) < 2:
            return ""
        kind, readers, last = type(module).__name__, called[:-1], linears[called[-1]]
        width = linears[readers[0]].in_features
        if any(linears[key].in_features != width for key in readers) or last.out_features != width:
            return f"the linear layers of {kind} are no columns followed by rows"
        if strange := _strange(module, set(linears)):
            return f"{kind} has parameters besides its linear layers: {strange}"
        arguments = self._traced.arguments.get(name, ((), {}))
        shapes = [(key, tuple(value.shape)) for key, value in module.named_parameters()]
        taken = [tuple(leaf.shape) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = (type(module), tuple(shapes), tuple(taken))
        if key not in self._known:
            self._known[key] = self._tried(module, tuple(readers), called[-1], arguments)
        found = self._known[key]
        return f"{kind}: {found}" if isinstance(found, str) else found

    def _tried(
        self, module: nn.Module, readers: tuple[str, ...], last: str, arguments: tuple[Any, Any]
    ) -> LayerSplit | str:
        """The first of the ways to split that computes what the whole module does, or what the first says."""
        reasons = []
        heads = tuple(key for key, value in vars(module).items() if _is_heads(key, value))
        inner = linear(module, last).in_features
        widths = tuple(key for key, value in vars(module).items() if type(value) is int and value == inner)
        for packed in _packings(module, readers, inner):
            for counts in dict.fromkeys((heads, tuple(dict.fromkeys((*heads, *widths))))):
                split = LayerSplit(readers, last, counts, packed)
                reason = wrong_split(module, split, arguments)
                if not reason:
                    return split
                reasons.append(reason)
        return reasons[0]


def _packings(module: nn.Module, readers: Sequence[str], inner: int) -> list[dict[str, tuple[int, ...]]]:
    """What the columns of readers may be: several parts (q, k, v; a gate and a value), or one."""
    sizes = {key: linear(module, key).out_features for key in readers}
    wide = {key: size for key, size in sizes.items() if size > inner}
    ways: list[dict[str, tuple[int, ...]]] = []
    if wide:
        rest = {key: (size - inner) // 2 for key, size in wide.items()}
        ways.append({key: (inner, rest[key], rest[key]) for key in wide})
        if all(size == 2 * inner for size in wide.values()):
            ways.append(dict.fromkeys(wide, (inner, inner)))
        ways = [way for way in ways if all(sum(way[key]) == size for key, size in wide.items())]
    return [*ways, {}]


def _strange(module: nn.Module, linears: set[str]) -> str:
    """A parameter of a module that belongs neither to its linear layers nor to blocks of its own."""
    if any(isinstance(part, nn.MultiheadAttention) or is_norm(part) for part in module.children()):
        return ""
    keys = (key for key, _ in module.named_parameters())
    return next((key for key in keys if key.rpartition(".")[0] not in linears), "")


def is_norm(module: nn.Module) -> bool:
    """Whether it normalises each vector by itself, with weights of features: torch's, or a library's."""
    parameters = list(module.parameters())
    flat = bool(parameters) and all(parameter.dim() == 1 for parameter in parameters)
    named = re.search(r"(RMS|Layer)Norm$", type(module).__name__) is not None
    return flat and named and next(module.children(), None) is None


def _is_heads(key: str, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and _HEADS.fullmatch(key) is not None


def _ends(model: nn.Module, anatomy: Anatomy, order: list[str]) -> dict[str, Style]:
    """Styles of embeddings before the blocks and of the linear head after them."""
    inside = [i for i, name in enumerate(order) if anatomy.unit_of(name) in anatomy.blocks]
    first, final = inside[0], inside[-1]
    styles: dict[str, Style] = {}
    for index, name in enumerate(order):
        module = model.get_submodule(name)
        if index < first and isinstance(module, nn.Embedding) and module.padding_idx is None:
            styles[name] = "vocabulary"
        if index > final and isinstance(module, nn.Linear):
            styles[name] = "head"
    return styles


def _norms(
    model: nn.Module,
    anatomy: Anatomy,
    styles: Mapping[str, Style],
    inner: Mapping[str, Stream],
    traced: Trace,
) -> tuple[tuple[str, ...], str]:
    """(norms between the split parts of every block, why the sequence cannot be sharded)."""
    norms: list[str] = []
    for block in anatomy.blocks:
        module = model.get_submodule(block)
        for name, part in module.named_children():
            full = f"{block}.{name}"
            if is_norm(part):
                norms.append(full)
            elif full not in inner and next(part.parameters(), None) is not None:
                return (), f"{full} is neither a norm nor split"
        if any(True for _ in module.parameters(recurse=False)):
            return (), f"{block} has parameters of its own"
    shapes = {call.output for call in traced.calls if call.name in anatomy.blocks}
    if len(shapes) != 1 or len(next(iter(shapes)) or ()) != 3:
        return (), "blocks do not pass on one tensor of shape [batch, sequence, width]"
    return tuple(norms), ""

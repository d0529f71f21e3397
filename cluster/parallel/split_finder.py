"""Finds, in a model's repeated blocks, the layers that ranks can share, by the order of their calls.

The innermost module is tried first: within one that a pass calls, dense layers that all read the same width
and a last one that gives it back, which may lie in parts of it (BERT's attention, and its feed-forward part,
end in a module of their own). What was split is left out further up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundtable.cluster.parallel.forward_trace import Trace
from roundtable.cluster.parallel.packed_layers import inputs_of_layer, is_dense, outputs_of
from roundtable.cluster.parallel.split_attention import unsplittable
from roundtable.cluster.parallel.split_check import LayerSplit, attribute, between, wrong_split

_HEADS = re.compile(r"((n|num)_?((kv|key_value|attention)_)?)?heads?|nhead|n_local_heads")


def is_heads(key: str, value: object) -> bool:
    """Whether an attribute of a module is a number of heads."""
    return type(value) is int and _HEADS.fullmatch(key) is not None


def is_norm(module: nn.Module) -> bool:
    """Whether it normalises each vector by itself, with weights of features: torch's, or a library's."""
    parameters = list(module.parameters())
    flat = bool(parameters) and all(parameter.dim() == 1 for parameter in parameters)
    named = re.search(r"(RMS|Layer)Norm$", type(module).__name__) is not None
    return flat and named and next(module.children(), None) is None


class SplitFinder:
    """Finds the splits of modules; those of one kind, called alike, are tried once.

    `splits` are by the name of the module that they are in, `attentions` names of nn.MultiheadAttention,
    `whole` says what stays unsplit, and why.
    """

    def __init__(self, model: nn.Module, traced: Trace, told: Callable[[str], None]) -> None:
        """`told` hears what is tried."""
        self.splits: dict[str, LayerSplit] = {}
        self.attentions: list[str] = []
        self.whole: list[str] = []
        self._model = model
        self._traced = traced
        self._told = told
        self._order = {call.name: place for place, call in reversed(list(enumerate(traced.calls)))}
        self._known: dict[Any, LayerSplit | str] = {}

    def search(self, block: str) -> None:
        """Looks for splits in a block, from the inside out."""
        taken: set[str] = set()
        said: list[tuple[str, list[str]]] = []
        names = [name for name, _ in self._model.get_submodule(block).named_modules(prefix=block)]
        for name in sorted(names, key=lambda name: -name.count(".")):
            module = self._model.get_submodule(name)
            if isinstance(module, nn.MultiheadAttention):
                reason = unsplittable(module)
                if not reason:
                    self.attentions.append(name)
                    taken.add(f"{name}.out_proj")
                self._say(reason)
            elif name in self._order:
                layers = self._layers(name, module, taken)
                found = self._split(name, module, layers) if len(layers) > 1 else ""
                if isinstance(found, LayerSplit):
                    self.splits[name] = found
                    taken.update(f"{name}.{key}" for key in layers)
                elif found:
                    said.append((found, [f"{name}.{key}" for key in layers]))
        for reason, full in said:
            if not taken.intersection(full):
                self._say(reason)
                taken.update(full)

    def _say(self, reason: str) -> None:
        if reason and reason not in self.whole:
            self.whole.append(reason)

    def _layers(self, name: str, module: nn.Module, taken: set[str]) -> list[str]:
        """Dense layers within a module in the order of their calls, without those that are split already."""
        within = (key for key, part in module.named_modules() if key and is_dense(part))
        called = [key for key in within if f"{name}.{key}" in self._order and f"{name}.{key}" not in taken]
        return sorted(called, key=lambda key: self._order[f"{name}.{key}"])

    def _split(self, name: str, module: nn.Module, layers: Sequence[str]) -> LayerSplit | str:
        kind, (*readers, last) = type(module).__name__, layers
        width = inputs_of_layer(module.get_submodule(readers[0]))
        same = all(inputs_of_layer(module.get_submodule(key)) == width for key in readers)
        if not same or outputs_of(module.get_submodule(last)) != width:
            return f"the linear layers of {kind} are no columns followed by rows"
        arguments = self._traced.arguments.get(name, ((), {}))
        shapes = [(key, tuple(value.shape)) for key, value in module.named_parameters()]
        given = [tuple(leaf.shape) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = (type(module), tuple(shapes), tuple(given), tuple(layers))
        if key not in self._known:
            self._told(f"trying how {name} ({kind}) can be split")
            self._known[key] = _tried(module, tuple(readers), last, arguments)
        found = self._known[key]
        return f"{kind}: {found}" if isinstance(found, str) else found


def _tried(
    module: nn.Module, readers: tuple[str, ...], last: str, arguments: tuple[Any, Any]
) -> LayerSplit | str:
    """The first of the ways to split that computes what the whole module does, or what the first says."""
    inner = inputs_of_layer(module.get_submodule(last))
    heads, widths = _counts(module, readers, inner)
    numbers = {getattr(*attribute(module, key)) for key in heads}
    tables: list[str] = []
    norms: list[str] = []
    for name in between(module, LayerSplit(readers, last), arguments):
        owner = name.rpartition(".")[0]
        layer = module.get_submodule(owner)
        if is_norm(layer):
            norms.append(owner)
            continue
        if not isinstance(layer, nn.Embedding) or layer.embedding_dim not in numbers:
            return f"all heads use {name}, and a rank would learn it from its own heads alone"
        tables.append(owner)
    reasons = []
    for packed in _packings(module, readers, inner):
        for counts in dict.fromkeys((heads, tuple(dict.fromkeys((*heads, *widths))))):
            for handed in (0, *numbers):
                split = LayerSplit(readers, last, counts, packed, tuple(tables), handed, tuple(norms))
                reason = wrong_split(module, split, arguments)
                if not reason:
                    return split
                reasons.append(reason)
    return reasons[0]


def _counts(module: nn.Module, readers: Sequence[str], inner: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Attributes that are numbers of heads, and those that are the width of all heads."""
    owners = dict.fromkeys(("", *(key.rpartition(".")[0] for key in readers)))
    heads, widths = [], []
    for owner in owners:
        for key, value in vars(module.get_submodule(owner)).items():
            full = f"{owner}.{key}" if owner else key
            if is_heads(key, value):
                heads.append(full)
            elif type(value) is int and value == inner:
                widths.append(full)
    return tuple(heads), tuple(widths)


def _packings(module: nn.Module, readers: Sequence[str], inner: int) -> list[dict[str, tuple[int, ...]]]:
    """What the columns of readers may be: several parts (q, k, v; a gate and a value), or one."""
    sizes = {key: outputs_of(module.get_submodule(key)) for key in readers}
    wide = {key: size for key, size in sizes.items() if size > inner}
    ways: list[dict[str, tuple[int, ...]]] = []
    if wide:
        rest = {key: (size - inner) // 2 for key, size in wide.items()}
        ways.append({key: (inner, rest[key], rest[key]) for key in wide})
        if all(size == 2 * inner for size in wide.values()):
            ways.append(dict.fromkeys(wide, (inner, inner)))
        ways = [way for way in ways if all(sum(way[key]) == size for key, size in wide.items())]
    return [*ways, {}]

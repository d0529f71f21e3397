"""Finds where a model can be split over tensor-parallel ranks, by the structure of its modules.

Within a block, a module whose linear layers all read the same input and whose last one brings the
result back to the block's width is split as a pair (Shoeybi et al. 2019, Megatron-LM, section 3): the
readers by columns, the last by rows. That covers attention and feed-forward parts; embeddings are split
over the vocabulary, the head by columns. Every split is tried on made-up numbers before it is offered. Norms
between them run on shards of the sequence (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundtable.cluster.parallel.anatomy import Anatomy, repeated_blocks
from roundtable.cluster.parallel.experts import MixtureOfExperts
from roundtable.cluster.parallel.forward_trace import Trace, unheard
from roundtable.cluster.parallel.packed_layers import inputs_of_layer, is_dense, outputs_of
from roundtable.cluster.parallel.split_check import wrong_spread
from roundtable.cluster.parallel.split_finder import SplitFinder, is_heads, is_norm
from roundtable.core.errors import TaskError

Style = Literal["column", "row", "vocabulary", "head", "attention"]
_PARTS = "some of several parts"
_HEAD_WIDTH = re.compile(r"(attention_)?head_(dim|size)|key_value_proj_dim|d_(kv|head)|dim_head")


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
    `norms` run on sequence shards where that is possible, else `no_sequence` says why not; `head_norms` on
    each rank's heads, and their gradients are added up over the ranks. `heads` are
    counts, as (module, attribute), that each rank has its part of. `whole` says what stays unsplit, and
    why. `draws`: the model takes random numbers (dropout).
    """

    styles: Mapping[str, Style]
    inner: Mapping[str, Stream] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    heads: tuple[tuple[str, str], ...] = ()
    head_norms: tuple[str, ...] = ()
    no_sequence: str = ""
    whole: tuple[str, ...] = ()
    draws: bool = False
    packed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    entry: Stream = Stream(1, "")

    @property
    def attentions(self) -> list[str]:
        """Modules of torch's own attention, whose heads are shared out."""
        return [name for name, style in self.styles.items() if style == "attention"]

    def refusal(self, model: nn.Module, degree: int) -> str:
        """Why the model cannot be split over so many ranks; empty if it can."""
        if not any(style in ("column", "row") for style in self.styles.values()):
            reasons = "; ".join(self.whole[:3]) or (
                "its repeated blocks have no linear layers in pairs"
                if repeated_blocks(model)
                else "it has no repeated blocks"
            )
            return (
                f"no part of a block can be split by structure ({reasons}); give the task a tensor_parallel()"
            )
        return next((reason for reason in (self._tied(model), *self._uneven(model, degree)) if reason), "")

    def _tied(self, model: nn.Module) -> str:
        """Two names of one parameter that ranks would hold in two ways; empty without any."""
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            other = first.setdefault(id(parameter), name)
            if other == name:
                continue
            one, two = self._held(model, other), self._held(model, name)
            if one != two or one == _PARTS:
                return (
                    f"{other} and {name} are one parameter, of which ranks would hold {one} and {two}; use "
                    "zero3 without tp, or untie them"
                )
        return ""

    def _held(self, model: nn.Module, parameter: str) -> str:
        """What each rank holds of a parameter."""
        owner, _, key = parameter.rpartition(".")
        module = model.get_submodule(owner)
        layer = next((name for name in self.styles if model.get_submodule(name) is module), owner)
        style = self.styles.get(layer)
        if style == "attention" or len(self.packed.get(layer, ())) > 1:
            return _PARTS
        if style == "row" and key == "weight":
            return "a part of its inputs"
        if style == "row" or owner in self.head_norms:
            return "all of it, for parts of heads or columns"
        return "all of it" if style is None else "a part of its outputs"

    def _uneven(self, model: nn.Module, degree: int) -> Iterator[str]:
        for name, key in (*self.heads, *((name, "num_heads") for name in self.attentions)):
            count = getattr(model.get_submodule(name), key)
            if count % degree:
                yield f"{name}.{key} = {count} does not divide over tp = {degree}"
        for name, style in self.styles.items():
            layer = model.get_submodule(name)
            if name in self.packed and (odd := [part for part in self.packed[name] if part % degree]):
                yield f"a part of {name} has {odd[0]} columns, which do not divide over tp = {degree}"
            if style in ("column", "row"):
                size = inputs_of_layer(layer) if style == "row" else outputs_of(layer)
                if size % degree:
                    yield f"{name} has {size} {style}s, which do not divide over tp = {degree}"

    def few_heads(self, model: nn.Module, degree: int) -> str:
        """A layer whose heads ranks cannot share out, as grouped keys and values; empty if there is none."""
        for name, style in self.styles.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            widths = (value for key, value in vars(owner).items() if _HEAD_WIDTH.fullmatch(key))
            width = next((value for value in widths if type(value) is int and value > 0), 0)
            if style != "column" or not width:
                continue
            for size in self.packed.get(name, (outputs_of(model.get_submodule(name)),)):
                if size % width == 0 and size // width % degree:
                    return (
                        f"{name} has {size // width} heads of {width} columns, which do not divide over tp = "
                        f"{degree}; a head is not shared by ranks"
                    )
        return ""


def find_tensor_parallel(
    model: nn.Module, anatomy: Anatomy, traced: Trace, told: Callable[[str], None] = unheard
) -> TensorParallel:
    """Finds the splits of a model, real or fake, in its blocks and one traced pass.

    `told` hears what is tried.
    """
    order = [call.name for call in traced.calls]
    finder = SplitFinder(model, traced, told)
    for block in repeated_blocks(model):
        finder.search(block)
    styles: dict[str, Style] = {}
    heads: list[tuple[str, str]] = []
    head_norms: list[str] = []
    packed: dict[str, tuple[int, ...]] = {}
    for name, split in finder.splits.items():
        styles.update({f"{name}.{key}": "column" for key in split.columns})
        styles[f"{name}.{split.last}"] = "row"
        packed.update({f"{name}.{key}": sizes for key, sizes in split.packed.items()})
        head_norms += [f"{name}.{key}" for key in split.norms]
        for count in split.counts:
            owner, _, key = f"{name}.{count}".rpartition(".")
            heads.append((owner, key))
    for name in finder.attentions:
        styles[name], styles[f"{name}.out_proj"] = "attention", "row"
        packed[name] = (model.get_submodule(name).get_parameter("out_proj.weight").shape[1],) * 3
    within = [name for name in (*finder.splits, *finder.attentions) if name not in anatomy.blocks]
    inner = {name: _stream(traced, name) for name in within}
    entry = _stream(traced, anatomy.blocks[0]) if anatomy.blocks else Stream(1, "")
    if styles and anatomy.blocks:
        styles = {**_ends(model, anatomy, order, traced.borrowed), **styles}
    norms, no_sequence = _norms(model, anatomy, styles, inner, head_norms, traced)
    no_sequence = no_sequence or _mixed(model, anatomy, styles, inner, traced, told)
    if any(isinstance(module, MixtureOfExperts) and module.ordered for module in model.modules()):
        no_sequence = (
            "its experts take an example's tokens in their order, and each rank would have a part of them"
        )
    return TensorParallel(
        styles=styles,
        inner=inner,
        norms=norms,
        head_norms=tuple(head_norms),
        heads=tuple(heads),
        no_sequence=no_sequence,
        whole=(*finder.whole, *_whole_here(model, styles)),
        draws=bool(traced.draws),
        packed=packed,
        entry=entry,
    )


def _whole_here(model: nn.Module, styles: Mapping[str, Style]) -> Iterator[str]:
    """What the plan that comes with a model of transformers splits, and this one leaves whole."""
    plans = (getattr(module, "_tp_plan", None) for module in model.modules())
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for pattern, style in (next((plan for plan in plans if isinstance(plan, dict) and plan), {})).items():
        form = re.compile(r"(.*\.)?" + re.escape(str(pattern)).replace(r"\*", r"\d+"))
        found = next((name for name in names if form.fullmatch(name)), "")
        if found and not any(name == found or name.startswith(f"{found}.") for name in styles):
            yield f"{found} stays whole, which transformers' own plan splits ({style})"


def _stream(traced: Trace, name: str) -> Stream:
    """How a module is given the activations that blocks hand on."""
    inputs, named = traced.arguments.get(name, ((), {}))
    if inputs and isinstance(inputs[0], Tensor):
        return Stream(len(inputs), "")
    keys = (key for key, value in named.items() if isinstance(value, Tensor) and value.dim() == 3)
    return Stream(len(inputs), next(keys, ""))


def from_task(task: object, model: nn.Module, traced: Trace) -> TensorParallel | None:
    """The task's own plan, where it has a `tensor_parallel(model)`.

    It maps names of layers to column, row, head or vocabulary. Raises TaskError for what is no such layer.
    """
    plan: Callable[[nn.Module], Mapping[str, Style]] | None = getattr(task, "tensor_parallel", None)
    if plan is None:
        return None
    styles = dict(plan(model))
    for name, style in styles.items():
        layer = dict(model.named_modules()).get(name)
        fits = is_dense(layer) if style in ("column", "row", "head") else isinstance(layer, nn.Embedding)
        if style not in ("column", "row", "head", "vocabulary") or not fits:
            what = "not a layer of the model" if layer is None else f"a {type(layer).__name__}"
            raise TaskError(
                f"{type(task).__name__}.tensor_parallel() has {name!r}: {style!r}, and {name!r} is {what}; "
                "give a linear layer column, row or head, and an embedding vocabulary"
            )
    heads: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if any(key.rpartition(".")[0] == name for key in styles):
            heads.extend((name, key) for key, value in vars(module).items() if is_heads(key, value))
    return TensorParallel(
        styles, heads=tuple(heads), no_sequence="the task gives its own plan", draws=bool(traced.draws)
    )


def _ends(model: nn.Module, anatomy: Anatomy, order: list[str], borrowed: Container[str]) -> dict[str, Style]:
    """Styles of embeddings before the blocks and of the linear head after them.

    Not of those whose weight is `borrowed` by other code, which would find a part of it. Layers that share
    one parameter are split alike, as are those that are never called, or not at all.
    """
    inside = [i for i, name in enumerate(order) if anatomy.unit_of(name) in anatomy.blocks]
    first, final = inside[0], inside[-1]
    styles: dict[str, Style] = {}
    for index, name in enumerate(order):
        module = model.get_submodule(name)
        if name in borrowed:
            continue
        if index < first and _is_table(module) and module.padding_idx is None:
            styles[name] = "vocabulary"
        if index > final and isinstance(module, nn.Linear) and is_dense(module):
            styles[name] = "head"
    for group in _tied_layers(anatomy):
        split = [name for name in group if name in styles]
        idle = [name for name in group if name not in styles]
        if any(name in order or not isinstance(model.get_submodule(name), nn.Embedding) for name in idle):
            for name in split:
                del styles[name]
        elif split:
            styles.update(dict.fromkeys(idle, "vocabulary"))
    return styles


def _is_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    return isinstance(module, nn.Embedding) and "weight" in module._parameters


def _tied_layers(anatomy: Anatomy) -> list[list[str]]:
    """Layers that share a weight, each group once."""
    groups: dict[str, list[str]] = {}
    for one, other in anatomy.tied:
        group = groups.setdefault(one, [one.rpartition(".")[0]])
        group.append(other.rpartition(".")[0])
    return list(groups.values())


def _norms(
    model: nn.Module,
    anatomy: Anatomy,
    styles: Mapping[str, Style],
    inner: Mapping[str, Stream],
    head_norms: Sequence[str],
    traced: Trace,
) -> tuple[tuple[str, ...], str]:
    """(norms between the split parts of every block, why the sequence cannot be sharded)."""
    for name in (name for name in styles if styles[name] in ("column", "row", "attention")):
        if styles[name] == "attention":
            return (), f"{name} is an nn.MultiheadAttention, which takes its input three times"
        if anatomy.unit_of(name) not in anatomy.blocks:
            return (), f"{name} is split outside the longest row of blocks"
    for name in inner:
        parameters = (key for key, _ in model.get_submodule(name).named_parameters(prefix=name))
        owned = {*styles, *head_norms}
        if alone := next((key for key in parameters if key.rpartition(".")[0] not in owned), ""):
            return (), f"{alone} lies beside the split layers of {name}"
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
    reason = _no_row(anatomy, traced) or _tied_norm(model, anatomy, norms)
    return (() if reason else tuple(norms)), reason


def _tied_norm(model: nn.Module, anatomy: Anatomy, norms: Sequence[str]) -> str:
    """A parameter that a norm between split parts shares with what is none; empty without one."""
    known = {id(model.get_submodule(name)) for name in norms}

    def between(parameter: str) -> bool:
        owner = model.get_submodule(parameter.rpartition(".")[0])
        return id(owner) in known and anatomy.unit_of(parameter) in anatomy.blocks

    for pair in anatomy.tied:
        if between(pair[0]) != between(pair[1]):
            return f"{pair[0]} and {pair[1]} are one parameter, of a norm between split parts and of another"
    return ""


def _no_row(anatomy: Anatomy, traced: Trace) -> str:
    """Why what blocks hand on cannot lie in parts from the first to the last; empty where it can."""
    calls = [call for call in traced.calls if call.name in anatomy.blocks]
    if [call.name for call in calls] != list(anatomy.blocks):
        return f"blocks are not called once each, from {anatomy.blocks[0]} to {anatomy.blocks[-1]}"
    if traced.strayed:
        return f"what {min(traced.strayed)} gives is read by other code than the next block"
    shapes = {call.output for call in calls}
    if len(shapes) != 1 or len(next(iter(shapes)) or ()) != 3:
        return "blocks do not pass on one tensor of shape [batch, sequence, width]"
    return ""


def _mixed(
    model: nn.Module,
    anatomy: Anatomy,
    styles: Mapping[str, Style],
    inner: Mapping[str, Stream],
    traced: Trace,
    told: Callable[[str], None],
) -> str:
    """A block that beside its split parts looks at other places of the sequence; empty where none does."""
    known: set[Any] = set()
    for name in anatomy.blocks:
        block = model.get_submodule(name)
        arguments = traced.arguments[name]
        shapes = [(key, tuple(value.shape)) for key, value in block.named_parameters()]
        given = [tuple(leaf.shape) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        key = type(block), tuple(shapes), tuple(given)
        if key in known:
            continue
        known.add(key)
        told(f"trying whether {name} can have a part of the sequence")
        start = len(name) + 1
        within = {each[start:]: stream.name for each, stream in inner.items() if each.startswith(f"{name}.")}
        layers = {each[start:]: style for each, style in styles.items() if each.startswith(f"{name}.")}
        if reason := wrong_spread(block, layers, within, _stream(traced, name).name, arguments):
            return f"{name} ({type(block).__name__}): {reason}"
    return ""

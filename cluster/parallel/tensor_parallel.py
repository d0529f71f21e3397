"""Finds where a model can be split over tensor-parallel ranks, by the structure of its modules.

Within a block, a module whose linear layers all read the same input and whose last one brings the
result back to the block's width is split as a pair (Shoeybi et al. 2019, Megatron-LM, section 3): the
readers by columns, the last by rows. That covers attention and feed-forward parts; embeddings are split
over the vocabulary, the head by columns. Norms between them run on shards of the sequence (Korthikanti
et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from roundtable.cluster.parallel.anatomy import Anatomy
from roundtable.cluster.parallel.forward_trace import Trace

Style = Literal["column", "row", "vocabulary", "head"]
_HEADS = re.compile(r"(n|num)_?((kv|key_value|attention)_)?heads?|nhead|n_local_heads")
_NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class TensorParallel:
    """Which linear and embedding layers are split, and how.

    `styles` maps module names; `inner` are the modules made of split pairs, with the number of their
    positional inputs; `norms` run on sequence shards where that is possible, else `no_sequence` says why
    not. `heads` are (module, attribute) counts that each rank has its part of. `whole` says what stays
    unsplit, with the reason. `draws`: the model takes random numbers (dropout).
    """

    styles: Mapping[str, Style]
    inner: Mapping[str, int] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    heads: tuple[tuple[str, str], ...] = ()
    no_sequence: str = ""
    whole: tuple[str, ...] = ()
    draws: bool = False

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
            if style in ("column", "row") and int(size) % degree:
                return f"{name} has {int(size)} {style}s, which do not divide over tp = {degree}"
        return ""


def find_tensor_parallel(model: nn.Module, anatomy: Anatomy, traced: Trace) -> TensorParallel:
    """Finds the splits of a model, real or fake, in its blocks and one traced pass."""
    order = [call.name for call in traced.calls]
    inputs = {call.name: sum(shape is not None for shape in call.inputs) for call in traced.calls}
    styles: dict[str, Style] = {}
    inner: dict[str, int] = {}
    whole: list[str] = []
    heads: list[tuple[str, str]] = []
    for block in anatomy.blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            pair, reason = _pair(name, module, order)
            styles.update(pair)
            if pair and name != block:
                inner[name] = inputs.get(name, 1)
            if pair:
                counts = [key for key, value in vars(module).items() if _is_heads(key, value)]
                heads.extend((name, key) for key in counts)
            if reason and reason not in whole:
                whole.append(reason)
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
    )


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


def _pair(name: str, module: nn.Module, order: list[str]) -> tuple[dict[str, Style], str]:
    """(styles of the linear layers right inside a module, the reason where they cannot be split)."""
    if isinstance(module, nn.MultiheadAttention):
        return {}, "nn.MultiheadAttention keeps q, k and v in one parameter"
    linears = {f"{name}.{key}": part for key, part in module.named_children() if isinstance(part, nn.Linear)}
    called = [part for part in dict.fromkeys(order) if part in linears]
    if len(called) < 2:
        return {}, ""
    readers, last = called[:-1], called[-1]
    kind = type(module).__name__
    width = linears[readers[0]].in_features
    if any(linears[part].in_features != width for part in readers) or linears[last].out_features != width:
        return {}, f"the linear layers of {kind} are no columns followed by rows"
    if any(linears[part].out_features == 3 * linears[last].in_features for part in readers):
        return {}, f"{kind} has q, k and v in one linear layer"
    if any(linears[part].out_features > linears[last].in_features for part in readers):
        return {}, f"{kind} makes more columns than its last layer reads"
    inside = {key.rpartition(".")[0] for key, _ in module.named_parameters(prefix=name)}
    strange = sorted(part for part in inside if part not in linears and _belongs(part, name))
    own_block = any(isinstance(part, (nn.MultiheadAttention, *_NORMS)) for part in module.children())
    if strange and not own_block:
        return {}, f"{kind} has parameters besides its linear layers: {strange[0].removeprefix(name + '.')}"
    return {**dict.fromkeys(readers, "column"), last: "row"}, ""


def _belongs(part: str, name: str) -> bool:
    return part == name or part.startswith(f"{name}.")


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
    model: nn.Module, anatomy: Anatomy, styles: Mapping[str, Style], inner: Mapping[str, int], traced: Trace
) -> tuple[tuple[str, ...], str]:
    """(norms between the split parts of every block, why the sequence cannot be sharded)."""
    norms: list[str] = []
    for block in anatomy.blocks:
        module = model.get_submodule(block)
        for name, part in module.named_children():
            full = f"{block}.{name}"
            if isinstance(part, _NORMS):
                norms.append(full)
            elif full not in inner and next(part.parameters(), None) is not None:
                return (), f"{full} is neither a norm nor split"
        if any(True for _ in module.parameters(recurse=False)):
            return (), f"{block} has parameters of its own"
    shapes = {call.output for call in traced.calls if call.name in anatomy.blocks}
    if len(shapes) != 1 or len(next(iter(shapes)) or ()) != 3:
        return (), "blocks do not pass on one tensor of shape [batch, sequence, width]"
    return tuple(norms), ""

"""Tries a split of layers on small real numbers: whether the ranks' parts add up to what the whole gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from roundtable.cluster.parallel.forward_trace import quietly
from roundtable.cluster.parallel.packed_layers import spans

_RANKS = 2
_LENGTH = 16
_TOLERANCE = 1e-3
_PLAIN = (Tensor, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class LayerSplit:
    """Readers of a module's input split by columns, and a last layer split by rows; names within the module.

    `packed` are the sizes of the parts of readers that hold several; `counts` attributes that each rank has
    its part of, such as the number of heads.
    """

    readers: tuple[str, ...]
    last: str
    counts: tuple[str, ...] = ()
    packed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class _LastLayer(Exception):
    def __init__(self, output: Tensor) -> None:
        self.output = output


def wrong_split(module: nn.Module, split: LayerSplit, arguments: tuple[Any, Any]) -> str:
    """Why two ranks with their parts would not compute what the whole module does; empty where they would.

    `arguments` are those of a traced call; only their shapes count. Weights are made up, and long sequences
    cut short, so that a module of any size is tried in moments.
    """
    sizes = {key: split.packed.get(key, (linear(module, key).out_features,)) for key in split.readers}
    last = linear(module, split.last)
    numbers = [size for parts in sizes.values() for size in parts] + [last.in_features]
    numbers += [getattr(module, key) for key in split.counts]
    if odd := [number for number in numbers if number % _RANKS]:
        return f"{odd[0]} does not divide by two"
    try:
        with quietly():
            expected, found = _both(module, split, sizes, arguments)
    except Exception as error:  # noqa: BLE001 - code that wants whole layers may raise anything
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    gap = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return "" if float(gap) < _TOLERANCE else "two halves of its columns do not add up to the whole"


def _both(
    module: nn.Module, split: LayerSplit, sizes: Mapping[str, Sequence[int]], arguments: tuple[Any, Any]
) -> tuple[Tensor, Tensor]:
    """What the last layer of the whole module gives without its bias, and the sum of what the ranks' give."""
    values = _values(module)
    bias = linear(module, split.last).bias
    # Caches of earlier positions, and other objects, hold what the traced pass left in them.
    values_only = tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else None, arguments)
    for length in (_LENGTH, None):
        inputs, named = _made_up(values_only, length)
        try:
            expected = _until_last(module, values, split.last, inputs, named)
            break
        except Exception:
            if length is None:
                raise
    found = torch.zeros_like(expected)
    for rank in range(_RANKS):
        part = _part_of(module, values, split, sizes, rank)
        found += _until_last(part, {}, split.last, inputs, named)
    return (expected if bias is None else expected - values[id(bias)].detach()), found


def linear(module: nn.Module, key: str) -> nn.Linear:
    """A linear layer of a module."""
    layer = module.get_submodule(key)
    assert isinstance(layer, nn.Linear)
    return layer


def _values(module: nn.Module) -> dict[int, Tensor]:
    """Numbers for each tensor of a module, by the tensor's identity."""
    attributes = [v for part in module.modules() for v in vars(part).values() if isinstance(v, Tensor)]
    generator = torch.Generator().manual_seed(1)
    known: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers(), *attributes):
        known[id(tensor)] = _numbers(tensor, generator)
    return known


def _numbers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() == 2:
        # Windows of one row of numbers: no memory for a large matrix.
        rows, columns = tensor.shape
        row = torch.randn(rows + columns, generator=generator, dtype=torch.float64) * columns**-0.5
        made = row.unfold(0, columns, 1)[:rows]
    else:
        made = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made


def _made_up(arguments: tuple[Any, Any], length: int | None) -> tuple[Any, Any]:
    """The arguments with numbers, their sequence cut to `length`."""
    generator = torch.Generator().manual_seed(2)
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    first = next((leaf for leaf in tensors if leaf.dim() == 3), None)
    whole = 0 if first is None or length is None else first.shape[1]

    def make(tensor: Tensor) -> Tensor:
        numbers = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        made = numbers if tensor.is_floating_point() else torch.ones(tensor.shape, dtype=tensor.dtype)
        for dimension, size in enumerate(made.shape):
            last = made.dim() == 3 and dimension == 2
            if length is not None and size == whole > length and not last:
                made = made.narrow(dimension, 0, length)
        return made

    inputs, named = tree_map_only(Tensor, make, arguments)
    return inputs, named


def _until_last(
    module: nn.Module, values: dict[int, Tensor], last: str, inputs: Sequence[Any], named: Mapping[str, Any]
) -> Tensor:
    """What the last layer gives when the module is called, with these values for its tensors."""
    copied = deepcopy(module, dict(values)).eval()

    def stop(layer: nn.Module, taken: Any, output: Tensor) -> None:
        raise _LastLayer(output.detach())

    copied.get_submodule(last).register_forward_hook(stop)
    try:
        with torch.random.fork_rng(devices=[]):
            # Random numbers are alike in the whole and in its parts.
            torch.default_generator.manual_seed(1)
            copied(*inputs, **named)
    except _LastLayer as reached:
        return reached.output
    raise RuntimeError(f"{last} is not called in evaluation")


def _part_of(
    module: nn.Module,
    values: dict[int, Tensor],
    split: LayerSplit,
    sizes: Mapping[str, Sequence[int]],
    rank: int,
) -> nn.Module:
    """A rank's part of the module, as tensor parallelism would leave it."""
    part = deepcopy(module, dict(values))
    for key in split.readers:
        layer = part.get_submodule(key)
        rows = [
            row
            for first, after in spans(sizes[key])
            for row in range(
                first + rank * (after - first) // _RANKS, first + (rank + 1) * (after - first) // _RANKS
            )
        ]
        for name, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(name, nn.Parameter(parameter.detach()[rows]))
    last = linear(part, split.last)
    width = last.in_features // _RANKS
    last.weight = nn.Parameter(last.weight.detach()[:, rank * width : (rank + 1) * width])
    last.register_parameter("bias", None)
    for key in split.counts:
        setattr(part, key, getattr(part, key) // _RANKS)
    return part

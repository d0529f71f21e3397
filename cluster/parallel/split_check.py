"""Tries a split of layers on small real numbers: whether the ranks' parts add up to what the whole gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from roundtable.client.first_batch.step_memory import quietly
from roundtable.cluster.parallel.anatomy import reached_from
from roundtable.cluster.parallel.packed_layers import (
    inputs_of_layer,
    multiply_by_rows,
    outputs_of,
    spans,
    take_inputs,
    take_outputs,
)

_RANKS = 2
_LENGTH = 16
_TOLERANCE = 1e-3
_PLAIN = (Tensor, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class LayerSplit:
    """Readers of a module's input split by columns, and a last layer split by rows; names within the module.

    `packed` are the sizes of the parts of readers that hold several; `counts` attributes that each rank has
    its part of, such as the number of heads, `tables` embeddings with a number for each head, `norms` of each
    head's numbers by themselves, whose weights all heads share. `handed` heads: arguments of
    [batch, heads, ...] come as this rank's part, as other layers make them.
    """

    readers: tuple[str, ...]
    last: str
    counts: tuple[str, ...] = ()
    packed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    handed: int = 0
    norms: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """What is split by what it gives."""
        return (*self.readers, *self.tables)


class _LastLayer(Exception):
    def __init__(self, output: Tensor) -> None:
        self.output = output


def attribute(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The owner of an attribute of a module or of a part of it, and its name there."""
    owner, _, name = key.rpartition(".")
    return module.get_submodule(owner), name


def divide_count(module: nn.Module, key: str, ranks: int) -> None:
    """Leaves a module its part of a count."""
    owner, name = attribute(module, key)
    setattr(owner, name, getattr(owner, name) // ranks)


def wrong_split(module: nn.Module, split: LayerSplit, arguments: tuple[Any, Any]) -> str:
    """Why two ranks with their parts would not compute what the whole module does; empty where they would.

    `arguments` are those of a traced call; only their shapes count. Weights are made up, and long sequences
    cut short, so that a module of any size is tried in moments.
    """
    sizes = {key: split.packed.get(key, (outputs_of(module.get_submodule(key)),)) for key in split.columns}
    numbers = [size for parts in sizes.values() for size in parts]
    numbers.append(inputs_of_layer(module.get_submodule(split.last)))
    numbers += [getattr(*attribute(module, key)) for key in split.counts]
    if odd := [number for number in numbers if number % _RANKS]:
        return f"{odd[0]} does not divide by two"
    try:
        with quietly():
            expected, found = _both(module, split, sizes, arguments)
    except Exception as error:  # noqa: BLE001 - code that wants whole layers may raise anything
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    gap = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return "" if float(gap) < _TOLERANCE else "two halves of its columns do not add up to the whole"


def between(module: nn.Module, split: LayerSplit, arguments: tuple[Any, Any]) -> list[str]:
    """Parameters that what the last layer gives depends on, beside the split layers' and not by the readers.

    A rank that has some heads alone would learn such a parameter from those alone. Empty where the module
    does not run on made-up numbers.
    """
    try:
        with quietly():
            values, (inputs, named), _ = _runnable(module, split, arguments)
            copied = deepcopy(module, dict(values)).eval()
            with _detached(copied, split.readers):
                reached = reached_from(_called(copied, split.last, inputs, named))
    except Exception:  # noqa: BLE001 - as above; what does not run is not split either
        return []
    split_layers = {*split.columns, split.last}
    return [
        name
        for name, parameter in copied.named_parameters()
        if id(parameter) in reached and name.rpartition(".")[0] not in split_layers
    ]


@contextmanager
def _detached(module: nn.Module, readers: Sequence[str]) -> Iterator[None]:
    """Gradients end at the inputs of these layers."""

    def cut(layer: nn.Module, inputs: Any) -> Any:
        return tree_map_only(Tensor, Tensor.detach, inputs)

    handles = [module.get_submodule(key).register_forward_pre_hook(cut) for key in readers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _both(
    module: nn.Module, split: LayerSplit, sizes: Mapping[str, Sequence[int]], arguments: tuple[Any, Any]
) -> tuple[Tensor, Tensor]:
    """What the last layer of the whole module gives without its bias, and the sum of what the ranks' give."""
    values, (inputs, named), expected = _runnable(module, split, arguments)
    bias = getattr(module.get_submodule(split.last), "bias", None)
    found = torch.zeros_like(expected)
    for rank in range(_RANKS):
        part = _part_of(module, values, split, sizes, rank)
        mine, mine_named = _handed((inputs, named), split.handed, rank)
        found += _called(part.eval(), split.last, mine, mine_named).detach()
    return (expected if bias is None else expected - values[id(bias)].detach()), found


def _runnable(
    module: nn.Module, split: LayerSplit, arguments: tuple[Any, Any]
) -> tuple[dict[int, Tensor], tuple[Any, Any], Tensor]:
    """(values of the module's tensors, arguments, what the last layer gives), short where that runs."""
    values = _values(module)
    # Caches of earlier positions, and other objects, hold what the traced pass left in them.
    values_only = tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else None, arguments)
    made = _made_up(values_only, _LENGTH)
    try:
        return values, made, _until_last(module, values, split.last, *made)
    except Exception:  # noqa: BLE001 - it may have tables of the whole length
        made = _made_up(values_only, None)
        return values, made, _until_last(module, values, split.last, *made)


def _handed(arguments: tuple[Any, Any], heads: int, rank: int) -> tuple[Any, Any]:
    """A rank's part of the arguments that have a place for each head."""

    def mine(tensor: Tensor) -> Tensor:
        if not heads or tensor.dim() != 4 or tensor.shape[1] != heads:
            return tensor
        return tensor.narrow(1, rank * heads // _RANKS, heads // _RANKS)

    inputs, named = tree_map_only(Tensor, mine, arguments)
    return inputs, named


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
        shape = list(tensor.shape)
        for dimension, size in enumerate(shape):
            last = len(shape) == 3 and dimension == 2
            if length is not None and size == whole > length and not last:
                shape[dimension] = length
        if not tensor.is_floating_point():
            return torch.ones(shape, dtype=tensor.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs, named = tree_map_only(Tensor, make, arguments)
    return inputs, named


def _until_last(
    module: nn.Module, values: dict[int, Tensor], last: str, inputs: Sequence[Any], named: Mapping[str, Any]
) -> Tensor:
    """What the last layer gives when the module is called, with these values for its tensors."""
    return _called(deepcopy(module, dict(values)).eval(), last, inputs, named).detach()


def _called(module: nn.Module, last: str, inputs: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    multiply_by_rows(module)

    def stop(layer: nn.Module, taken: Any, output: Tensor) -> None:
        raise _LastLayer(output)

    module.get_submodule(last).register_forward_hook(stop)
    try:
        with torch.random.fork_rng(devices=[]):
            # Random numbers are alike in the whole and in its parts.
            torch.default_generator.manual_seed(1)
            module(*inputs, **named)
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
    for key in split.columns:
        take_outputs(
            part.get_submodule(key),
            [
                place
                for first, after in spans(sizes[key])
                for place in range(
                    first + rank * (after - first) // _RANKS, first + (rank + 1) * (after - first) // _RANKS
                )
            ],
        )
    last = part.get_submodule(split.last)
    width = inputs_of_layer(last) // _RANKS
    take_inputs(last, range(rank * width, (rank + 1) * width))
    if getattr(last, "bias", None) is not None:
        # A layer that always adds one adds nothing.
        last.register_parameter("bias", nn.Parameter(torch.zeros_like(last.get_parameter("bias"))))
    for key in split.counts:
        divide_count(part, key, _RANKS)
    return part


def wrong_spread(
    block: nn.Module,
    layers: Mapping[str, str],
    inner: Mapping[str, str],
    entry: str,
    arguments: tuple[Any, Any],
) -> str:
    """Why a block does with half of the sequence something else than with all of it; empty where it does not.

    `layers` are its split layers with their styles, `inner` the parts that get all of the sequence, with the
    name of that argument (empty: the first), as `entry` for the block. Dense layers copy and cut what they
    are given: what mixes or counts places beside them is what is looked for.
    """
    try:
        with quietly(), torch.no_grad():
            values = _values(block)
            values_only = tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else None, arguments)
            try:
                trial = _Spread(block, values, layers, inner, entry, _made_up(values_only, _LENGTH))
            except Exception:  # noqa: BLE001 - it may have tables of the whole length
                trial = _Spread(block, values, layers, inner, entry, _made_up(values_only, None))
            return trial.difference()
    except Exception as error:  # noqa: BLE001 - as above
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


class _Apart(Exception):
    """A part of a block got something else than its half of what it gets in the whole."""


class _Spread:
    """A block on made-up numbers, whole and on each half of the sequence, as ranks would run it."""

    def __init__(
        self,
        block: nn.Module,
        values: dict[int, Tensor],
        layers: Mapping[str, str],
        inner: Mapping[str, str],
        entry: str,
        arguments: tuple[Any, Any],
    ) -> None:
        """Runs it whole."""
        self._model = deepcopy(block, dict(values)).eval()
        self._entry = entry
        self._arguments = arguments
        self._half: int | None = None
        self._seen: list[Tensor] = []
        self._waiting: Iterator[Tensor] = iter(())
        for name, style in layers.items():
            layer: Any = self._model.get_submodule(name)
            layer.forward = partial(_copied, outputs_of(layer))
            if style == "row":
                layer.register_forward_hook(self._scattered)
        for name, key in inner.items():
            part = self._model.get_submodule(name)
            part.register_forward_pre_hook(partial(self._gathered, key), with_kwargs=True)
        self._whole = self._run()

    def difference(self) -> str:
        """What the halves differ in; empty without a difference."""
        for self._half in range(_RANKS):
            self._waiting = iter(self._seen)
            try:
                found = self._run()
            except _Apart:
                return "what its split parts get depends on other places of the sequence"
            if not _close(found, self._cut(self._whole)):
                return "what it gives depends on other places of the sequence"
        return ""

    def _run(self) -> Tensor:
        inputs, named = self._arguments
        if self._half is not None:
            inputs, named = _replaced(inputs, named, self._entry, self._cut)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1)
            output: Tensor = self._model(*inputs, **named)
        return output

    def _cut(self, whole: Tensor) -> Tensor:
        assert self._half is not None
        length = whole.shape[1] // _RANKS
        return whole.narrow(1, self._half * length, length)

    def _scattered(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output if self._half is None else self._cut(output)

    def _gathered(self, key: str, part: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        def gather(mine: Tensor) -> Tensor:
            if self._half is None:
                self._seen.append(mine)
                return mine
            whole = next(self._waiting)
            if not _close(mine, self._cut(whole)):
                raise _Apart
            return whole

        return _replaced(inputs, named, key, gather)


def _replaced(
    inputs: Any, named: Any, key: str, made: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with what `made` makes of the one of this name, or of the first."""
    if key:
        return tuple(inputs), {**named, key: made(named[key])}
    return (made(inputs[0]), *inputs[1:]), dict(named)


def _copied(outputs: int, x: Tensor) -> Tensor:
    """[..., in] → [..., outputs]: each place by itself."""
    times = -(-outputs // x.shape[-1])
    return x.repeat(*(1,) * (x.dim() - 1), times)[..., :outputs]


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max().clamp(min=1e-30))

"""Lists what a plan needs to know of a model: weights, repeated blocks, ties, what a loss depends on.

And what a forward pass changes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundtable.cluster.parallel.meta_init import plain_attributes
from roundtable.cluster.parallel.shared_batch_norm import SharedBatchNorm, batch_norms


@dataclass(frozen=True)
class Weight:
    """One parameter, counted once however many names it has."""

    name: str
    shape: tuple[int, ...]
    elements: int
    itemsize: int
    trainable: bool


@dataclass(frozen=True)
class Anatomy:
    """A model's parts.

    `blocks` are the names of its repeated parts in order, at whatever depth they lie, `units` those and the
    other parts of the modules that hold them, in the order of definition: where a pipeline may be cut.
    `tied` lists names that share a parameter, `alone` the blocks that share none with what is outside of
    them, `batch_norms` the layers that take statistics over a batch, `loose` the parameters and saved buffers
    that lie in no unit, but on a module that holds them.
    """

    weights: tuple[Weight, ...]
    buffer_bytes: int
    blocks: tuple[str, ...]
    units: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    alone: tuple[str, ...]
    batch_norms: tuple[str, ...]
    loose: tuple[str, ...]

    @cached_property
    def _units(self) -> frozenset[str]:
        return frozenset(self.units)

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return sum(weight.elements for weight in self.weights)

    def unit_of(self, name: str) -> str | None:
        """The unit in which a parameter or module lies; None for one on the model itself."""
        while name and name not in self._units:
            name = name.rpartition(".")[0]
        return name or None

    def within(self, unit: str) -> tuple[Weight, ...]:
        """The weights of a unit."""
        return tuple(weight for weight in self.weights if weight.name.startswith(f"{unit}."))


@dataclass(frozen=True)
class Rewritten:
    """A parameter (`weight`) or buffer of `module` that each forward pass in training writes to.

    `by_batch`: what is written depends on the examples or on random numbers, so that ranks write different
    values. `numbers` are those of Python that it was last computed with: of how many examples there are.
    """

    name: str
    module: str
    weight: bool
    by_batch: bool
    numbers: tuple[float, ...] = ()


def dissect(model: nn.Module) -> Anatomy:
    """The anatomy of a model, real, fake or on the meta device."""
    first: dict[int, str] = {}
    tied: list[tuple[str, str]] = []
    weights: list[Weight] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied.append((first[id(parameter)], name))
            continue
        first[id(parameter)] = name
        weights.append(
            Weight(
                name=name,
                shape=tuple(parameter.shape),
                elements=parameter.numel(),
                itemsize=parameter.element_size(),
                trainable=parameter.requires_grad,
            )
        )
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    blocks = find_blocks(model)
    units = _units(model, blocks)
    within = tuple(f"{unit}." for unit in units)
    return Anatomy(
        weights=tuple(weights),
        buffer_bytes=buffers,
        blocks=blocks,
        units=units,
        tied=tuple(tied),
        alone=standing_alone(model, blocks),
        batch_norms=batch_norms(model),
        loose=tuple(name for name in model.state_dict(keep_vars=True) if not name.startswith(within)),
    )


def standing_alone(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """The blocks that share no parameter with another part of the model."""
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(holder_of(name, blocks))
    bound = {owner for several in owners.values() if len(several) > 1 for owner in several}
    return tuple(block for block in blocks if block not in bound)


def holder_of(name: str, blocks: Sequence[str]) -> str:
    """The block that a parameter lies in; "" for the model itself."""
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


def of_two_types(anatomy: Anatomy, *, whole: bool) -> tuple[Weight, Weight] | None:
    """Two trained weights that differ in their values' bytes, of one block, or of the rest; `whole`: of the
    model.
    """
    first: dict[str, Weight] = {}
    for weight in anatomy.weights:
        if weight.trainable:
            known = first.setdefault("" if whole else holder_of(weight.name, anatomy.alone), weight)
            if known.itemsize != weight.itemsize:
                return known, weight
    return None


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the model's repeated parts: the container of equal modules that holds most parameters."""
    best: tuple[str, ...] = ()
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        runs = _runs(module)
        for run in runs:
            held = sum(p.numel() for key in run for p in module._modules[key].parameters())
            if held > most:
                best, most = tuple(f"{name}.{key}" if name else key for key in run), held
    return best


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of all repeated parts, of the encoder and of the decoder: those of `find_blocks` among them."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found):
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            found += [f"{name}.{key}" if name else key for run in _runs(module) for key in run]
    return found


def _runs(container: nn.Module) -> list[list[str]]:
    """Keys of two or more equal children in a row that are made of several parts each.

    A child that comes again under another key is the one that it was.
    """
    runs: list[list[str]] = []
    kind: type | None = None
    for key, child in container.named_children():
        compound = next(child.children(), None) is not None
        if compound and type(child) is kind:
            runs[-1].append(key)
        else:
            kind = type(child) if compound else None
            if compound:
                runs.append([key])
    return [run for run in runs if len(run) > 1]


def _units(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_parts(model, "", blocks[0].rpartition(".")[0] if blocks else None))


def _parts(module: nn.Module, name: str, holder: str | None) -> Iterator[str]:
    """The children of a module, and in the place of the one on the way to `holder` that one's."""
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        if holder is not None and (holder == full or holder.startswith(f"{full}.")):
            yield from _parts(child, full, holder)
        else:
            yield full


def reached_from(loss: Tensor) -> set[int]:
    """Identifies the parameters that the loss depends on, by the graph that its backward pass would take."""
    found, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return found


class PassWrites:
    """Follows what a pass writes to the model's own tensors, and whether that came of the batch.

    Without `fake`, where tensors take memory, nothing is followed: what is written counts as of the batch.
    """

    def __init__(self, model: nn.Module, batch: Any, *, fake: bool) -> None:
        self._model = model
        self._fake = fake
        self._names: dict[int, str] = {}
        self._buffers = {
            name: each for name, each, _ in _own_tensors(model) if not isinstance(each, nn.Parameter)
        }
        for name, tensor, _ in _own_tensors(model):
            self._names.setdefault(tensor.untyped_storage()._cdata, name)
        self._written: dict[str, bool] = {}
        self._numbers: dict[str, tuple[float, ...]] = {}
        # What was computed of the model's own tensors, kept so that no other gets its address: with numbers.
        self._computed: dict[int, tuple[Tensor, tuple[float, ...]]] = {}
        # What code has set on modules: no change where nobody reads it before it is set anew.
        self._attributes = {name: each for name, each in attributes_of(model).items() if _has_storage(each)}
        self._read: set[str] = set()
        # Storages that depend on the batch, kept so that no other gets the address of one.
        self._dependent: dict[int, Tensor] = {}
        for leaf in tree_leaves(batch):
            self._depends(leaf)
        # One that is the batch itself would be read with it.
        places = {_place(value): name for name, value in self._attributes.items()}
        self._attribute_of = {at: name for at, name in places.items() if at not in self._dependent}

    def _depends(self, value: Any) -> None:
        if isinstance(value, Tensor) and not value.is_sparse:
            self._dependent.setdefault(value.untyped_storage()._cdata, value)

    def _is_dependent(self, values: Any) -> bool:
        storages = (leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if _has_storage(leaf))
        return not self._fake or any(storage in self._dependent for storage in storages)

    def note(self, operation: Any, args: Any, kwargs: Any, output: Any, *, drawn: bool) -> None:
        """One operation, once it is done; `drawn`: it took random numbers."""
        dependent = drawn or self._is_dependent((args, kwargs))
        given = tree_leaves((args, kwargs))
        storages = [leaf.untyped_storage()._cdata for leaf in given if _has_storage(leaf)]
        self._read.update(self._attribute_of[each] for each in storages if each in self._attribute_of)
        numbers = tuple(leaf for leaf in given if isinstance(leaf, (int, float)))
        if any(each in self._names or each in self._attribute_of for each in storages) and not dependent:
            for leaf in filter(_has_storage, tree_leaves(output)):
                self._computed[leaf.untyped_storage()._cdata] = leaf, numbers
        if self._fake and dependent:
            # What normalises over a batch writes its statistics, and its schema does not say so.
            written = args[3:5] if "batch_norm" in operation._schema.name else ()
            for leaf in tree_leaves((output, written)):
                self._depends(leaf)
        for place, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(given):
                if not _has_storage(leaf):
                    continue
                if self._fake and dependent:
                    self._depends(leaf)
                place = leaf.untyped_storage()._cdata
                name = self._names.get(place) or self._attribute_of.get(place)
                if name is not None:
                    self._written[name] = self._written.get(name, False) or dependent
                    self._numbers[name] = numbers

    def found(self) -> tuple[Rewritten, ...]:
        """What was written to, and buffers with another tensor in their place.

        So are attributes that a pass reads and sets anew, such as the state of a recurrent model.
        """
        result = []
        for name, tensor, module in _own_tensors(self._model):
            replaced = name in self._buffers and self._buffers[name] is not tensor
            if name in self._written or replaced:
                by_batch = self._written.get(name, False) or (replaced and self._is_dependent(tensor))
                numbers = self._computed[_place(tensor)][1] if _place(tensor) in self._computed else ()
                numbers = self._numbers.get(name, numbers)
                weight = isinstance(tensor, nn.Parameter)
                result.append(Rewritten(name, module, weight, by_batch, numbers))
        for name, value in attributes_of(self._model).items():
            if name in self._written or (name in self._read and self._attributes[name] is not value):
                numbers = self._computed[_place(value)][1] if _place(value) in self._computed else ()
                by_batch = self._written.get(name, False) or self._is_dependent(value)
                numbers = self._numbers.get(name, numbers)
                result.append(Rewritten(name, name.rpartition(".")[0], False, by_batch, numbers))
        return tuple(result)


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Numbers and tensors that code has set on modules, by name."""
    return {
        f"{module}.{key}" if module else key: value
        for module, part in model.named_modules()
        for key, value in plain_attributes(part)
        if type(value) in (int, float) or isinstance(value, Tensor)
    }


def _place(value: object) -> int:
    return value.untyped_storage()._cdata if _has_storage(value) else 0


def _has_storage(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_sparse


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """(name, tensor, module) of parameters and buffers, but for those of shared batch normalisation."""
    for module, part in model.named_modules():
        prefix = f"{module}." if module else ""
        for own in (part._parameters, part._buffers):
            for key, tensor in own.items():
                if tensor is not None and not (own is part._buffers and isinstance(part, SharedBatchNorm)):
                    yield prefix + key, tensor, module

"""The one flat float32 vector that a model is, and where each tensor lies in it.

Clipping, noise, masks, compression, robust rules, server optimizers and transfer all work on that
vector. A `Layout` says which tensors of a state dict it holds, in which order, and what happens to
the others: every tensor has a rule, `average`, `local`, `drop` or `frozen`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

import torch
from blake3 import blake3
from torch import Tensor, nn

from roundtable.core.errors import LayoutError
from roundtable.core.tensor_spec import (
    BESIDE,
    DTYPES,
    Kind,
    Rule,
    TensorSpec,
    check_name,
    check_number,
    digest_of_values,
    read_specs,
    write_specs,
)

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PLACE = "algorithm/"
_BASIS = "transfer/basis"
_DOWN_ALONE = ("told", "transfer")


@dataclass(frozen=True)
class LayoutRules:
    """What travels, by kind of tensor; the job's `[model]` table.

    Floating-point buffers (BatchNorm statistics) are averaged by default. Integer and boolean
    buffers (BatchNorm's counter) stay at the silo by default: their mean has no meaning. `local`
    and `drop` are shell patterns over tensor names and win over the kind; parameters that match
    `local` never travel (FedPer, Arivazhagan et al. 2019; FedBN, Li et al. 2021).

    A frozen parameter, one that the task's model has with `requires_grad` false, does not travel under
    `travel` "trainable": every party makes it itself, and the layout holds the digest of its values. Of what
    is not frozen only what a pattern of `only` fits travels, if there is any; the rest stays local. Buffers
    are never frozen: BatchNorm's statistics move in training, whoever trains its weights.
    """

    buffers: Rule = "average"
    integers: Rule = "local"
    local: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    travel: Literal["trainable", "all"] = "trainable"
    only: tuple[str, ...] = ()

    def rule_for(self, name: str, kind: Kind, dtype: torch.dtype, frozen: bool = False) -> Rule:
        """The rule for one tensor; `frozen` says that training leaves it as it is."""
        if any(fnmatchcase(name, pattern) for pattern in self.drop):
            return "drop"
        if any(fnmatchcase(name, pattern) for pattern in self.local):
            return "local"
        left_out = bool(self.only) and not any(fnmatchcase(name, pattern) for pattern in self.only)
        if frozen and (left_out or self.travel == "trainable"):
            return "frozen"
        if left_out:
            return "local"
        if not dtype.is_floating_point:
            return self.integers
        return self.buffers if kind == "buffer" else "average"


@dataclass(frozen=True)
class Layout:
    """Names, shapes, dtypes, rules and offsets; `size` float32 elements in all."""

    tensors: tuple[TensorSpec, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        check_number(len(self.tensors))
        object.__setattr__(self, "size", sum(spec.size for spec in self.averaged))

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Tensor], rules: LayoutRules | None = None) -> Layout:
        """The layout of a module or of a state dict (all entries of which count as parameters).

        Raises LayoutError for a tensor whose dtype cannot be carried and for entries that are no tensors.
        """
        rules = rules or LayoutRules()
        state = carried_state(model)
        parameters = (
            dict(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else None
        )
        specs: list[TensorSpec] = []
        seen: dict[tuple[Any, ...], str] = {}
        rules_of: dict[str, Rule] = {}
        offset = 0
        for name, tensor in state.items():
            kind: Kind = "parameter" if parameters is None or name in parameters else "buffer"
            frozen = parameters is not None and kind == "parameter" and not parameters[name].requires_grad
            rule = rules.rule_for(name, kind, tensor.dtype, frozen)
            identity = _identity(tensor)
            alias = seen.get(identity) if identity else None
            if alias is not None and rules_of[alias] != rule:
                raise LayoutError(
                    f"tensors {alias!r} and {name!r} share their memory but have the rules "
                    f"{rules_of[alias]!r} and {rule!r}; give both the same in [model]"
                )
            rules_of[name] = rule
            place = offset if rule == "average" and alias is None else -1
            digest = digest_of_values(tensor) if rule == "frozen" and alias is None else None
            dtype = _DTYPE_NAMES[tensor.dtype]
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype, kind, rule, place, alias, digest))
            if place >= 0:
                offset += tensor.numel()
            if identity and alias is None:
                seen[identity] = name
        return cls(tuple(specs))

    @cached_property
    def averaged(self) -> tuple[TensorSpec, ...]:
        """The tensors that have a place in the vector, in order."""
        return tuple(spec for spec in self.tensors if spec.offset >= 0)

    @cached_property
    def frozen(self) -> tuple[TensorSpec, ...]:
        """The tensors that every party makes itself, each under its first name, in order."""
        return tuple(spec for spec in self.tensors if spec.rule == "frozen" and spec.alias_of is None)

    @cached_property
    def model(self) -> Layout:
        """The part that is the model: this layout, unless an algorithm has places behind it."""
        if not any(spec.kind in BESIDE for spec in self.tensors):
            return self
        return Layout(tuple(spec for spec in self.tensors if spec.kind not in BESIDE))

    @cached_property
    def sent(self) -> Layout:
        """The part that an update has, always a first part: without what only the server sends."""
        if not any(spec.kind in _DOWN_ALONE for spec in self.tensors):
            return self
        return Layout(tuple(spec for spec in self.tensors if spec.kind not in _DOWN_ALONE))

    @cached_property
    def places(self) -> dict[str, slice]:
        """The algorithm's vectors behind the model by name: where each lies in the flat vector."""
        return {
            spec.name.removeprefix(_PLACE): slice(spec.offset, spec.offset + spec.size)
            for spec in self.tensors
            if spec.kind in BESIDE and spec.kind != "transfer"
        }

    @cached_property
    def basis(self) -> slice:
        """Where the basis lies that all silos take the factors of their updates by: at the vector's end."""
        size = sum(spec.size for spec in self.tensors if spec.kind == "transfer")
        return slice(self.size - size, self.size)

    def with_places(
        self, shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, tuple[int, ...]] | None = None
    ) -> Layout:
        """The layout of this model's vector with further vectors of these names and shapes behind it.

        Those that are only `told` to clients come last.
        """
        specs, offset = list(self.tensors), self.size
        kinds: list[tuple[Kind, Mapping[str, tuple[int, ...]]]] = [
            ("algorithm", shapes),
            ("told", told or {}),
        ]
        for kind, name, shape in ((kind, *item) for kind, group in kinds for item in group.items()):
            specs.append(TensorSpec(_PLACE + name, shape, "float32", kind, "average", offset))
            offset += specs[-1].size
        return Layout(tuple(specs))

    def with_basis(self, size: int) -> Layout:
        """This layout with such a basis of so many values behind all else."""
        basis = TensorSpec(_BASIS, (size,), "float32", "transfer", "average", self.size)
        return Layout((*self.tensors, basis))

    @cached_property
    def fingerprint(self) -> str:
        """BLAKE3 of the canonical description: two parties with equal fingerprints mean the same vector."""
        return blake3(self.to_json().encode()).hexdigest()

    def flatten(self, state: nn.Module | Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """The vector of `state`: float32, shape [size], on CPU unless `out` says otherwise.

        A state that `unflatten` made out of one vector gives back that vector without a copy, if
        `out` is not given. Raises LayoutError where names or shapes differ.
        """
        values = _state_of(state)
        self.check(values)
        if out is None:
            whole = self._backing(values)
            if whole is not None:
                return whole
            out = torch.empty(self.size, dtype=torch.float32)
        elif out.shape != (self.size,) or out.dtype != torch.float32:
            raise LayoutError(
                f"out must be float32 of shape [{self.size}], not {out.dtype} {list(out.shape)}"
            )
        for spec in self.averaged:
            out[spec.offset : spec.offset + spec.size].view(spec.shape).copy_(values[spec.name].detach())
        return out

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Name → tensor; float32 tensors are views into `vector`, the others are converted copies.

        Integers are rounded to the nearest, booleans are true from one half upwards. Aliases appear
        beside the tensor they share; tensors whose rule is not `average` do not appear.
        """
        if vector.shape != (self.size,) or vector.dtype != torch.float32:
            given = f"{vector.dtype} {list(vector.shape)}"
            raise LayoutError(f"a vector of this layout is float32 of shape [{self.size}], not {given}")
        state: dict[str, Tensor] = {}
        for spec in self.tensors:
            if spec.offset >= 0:
                view = vector[spec.offset : spec.offset + spec.size].view(spec.shape)
                state[spec.name] = _from_float32(view, DTYPES[spec.dtype])
            elif spec.alias_of in state:
                state[spec.name] = state[spec.alias_of]
        return state

    def load(self, model: nn.Module, vector: Tensor) -> None:
        """Copies the vector into the module; what has no place in the vector stays as it is."""
        own = _state_of(model)
        self.check(own)
        with torch.no_grad():
            for name, value in self.unflatten(vector).items():
                own[name].copy_(value)

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raises LayoutError, naming the first difference, if `state` has other names or shapes."""
        expected = {spec.name: spec for spec in self.tensors}
        optional = ("drop", "frozen")
        missing = [n for n in expected if n not in state and expected[n].rule not in optional]
        extra = [name for name in state if name not in expected]
        if missing or extra:
            raise LayoutError(
                f"the model's tensors differ from the layout's: missing {missing[:5]}, "
                f"unexpected {extra[:5]}; the task's code is not the one the job was made with"
            )
        for name, tensor in state.items():
            if tuple(tensor.shape) != expected[name].shape:
                shape = list(expected[name].shape)
                raise LayoutError(f"tensor {name!r} has shape {list(tensor.shape)}, the layout says {shape}")

    def check_frozen(self, state: Mapping[str, Tensor]) -> None:
        """Raises LayoutError, naming the first, for a frozen tensor of `state` with other values."""
        for spec in self.frozen:
            if spec.name in state and digest_of_values(state[spec.name]) != spec.digest:
                raise LayoutError(
                    f"tensor {spec.name!r} is frozen and has other values than the job's: frozen weights do "
                    "not travel, every party makes them itself. Install the version of the task, and of the "
                    "pretrained weights that it loads, that the job was made with; or set [model] "
                    'travel = "all"'
                )

    def slices(self) -> list[tuple[str, slice]]:
        """(name, place in the vector) of each tensor in the vector: for per-layer clipping."""
        return [(spec.name, slice(spec.offset, spec.offset + spec.size)) for spec in self.averaged]

    def to_json(self) -> str:
        """Canonical JSON: the same layout gives the same bytes."""
        return write_specs(self.tensors)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` described; LayoutError for any other text, which may be hostile."""
        return cls(read_specs(text))

    def _backing(self, values: Mapping[str, Tensor]) -> Tensor | None:
        """The vector that all averaged tensors of `values` are consecutive views of, if there is one."""
        base: Tensor | None = None
        for spec in self.averaged:
            value = values[spec.name]
            if value.dtype != torch.float32 or not value.is_contiguous() or value.device.type != "cpu":
                return None
            # Only views count: a lone flat parameter must be copied, or the vector would follow training.
            base = value._base if base is None else base
            if (
                base is None
                or value._base is not base
                or value.storage_offset() - base.storage_offset() != spec.offset
            ):
                return None
        if base is None or base.dim() != 1 or base.numel() != self.size or base.requires_grad:
            return None
        return base


def carried_state(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a module, with or without values, or a copy of one.

    Raises LayoutError for a name, an entry or a dtype that no layout has.
    """
    state = _state_of(source)
    check_number(len(state))
    for name, tensor in state.items():
        check_name(name)
        if tensor.dtype not in _DTYPE_NAMES:
            instead = "its real and imaginary parts (torch.view_as_real), or " if tensor.is_complex() else ""
            raise LayoutError(
                f"tensor {name!r} has dtype {tensor.dtype}, which cannot be carried; use {instead}"
                f"one of {', '.join(DTYPES)}, or register it as a non-persistent buffer"
            )
    return state


def _state_of(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = source.state_dict(keep_vars=True) if isinstance(source, nn.Module) else dict(source)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise LayoutError(f"entry {name!r} of the state dict is a {type(value).__name__}, not a tensor")
    return state


def _identity(tensor: Tensor) -> tuple[Any, ...] | None:
    """Equal for tensors that are the same memory seen the same way; None where that cannot be told."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return ("object", id(tensor)) if tensor.device.type == "meta" else None
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _from_float32(view: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return view
    if dtype == torch.bool:
        return view >= 0.5
    if dtype.is_floating_point:
        return view.to(dtype)
    info = torch.iinfo(dtype)
    # The largest int64 has no double of its own: the next one above it would wrap around.
    largest = min(info.max, 2**63 - 1024)
    return view.double().round().clamp(info.min, largest).to(dtype)

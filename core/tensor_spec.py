"""One tensor of a layout, and the text that a list of them is written as.

    {"format":1,"tensors":[ROW,ROW,...]}     no space anywhere
    ROW   [name, shape, dtype, kind, rule, offset, alias], of a frozen tensor with its values' digest behind

There is one way to write a list. Whoever reads one takes a row after the other, each matched and bounded
before it is parsed, and stops at the first that is none: a text of somebody else costs no more than the rows
that it holds, and rows are counted. Known models have up to 40,000 tensors (mixtures of experts).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import torch
from blake3 import blake3
from torch import Tensor

from roundtable.core.errors import LayoutError

Rule = Literal["average", "local", "drop", "frozen"]
"""`frozen`: every party makes the tensor itself, with the values whose digest is in the layout."""
Kind = Literal["parameter", "buffer", "algorithm", "told", "transfer"]
"""What a tensor is to the model; `algorithm`: nothing, it is a vector that an algorithm sends beside it;
`told`: one that the server alone sends, and no update holds; `transfer`: what the server alone sends for the
encoding of updates."""
BESIDE = ("algorithm", "told", "transfer")
"""Kinds that lie behind the model, in this order."""

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
MAX_TENSORS = 1 << 16
MAX_NAME = 512
_MAX_ELEMENTS = 1 << 48
_OPENING, _CLOSING = '{"format":1,"tensors":[', "]}"
_TEXT = rf'"(?:[^"\\]|\\.){{0,{MAX_NAME}}}"'
_NUMBER, _WORD = "(?:0|[1-9][0-9]{0,14})", '"[a-z0-9]{1,16}"'
_ROW = re.compile(
    rf"\[{_TEXT},\[(?:{_NUMBER}(?:,{_NUMBER}){{0,63}})?\],{_WORD},{_WORD},{_WORD},-?{_NUMBER},(?:null|{_TEXT})"
    r'(?:,"[0-9a-f]{64}")?\]'
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its place in the vector is `offset .. offset + size` if its rule is `average`.

    `alias_of` names the tensor whose storage this one shares (tied weights); it then takes no
    place of its own. Offsets count float32 elements; −1 means not in the vector. `digest` is that of a
    frozen tensor's values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    rule: Rule
    offset: int = -1
    alias_of: str | None = None
    digest: str | None = None

    @property
    def size(self) -> int:
        """Number of elements; 1 for shape `()`."""
        return prod(self.shape)

    def same_memory(self, other: TensorSpec) -> bool:
        """Whether `other` can be another name of this tensor."""
        return (self.shape, self.dtype, self.rule) == (other.shape, other.dtype, other.rule)


def write_specs(specs: Iterable[TensorSpec]) -> str:
    """The tensors as text: the same list gives the same characters."""
    rows = (
        [s.name, s.shape, s.dtype, s.kind, s.rule, s.offset, s.alias_of, *([s.digest] if s.digest else [])]
        for s in specs
    )
    return _OPENING + ",".join(map(_compact, rows)) + _CLOSING


def read_specs(text: str) -> tuple[TensorSpec, ...]:
    """The tensors that `write_specs` wrote; LayoutError for any other text, which may be hostile."""
    try:
        specs = tuple(_spec_from_row(json.loads(row)) for row in _rows(text))
    except ValueError as error:
        raise LayoutError(f"the layout's description cannot be read: {error}") from error
    _check_places(specs)
    return specs


def digest_of_values(tensor: Tensor) -> str:
    """BLAKE3 of a tensor's values in its own dtype, in the order of its shape."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return blake3(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()


def check_number(tensors: int) -> None:
    """LayoutError for more tensors than a layout can have."""
    if tensors > MAX_TENSORS:
        raise LayoutError(f"a layout of {tensors} tensors is beyond the limit of {MAX_TENSORS}")


def check_name(name: Any) -> None:
    """LayoutError for what a file of safetensors cannot hold as a name, such as half a surrogate pair, which
    JSON can spell, and for a name that is too long."""
    if not isinstance(name, str) or not name.isprintable() or name == "__metadata__":
        raise LayoutError(f"{name!r} cannot be the name of a tensor")
    if len(name) > MAX_NAME:
        raise LayoutError(
            f"the tensor's name {name[:40]!r}… has {len(name)} characters; {MAX_NAME} at most can be"
        )


def _rows(text: str) -> Iterator[str]:
    """Each row's text, as far as the text is a list of rows; LayoutError at its first other character."""
    if not text.startswith(_OPENING):
        raise LayoutError(
            f"the layout's description begins with {text[:30]!r}; format 1 begins with {_OPENING!r}"
        )
    place, number = len(_OPENING), 0
    while not text.startswith(_CLOSING, place):
        check_number(number + 1)
        row = _ROW.match(text, place + (number > 0))
        if row is None or (number and text[place] != ","):
            shown = text[place : place + 40]
            raise LayoutError(f"the layout's description cannot be read behind {number} tensors: {shown!r}")
        yield row[0]
        place, number = row.end(), number + 1
    if len(text) != place + len(_CLOSING):
        raise LayoutError("the layout's description goes on after its end")


def _spec_from_row(row: Iterable[Any]) -> TensorSpec:
    name, shape, dtype, kind, rule, offset, alias, *digest = row
    check_name(name)
    # Without its zeros: a tensor of no elements has strides, too.
    if prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise LayoutError(f"tensor {name!r} has an impossible shape {shape!r}")
    if dtype not in DTYPES or kind not in get_args(Kind) or rule not in get_args(Rule):
        raise LayoutError(
            f"tensor {name!r} has an unknown dtype, kind or rule: {dtype!r}, {kind!r}, {rule!r}"
        )
    return TensorSpec(name, tuple(shape), dtype, kind, rule, offset, alias, *digest)


def _check_places(specs: tuple[TensorSpec, ...]) -> None:
    """Offsets follow each other without gap or overlap; aliases point backwards at an equal tensor."""
    seen: dict[str, TensorSpec] = {}
    offset = 0
    for spec in specs:
        if spec.name in seen:
            raise LayoutError(f"tensor {spec.name!r} is described twice")
        if spec.alias_of is not None:
            target = seen.get(spec.alias_of)
            if target is None or spec.offset != -1 or not target.same_memory(spec):
                raise LayoutError(
                    f"tensor {spec.name!r} claims to share {spec.alias_of!r}, which does not fit"
                )
        elif spec.rule == "average":
            if spec.offset != offset:
                raise LayoutError(f"tensor {spec.name!r} lies at {spec.offset}, expected {offset}")
            offset += spec.size
            if offset > _MAX_ELEMENTS:
                raise LayoutError(f"a vector of {offset} elements is beyond the limit of {_MAX_ELEMENTS}")
        elif spec.offset != -1:
            raise LayoutError(f"tensor {spec.name!r} does not travel but has a place at {spec.offset}")
        if (spec.digest is not None) != (spec.rule == "frozen" and spec.alias_of is None):
            raise LayoutError(
                f"tensor {spec.name!r} is frozen without a digest of its values, or has one in vain"
            )
        _check_beside(spec, next(reversed(seen.values())).kind if seen else "parameter")
        seen[spec.name] = spec


def _check_beside(spec: TensorSpec, last: Kind) -> None:
    """What goes along beside the model lies behind it, as float32; what only the server sends, last."""
    if spec.kind in BESIDE and (spec.rule, spec.dtype, spec.alias_of) != (
        "average",
        "float32",
        None,
    ):
        raise LayoutError(f"{spec.name!r} is an algorithm's vector and does not travel as float32")
    if last in BESIDE and spec.kind not in BESIDE:
        raise LayoutError(f"tensor {spec.name!r} of the model lies behind an algorithm's vector")
    if last in BESIDE and BESIDE.index(spec.kind) < BESIDE.index(last):
        raise LayoutError(f"{spec.name!r} ({spec.kind}) lies behind what only the server sends ({last})")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

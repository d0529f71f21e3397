"""Puts the stages of a chain together, for a layout: the encodings by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from pydantic import ValidationError

from roundtable.core.encodings.block_integers import BlockIntegers, IntegerTable, Qsgd, QsgdTable
from roundtable.core.encodings.block_tables import BlockTable
from roundtable.core.encodings.chain import StageText, parse_chain
from roundtable.core.encodings.codec import Codec, CodecEncoding
from roundtable.core.encodings.composed.common_rank import CommonRank
from roundtable.core.encodings.composed.fragments import STAGE, Fragmented, FragmentTable
from roundtable.core.encodings.composed.low_rank import LowRank, LowRankTable
from roundtable.core.encodings.composed.multi_level import MultiLevel, MultiLevelTable
from roundtable.core.encodings.composed.packing import Packed, ZstdTable
from roundtable.core.encodings.dense import Dense, NoParameters
from roundtable.core.encodings.encoding import Encoding
from roundtable.core.encodings.foreign.foreign_codec import ENTRY_POINT_GROUP, find_codec, is_foreign
from roundtable.core.encodings.signs import Signs
from roundtable.core.encodings.sparse import LargestValues, RandomK, RandomKTable, TopKTable
from roundtable.core.encodings.tables4 import Table4
from roundtable.core.encodings.uneven_levels import NaturalPowers, Range, RangeTable
from roundtable.core.errors import EncodingError
from roundtable.core.toml_tables import Table

T = TypeVar("T", bound=Table)


class _CodecKind(NamedTuple):
    """A stage by name: its parameters, and what makes it of them."""

    table: type[Table]
    make: Callable[..., Codec]


CODECS: dict[str, _CodecKind] = {
    "float32": _CodecKind(NoParameters, lambda table: Dense(torch.float32)),
    "bfloat16": _CodecKind(NoParameters, lambda table: Dense(torch.bfloat16)),
    "float16": _CodecKind(NoParameters, lambda table: Dense(torch.float16)),
    "nf4": _CodecKind(BlockTable, lambda table: Table4("nf4", table)),
    "fp4": _CodecKind(BlockTable, lambda table: Table4("fp4", table)),
    "sign": _CodecKind(BlockTable, Signs),
    "qsgd": _CodecKind(QsgdTable, Qsgd),
    "natural": _CodecKind(NoParameters, lambda table: NaturalPowers()),
    "minmax": _CodecKind(RangeTable, Range),
    "int8": _CodecKind(IntegerTable, lambda table: BlockIntegers(8, table)),
    "int4": _CodecKind(IntegerTable, lambda table: BlockIntegers(4, table)),
    "int2": _CodecKind(IntegerTable, lambda table: BlockIntegers(2, table)),
}


def low_rank(chain: str, table: LowRankTable, codec: Codec) -> Encoding:
    """Factors by each client's own basis, or by that of the cohort."""
    return (CommonRank if table.basis == "cohort" else LowRank)(chain, table, codec)


CHOOSING: dict[str, tuple[Callable[..., Encoding], type[Table]]] = {
    "topk": (LargestValues, TopKTable),
    "randomk": (RandomK, RandomKTable),
    "lowrank": (low_rank, LowRankTable),
}


PACKING = "zstd"
BY_TENSOR = "multilevel"
_BUILT_IN = (*CODECS, *CHOOSING, BY_TENSOR, PACKING, STAGE)


def canonical(chain: object) -> str:
    """The text of a chain as it travels and is compared; ValueError that says what is wrong with it.

    Code of others is not run for it.
    """
    text = " | ".join(str(stage) for stage in parse_chain(chain))
    try:
        get_encoding(built_in(text))
    except EncodingError as error:
        raise ValueError(str(error)) from error
    return text


def built_in(chain: str) -> str:
    """The chain with float32 in the place of code of others: what can be said of it without running that."""
    stages = parse_chain(chain)
    return " | ".join("float32" if _may_be_foreign(stage.name) else str(stage) for stage in stages)


def foreign_stages(chain: str) -> list[str]:
    """The stages that are code of others, by name; nothing of it is run."""
    return [stage.name for stage in parse_chain(chain) if _may_be_foreign(stage.name)]


def _may_be_foreign(name: str) -> bool:
    return name not in _BUILT_IN and is_foreign(name)


@functools.lru_cache(maxsize=64)
def get_encoding(chain: str, folder: Path | None = None) -> Encoding:
    """The encoding that a chain means; EncodingError that names the stage and what would be right.

    Code of others is looked for in `folder` if it is a file, which None refuses; ConfigError where it cannot
    be used.
    """
    try:
        stages = parse_chain(chain)
    except ValueError as error:
        raise EncodingError(str(error)) from error
    *before, last = stages
    if stages[0].name == STAGE:
        inner = " | ".join(map(str, stages[1:])) or "float32"
        return Fragmented(chain, parameters(stages[0], FragmentTable), get_encoding(inner, folder))
    if any(stage.name == STAGE for stage in stages):
        raise EncodingError(f"{STAGE} goes first: what follows it writes a fragment's values")
    if any(stage.name == PACKING for stage in before):
        raise EncodingError(f"{PACKING} goes last: it packs what the others have written")
    if last.name == PACKING:
        return _packed(chain, before, last, folder)
    first, *rest = stages
    if first.name == BY_TENSOR:
        if rest:
            raise EncodingError(f"{rest[0].name!r} cannot follow {BY_TENSOR}, which writes its values itself")
        return MultiLevel(chain, parameters(first, MultiLevelTable))
    codecs = [_codec(stage, folder) for stage in rest]
    if first.name in CHOOSING:
        if len(codecs) > 1:
            raise EncodingError(f"{rest[1].name!r} cannot follow {rest[0].name!r}")
        kind, table = CHOOSING[first.name]
        return kind(chain, parameters(first, table), codecs[0] if codecs else Dense(torch.float32))
    if rest:
        raise EncodingError(
            f"{rest[0].name!r} cannot follow {first.name!r}: values are quantised once; what goes before "
            f"is one of {', '.join(CHOOSING)}"
        )
    return CodecEncoding(chain, _codec(first, folder))


def _packed(chain: str, before: Sequence[StageText], stage: StageText, folder: Path | None) -> Packed:
    if not before:
        raise EncodingError(
            f"{PACKING} packs what a chain writes: put one before it, like bfloat16 | {PACKING}"
        )
    inner = get_encoding(" | ".join(str(each) for each in before), folder)
    dense = inner.codec.dense_dtype if isinstance(inner, CodecEncoding | LowRank) else None
    return Packed(chain, parameters(stage, ZstdTable), inner, 1 if dense is None else dense.itemsize)


def _codec(stage: StageText, folder: Path | None) -> Codec:
    kind = CODECS.get(stage.name)
    if kind is None and is_foreign(stage.name):
        return find_codec(stage.name, stage.given, folder)
    if kind is None:
        if stage.name in CHOOSING:
            raise EncodingError(f"{stage.name!r} chooses what is sent, and goes before what writes it")
        raise EncodingError(
            f"unknown encoding {stage.name!r}; known: {', '.join(_BUILT_IN)}; those of others are "
            f"file.py:Class, or installed as an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    return kind.make(parameters(stage, kind.table))


def parameters(stage: StageText, table: type[T]) -> T:
    """The checked parameters of a stage; EncodingError that names the wrong one."""
    try:
        return table.model_validate(dict(stage.given))
    except ValidationError as error:
        raise EncodingError(f"{stage.name}: {_said(error.errors(), table)}") from None


def _said(errors: Sequence[object], table: type[Table]) -> str:
    first = errors[0]
    assert isinstance(first, dict)
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(table.model_fields)
        return f"it has no parameter {key!r}" + (f"; known: {known}" if known else "; it takes none")
    return f"{key} = {first['input']!r}: {str(first['msg']).removeprefix('Value error, ')}"

"""Codecs of others: an installed package's, or a file's beside the job. Tried once before anything uses them.

A silo runs one, and a coordinator decodes with it, only where its people have named it with the hash of the
code that they read. Whatever it decodes is checked: the bytes are exactly as many as it says of the values
that are due, and each value is finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.chain import Value
from roundtable.core.encodings.codec import Codec
from roundtable.core.encodings.encoding import GRID, Traits
from roundtable.core.errors import ConfigError, EncodingError, RoundtableError
from roundtable.core.plugins.calls import check_methods, create, place_of
from roundtable.core.plugins.doors import foreign_frames, is_file, names, resolve

ENTRY_POINT_GROUP = "roundtable.encodings"
_METHODS = {"size": ("count",), "encode": ("values", "first", "key"), "decode": ("data", "out")}
_KEY = 0x5EED


class ForeignCodec(Codec):
    """Somebody else's codec, whose every answer is checked."""

    def __init__(self, name: str, inner: Codec) -> None:
        self._reference = f"encoding {name!r}"
        self._inner = inner
        self.unit = self._whole("unit", inner.unit, 1, GRID)
        if GRID % self.unit:
            raise EncodingError(f"{self._reference}: its unit is {self.unit}, which does not divide {GRID}")
        self.traits = inner.traits
        if not isinstance(self.traits, Traits):
            raise EncodingError(
                f"{self._reference}: its traits are a {type(self.traits).__name__}, not roundtable.Traits, "
                "by which masks, noise, rules and feedback know what it does"
            )

    @override
    def size(self, count: int) -> int:
        with self._called("size"):
            size = self._inner.size(count)
        return self._whole("size", size, 0, 64 * (count + self.unit))

    @override
    def encode(self, values: Tensor, first: int, key: int) -> np.ndarray:
        if not bool(torch.isfinite(values).all()):
            raise EncodingError(f"a value of the update from {first} on is not finite")
        with self._called("encode"):
            data = self._inner.encode(values, first, key)
        expected = self.size(len(values))
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (expected,):
            got = f"{data.dtype} {list(data.shape)}" if isinstance(data, np.ndarray) else type(data).__name__
            raise EncodingError(f"{self._reference}: encode returned {got}, not uint8 [{expected}]")
        return np.ascontiguousarray(data)

    @override
    def decode(self, data: memoryview, out: Tensor) -> None:
        if len(data) != self.size(len(out)):
            raise EncodingError(f"{len(data)} bytes for {len(out)} values")
        # What it leaves out must not be what lay there before: another silo's values.
        out.fill_(torch.nan)
        with self._called("decode"):
            self._inner.decode(data.toreadonly(), out)
        if not bool(torch.isfinite(out).all()):
            raise EncodingError(f"{self._reference}: a decoded value is left out, NaN or infinite")

    def _whole(self, what: str, value: object, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise EncodingError(f"{self._reference}: its {what} is {value!r}, not from {least} to {most}")
        return value

    @contextmanager
    def _called(self, method: str) -> Iterator[None]:
        """Its exceptions become EncodingError without their words, which may quote somebody's values."""
        try:
            yield
        except RoundtableError:
            raise
        except Exception as error:
            frames = foreign_frames(error)
            place = f" ({frames[-1].place})" if frames else ""
            raise EncodingError(
                f"{self._reference}: {method} raised {type(error).__name__}{place}"
            ) from error


def find_codec(name: str, parameters: Mapping[str, Value], folder: Path | None) -> ForeignCodec:
    """Somebody else's codec of this name, with the parameters of its stage, tried once.

    `folder` is where `file.py:Class` is looked for; None refuses files. Raises ConfigError where there is
    none, or where it does not do what is asked of one.
    """
    try:
        return _found(name, parameters, folder)
    except ConfigError as error:
        error.key = ()  # Whether `up` or `down` names it, whoever asked knows.
        raise


def _found(name: str, parameters: Mapping[str, Value], folder: Path | None) -> ForeignCodec:
    reference = f"encoding {name!r}"
    kind = resolve("encoding", name, {}, ENTRY_POINT_GROUP, folder)
    if not (isinstance(kind, type) and issubclass(kind, Codec)):
        raise ConfigError(f"{reference}{place_of(kind)} is not a subclass of roundtable.Codec")
    check_methods(reference, kind, _METHODS)
    inner = create(reference, kind, parameters, ())
    if lacking := [each for each in ("unit", "traits") if not hasattr(inner, each)]:
        raise ConfigError(f"{reference}{place_of(kind)} has no {' and no '.join(lacking)}")
    try:
        codec = ForeignCodec(name, inner)
        _try(codec, reference)
    except EncodingError as error:
        raise ConfigError(f"{error}{place_of(kind)}") from error
    return codec


def is_foreign(name: str) -> bool:
    """Whether there may be such a codec of others: a file's, or one that is installed."""
    return is_file(name) or name in names({}, ENTRY_POINT_GROUP)


def _try(codec: ForeignCodec, reference: str) -> None:
    """Encodes and decodes a few vectors. Raises EncodingError for what a job would suffer from later."""
    unit, traits = codec.unit, codec.traits
    for count in sorted({1, unit, unit + 1, 3 * unit + unit // 2 + 1}):
        chance = torch.Generator().manual_seed(count)
        for values in (torch.randn(count, generator=chance), torch.zeros(count), torch.ones(count) * 1e-20):
            kept, out = values.clone(), torch.empty(count)
            data = codec.encode(values, 0, _KEY).tobytes()
            if not torch.equal(values, kept):
                raise EncodingError(f"{reference}: encode changes its argument: compute a new tensor")
            if codec.encode(values, 0, _KEY).tobytes() != data:
                raise EncodingError(
                    f"{reference}: encode gives other bytes for the same values, place and key; an upload "
                    "that is resumed needs the same: draw from `key` and the value's place alone"
                )
            parts = [(values[at : at + unit], at) for at in range(0, count, unit)]
            if b"".join(codec.encode(part, at, _KEY).tobytes() for part, at in parts) != data:
                raise EncodingError(
                    f"{reference}: {unit} values at a time, its unit, are not the bytes of the whole"
                )
            codec.decode(memoryview(data), out)
            _check_traits(reference, traits, values, out)


def _check_traits(reference: str, traits: Traits, values: Tensor, out: Tensor) -> None:
    length, count = float(values.double().norm()), len(values)
    error, slack = float((out.double() - values.double()).norm()), 1e-6 * length
    if traits.error == "exact" and error > 0:
        raise EncodingError(f"{reference}: its traits say exact, and what it decodes differs by {error:.3g}")
    if traits.error == "bounded" and error > traits.worst(count) * length + slack:
        raise EncodingError(
            f"{reference}: its traits say ‖C(x) − x‖ ≤ {traits.worst(count):.3g}·‖x‖, and of {count} values "
            f"it is {error / length if length else error:.3g}"
        )
    if float(out.double().norm()) > traits.lengthens(count) * length + slack:
        raise EncodingError(
            f"{reference}: its traits say ‖C(x)‖ ≤ {traits.lengthens(count):.3g}·‖x‖, and of {count} values "
            "it is longer"
        )

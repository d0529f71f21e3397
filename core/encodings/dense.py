"""Plain little-endian arrays: float32, float16, bfloat16, each value rounded to the nearest, ties to even."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.encodings.codec import Codec
from roundtable.core.encodings.encoding import Traits
from roundtable.core.errors import EncodingError
from roundtable.core.toml_tables import Table

_ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class NoParameters(Table):
    """Of a stage that takes none."""


class Dense(Codec):
    """Values of `dtype`. Error: float16 ≤ 2⁻¹¹ of each value down to 6e-5, and 3e-8 below; bfloat16 ≤ 2⁻⁸.

    float16 holds magnitudes below 65,520: a larger one is refused, never sent as infinity.
    """

    unit = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dense_dtype = dtype
        self._dtype = dtype
        worst = _ROUNDING[dtype]
        # Below 6e-5 float16 has fixed steps: no factor of such a value bounds its error.
        bounded = worst if dtype != torch.float16 else 1.0
        self.traits = Traits(
            "bounded" if worst else "exact", lambda elements: bounded, lambda elements: 1.0 + worst
        )

    @override
    def size(self, count: int) -> int:
        return count * self._dtype.itemsize

    @override
    def encode(self, values: Tensor, first: int, key: int) -> np.ndarray:
        rounded = values.to(self._dtype).contiguous()
        if (bad := _first_bad(rounded)) is not None:
            value = values[bad].item()
            large = f"is too large for {self._dtype}" if np.isfinite(value) else "is not finite"
            raise EncodingError(f"value {first + bad} of the update, {value}, {large}")
        return rounded.view(torch.uint8).cpu().numpy()

    @override
    def decode(self, data: memoryview, out: Tensor) -> None:
        if not len(out):
            return
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(out.device).view(self._dtype)
        if (bad := _first_bad(raw)) is not None:
            raise EncodingError(f"element {bad} of a block is NaN or infinite")
        out.copy_(raw)


def _first_bad(values: Tensor) -> int | None:
    """The place of the first value that is not finite."""
    if not len(values) or all(bool(torch.isfinite(end)) for end in torch.aminmax(values)):
        return None
    return int((~torch.isfinite(values)).float().argmax())

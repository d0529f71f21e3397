"""What all encodings in blocks have in common: their parameters, their sizes, and what is refused in them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from roundtable.core.encodings.encoding import LARGEST_BLOCK
from roundtable.core.errors import EncodingError
from roundtable.core.toml_tables import Table

FLAWS = {
    1: "a scale is negative, NaN or infinite",
    2: "a code is outside of the range that encoders use",
    3: "bits behind a block's last code are set",
}
"""What a kernel's answer says of bytes that no encoder writes."""

SMALLEST_SCALE = 2.0**-100
"""Scales below it are written as zero: their reciprocal must be finite."""


def _power_of_two(size: int | None) -> int | None:
    if size is not None and size & size - 1:
        raise ValueError(f"{size} is not a power of two")
    return size


BlockSize = Annotated[int | None, Field(ge=64, le=LARGEST_BLOCK), AfterValidator(_power_of_two)]


class BlockTable(Table):
    """Parameters of an encoding in blocks."""

    block: BlockSize = Field(None, description="values that share a scale: a power of two, 64 to 4,096")
    scales: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="of each block; bfloat16 is rounded up, so that no value is clamped"
    )


def refusal(first: int, unit: int) -> EncodingError:
    """Why a block from value `first` on could not be encoded."""
    return EncodingError(
        f"the update holds a value that is NaN, infinite or beyond 3e38, between {first} and {first + unit}"
    )

"""How a flat vector becomes bytes for the journey: small encodings, and chains of them."""

from roundtable.core.encodings.assembly import canonical, get_encoding
from roundtable.core.encodings.encoding import (
    BLOCK_ELEMENTS,
    GRID,
    NO_KEY,
    ByteSource,
    Encoding,
    Memory,
    StreamKey,
    Traits,
    VectorReader,
)

__all__ = [
    "BLOCK_ELEMENTS",
    "GRID",
    "NO_KEY",
    "ByteSource",
    "Encoding",
    "Memory",
    "StreamKey",
    "Traits",
    "VectorReader",
    "canonical",
    "get_encoding",
]

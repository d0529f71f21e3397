"""What an update is once it has travelled: encoded and decoded again, where nothing really travels."""

from __future__ import annotations

from torch import Tensor

from roundtable.core.encodings.encoding import Encoding, StreamKey


def travelled(encoding: Encoding, values: Tensor, key: StreamKey) -> int:
    """Puts what a receiver would decode into `values`, float32 on any device; the bytes that it took."""
    vector = values.cpu() if values.device.type != "cpu" else values
    if encoding.dense_dtype is not None:
        values.copy_(values.to(encoding.dense_dtype))
        return values.numel() * encoding.dense_dtype.itemsize
    data = b"".join(encoding.encode(vector, key))
    encoding.decode(data, vector, key)
    if vector is not values:
        values.copy_(vector)
    return len(data)

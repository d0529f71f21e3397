"""A long series thinned out to what can be shown of it."""

from __future__ import annotations


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0 to `count` - 1, evenly over them, the first and the last among them."""
    if count <= most:
        return list(range(count))
    if most < 2:
        return [count - 1][:most]
    step = (count - 1) / (most - 1)
    return [round(index * step) for index in range(most)]

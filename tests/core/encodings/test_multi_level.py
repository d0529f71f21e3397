"""Each tensor at its level: which one it gets, in which order, and what is refused."""

from __future__ import annotations

import pytest
import torch

from roundtable.core.encodings import GRID, get_encoding
from roundtable.core.encodings.encoding import HeldBytes
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout

CHAIN = "multilevel(small=10, large=50000, ratio=0.01, variance=0.1, threshold=0.5)"
SIZES = {"large": 30 * GRID + 5, "bias": 7, "quiet": 3000, "loud": 4000, "norm": 10, "alike": 600}
LAYOUT = Layout.of({name: torch.empty(size) for name, size in SIZES.items()})


def update() -> torch.Tensor:
    """`quiet` is small all over, `loud` has few large values, those of `alike` are as large as each other."""
    chance = torch.Generator().manual_seed(2)
    state = {name: torch.randn(size, generator=chance) for name, size in SIZES.items()}
    state["quiet"] *= 0.01
    state["loud"] = 0.1 * state["loud"]
    state["loud"][::100] = 20.0
    state["alike"] = state["alike"].sign() * 2.0
    return LAYOUT.flatten(state)


def test_each_tensor_gets_the_level_that_is_stated() -> None:
    encoding, vector = get_encoding(CHAIN).over(LAYOUT), update()
    data, out = b"".join(encoding.encode(vector)), torch.empty(LAYOUT.size)
    encoding.decode(data, out)
    sent, exact = LAYOUT.unflatten(out), LAYOUT.unflatten(vector)
    assert data[:68] == torch.cat((exact["bias"], exact["norm"])).numpy().tobytes()
    assert torch.equal(sent["bias"], exact["bias"])
    assert torch.equal(sent["norm"], exact["norm"])
    assert int((sent["large"] != 0).sum()) == -(-SIZES["large"] // 100)
    assert float(sent["large"].abs()[sent["large"] != 0].min()) > 2.5
    assert float((sent["quiet"] - exact["quiet"]).norm() / exact["quiet"].norm()) < 0.02
    assert sent["loud"].nonzero().flatten().tolist() == list(range(0, 4000, 100))
    # Half of its largest and more are all of its values: 8 bits are shorter than values with places.
    assert bool((sent["alike"] != 0).all())
    assert len(data) <= encoding.size_bound(LAYOUT.size) < 4 * LAYOUT.size


def test_pieces_of_a_reader_are_the_whole_vector() -> None:
    encoding, vector = get_encoding(CHAIN).over(LAYOUT), update()
    data, out, whole = b"".join(encoding.encode(vector)), torch.empty(LAYOUT.size), torch.empty(LAYOUT.size)
    encoding.decode(data, whole)
    reader = encoding.reader(HeldBytes(data), LAYOUT.size)
    for start in range(0, LAYOUT.size, 2 * GRID):
        reader.read(out[start : start + 2 * GRID])
    assert torch.equal(out, whole)


def test_what_is_no_level_is_refused() -> None:
    encoding = get_encoding("multilevel(small=10, large=50000)").over(Layout.of({"a": torch.empty(100)}))
    data = bytearray(b"".join(encoding.encode(torch.ones(100))))
    data[0] = 2
    with pytest.raises(EncodingError, match="a tensor at the level 2"):
        encoding.decode(bytes(data), torch.empty(100))
    with pytest.raises(EncodingError, match="writes its values itself"):
        get_encoding("multilevel | int8")
    with pytest.raises(EncodingError, match="small tensors are below large ones"):
        get_encoding("multilevel(small=100, large=100)")

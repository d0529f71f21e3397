"""Every encoding of vectors on a GPU, against the CPU's bytes and bits: on a stand-in, and on a true one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended_gpu import GPUS, a_gpu

from roundtable.core.encodings import StreamKey, get_encoding, torch_blocks
from roundtable.core.encodings.assembly import BY_TENSOR, CHOOSING, CODECS, PACKING
from roundtable.core.encodings.chain import parse_chain
from roundtable.core.encodings.composed.fragments import STAGE
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout

CHAINS = [
    *CODECS,
    *(f"int{bits}(rounding=stochastic, scales=float32)" for bits in (8, 4, 2)),
    "qsgd(levels=1)",
    *(f"minmax(bits={bits})" for bits in (2, 4, 16)),
    "fp4(block=256, scales=float32)",
    "topk(ratio=0.05) | int8",
    "topk(ratio=0.02, per=layer, rescale=true)",
    "topk(threshold=0.5, per=layer) | nf4",
    "randomk(ratio=0.1) | int4",
    "randomk(ratio=0.3, indices=cohort, scaled=false)",
    "multilevel(small=20, large=300, ratio=0.1)",
    "multilevel(small=0, large=4000, variance=0, threshold=0.5)",
    "float32 | zstd",
    "topk(ratio=0.05) | int8 | zstd",
    "lowrank(rank=2)",
    "lowrank(rank=3, warm=false) | int8",
    "fragments(count=2) | int4(rounding=stochastic)",
]
KEY = StreamKey(1, "a", 2, 3)
SHAPES = {"bias": (5,), "matrix": (60, 50), "kernel": (40, 3, 3), "rest": (9001,)}
LAYOUT = Layout.of({name: torch.empty(shape) for name, shape in SHAPES.items()})


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a device. Pieces are short, so that there are several."""
    monkeypatch.setattr(torch_blocks, "DEVICE_PIECE", 8192)
    with a_gpu(request.param):
        yield "cuda"


def test_there_is_a_chain_of_every_encoding() -> None:
    named = {stage.name for chain in CHAINS for stage in parse_chain(chain)}
    assert named == {*CODECS, *CHOOSING, BY_TENSOR, PACKING, STAGE}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_gpu_writes_and_reads_the_bits_of_the_cpu(chain: str, gpu: str) -> None:
    encoding = get_encoding(chain).over(LAYOUT)
    chance = torch.Generator().manual_seed(3)
    wide = torch.randn(LAYOUT.size, generator=chance) * torch.exp(
        2 * torch.randn(LAYOUT.size, generator=chance)
    )
    vector = torch.where(torch.rand(LAYOUT.size, generator=chance) < 0.2, wide.round(), wide)
    here, there = torch.empty(LAYOUT.size), torch.empty(LAYOUT.size, device=gpu)
    data = b"".join(map(bytes, encoding.encode(vector, KEY, {})))
    encoding.decode(data, here, KEY)
    encoding.decode(data, there, KEY)
    assert there.device.type == "cuda"
    assert torch.equal(there.cpu(), here)
    written = b"".join(map(bytes, encoding.encode(vector.to(gpu), KEY, {})))
    if not chain.startswith("lowrank"):
        assert written == data
        return
    # Products round otherwise there: near in what is decoded.
    encoding.decode(written, there, KEY)
    assert float((there.cpu() - here).norm()) < 0.02 * float(here.norm())


def test_what_is_refused_on_the_cpu_is_refused_on_a_gpu(gpu: str) -> None:
    for chain in CODECS:
        encoding = get_encoding(chain)
        with pytest.raises(EncodingError):
            list(encoding.encode(torch.tensor([1.0, float("nan")]).to(gpu), KEY))
    there = torch.empty(64, device=gpu)
    for chain, flaw in {
        "int8": b"\xff\xff",
        "nf4": b"\x80\x7f",
        "sign": b"\x00\x80",
        "float16": b"\x00\x7c",
    }.items():
        encoding = get_encoding(chain)
        data = b"".join(map(bytes, encoding.encode(torch.ones(64), KEY)))
        with pytest.raises(EncodingError):
            encoding.decode(flaw + data[2:], there, KEY)

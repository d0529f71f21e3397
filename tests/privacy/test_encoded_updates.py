"""Clipping comes after decoding: no encoding, honest or not, moves the sum further than the clip norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from roundtable.aggregation.rows.encoded_matrix import rows_in_files
from roundtable.core import parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.engine import Rows, combine, initial_server_state, make_plan
from roundtable.engine.messages import RowReference, Update
from roundtable.privacy import SeededNoise

SIZE, CLIP, COHORT = 20_000, 0.5, 4
JOB = """
task = "t"
[transfer]
up = "{up}"
feedback = "off"
[cohort]
size = 4
[aggregation]
weighting = "uniform"
[evaluation]
every = 0
[privacy]
level = "{level}"
clip_norm = 0.5
delta = 1e-3
noise_multiplier = 1.0
"""


@pytest.mark.parametrize("level", ["client", "dp_ftrl"])
@pytest.mark.parametrize("up", ["qsgd(levels=1,block=4096)", "minmax(bits=2)", "topk(ratio=0.2)", "int8"])
def test_an_update_that_becomes_longer_on_its_way_is_clipped_as_it_arrives(
    level: str, up: str, tmp_path: Path
) -> None:
    """The silo's vector has norm C; what is decoded of it may be longer, or whatever it claims."""
    plan = make_plan(parse_job(JOB.format(up=up, level=level)), population=50)
    encoding, path = get_encoding(up), tmp_path / "update"
    within = torch.randn(SIZE, generator=torch.Generator().manual_seed(3))
    within *= CLIP / within.norm()

    def decoded(sent: Tensor) -> float:
        path.write_bytes(b"".join(encoding.encode(sent, StreamKey(0, "silo"))))
        out = torch.empty(SIZE)
        encoding.decode(path.read_bytes(), out, StreamKey(0, "silo"))
        return float(out.norm())

    def published(count: int) -> Tensor:
        rows = rows_in_files([path] * count, SIZE, [encoding] * count, [StreamKey(0, "silo")] * count)
        updates = [Update("silo", RowReference(0), 1, loss=1.0)] * count
        state, noise = initial_server_state(plan, SIZE), SeededNoise(9)
        return combine(
            plan, Rows(rows, updates), torch.zeros(SIZE), state, round=1, seed=0, noise=noise
        ).vector

    absent = published(0)
    if up.startswith(("qsgd", "minmax")):
        assert decoded(within) > 1.2 * CLIP, "the clip at the silo would not have held"
        assert float((published(1) - absent).norm()) == pytest.approx(CLIP / COHORT, rel=1e-3)
    assert decoded(1e6 * within) > 1e5 * CLIP
    assert float((published(1) - absent).norm()) <= CLIP / COHORT * (1 + 1e-4)

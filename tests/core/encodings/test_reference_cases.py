"""Cases from outside: exact arithmetic, bitsandbytes, ml_dtypes, Random123."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.core.encodings import get_encoding
from roundtable.core.encodings.block_integers import MAGNITUDE, STOCHASTIC, BlockIntegers, Qsgd, QsgdTable
from roundtable.core.encodings.block_tables import BlockTable
from roundtable.core.encodings.largest import Largest, gaps_of, places_of, shift_for
from roundtable.core.encodings.signs import Signs
from roundtable.core.encodings.tables4 import Table4
from roundtable.core.encodings.torch_blocks import mean_magnitudes, norms
from roundtable.core.encodings.uneven_levels import NaturalPowers, Range, RangeTable
from roundtable.core.errors import EncodingError

NOT_OFFERED = {
    "public_format": "formats of ggml, which no encoding here is named after",
    "table8": "bitsandbytes' dynamic 8 bit",
    "counter_rng": "roundings are drawn by a keyed mix of 32 bits, not by Philox",
}
ELSEWHERE = {
    "powersgd": "tests/core/encodings/test_low_rank.py",
    "ring_sum": "rings: tests/privacy/secagg",
    "downlink": "deltas on the way down",
    "error_feedback": "tests/core/encodings/test_feedback.py",
}


def codec(kind: type, **changes: Any) -> Any:
    """A codec whose blocks have the size of the case: smaller ones than a job may ask for."""
    made = kind.__new__(kind)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def blocks_of(case: dict[str, Any], size: int) -> list[torch.Tensor]:
    return list(torch.tensor(case["input"], dtype=torch.float32).split(size))


def same(case: dict[str, Any], found: torch.Tensor, expected: list[float], relative: float = 1e-6) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert float((found.double() - wanted).abs().max()) <= relative * float(wanted.abs().max()), case["name"]


def check_cast(case: dict[str, Any]) -> None:
    values = torch.tensor(case["input"], dtype=torch.float32)
    small = values.abs() < 65520
    stored = np.frombuffer(bytes.fromhex(case["expected"]["bytes_hex"]), dtype="<u2")[small.numpy()]
    data = b"".join(get_encoding("float16").encode(values[small]))
    assert np.array_equal(np.frombuffer(data, dtype="<u2"), stored)
    with pytest.raises(EncodingError, match="too large for"):
        list(get_encoding("float16").encode(values))


def check_block_int(case: dict[str, Any]) -> None:
    bits, size = case["encoding"]["bits"], case["encoding"]["block"]
    drawn = case["encoding"].get("u")
    draws = [None] * 99 if drawn is None else list(torch.tensor(drawn, dtype=torch.float32).split(size))
    coder = codec(BlockIntegers, bits=bits, levels=(1 << bits - 1) - 1, wide=True, rounding=STOCHASTIC)
    q, scales = [], []
    for block, u in zip(blocks_of(case, size), draws, strict=False):
        scale, codes = coder.codes(block[None], u)
        scales += scale.tolist()
        q += codes[0].tolist()
    wanted = case["expected"]["q"]
    assert scales == [float(np.float32(scale)) for scale in case["expected"]["scales"]]
    assert max(abs(a - b) for a, b in zip(q, wanted, strict=True)) <= 1
    assert sum(a != b for a, b in zip(q, wanted, strict=True)) <= 1  # On an edge, by the reciprocal.
    decoded = torch.tensor(wanted).float() * torch.tensor(scales).repeat_interleave(size)[: len(wanted)]
    assert decoded.tolist() == [float(np.float32(value)) for value in case["expected"]["decoded"]]


def check_table4(case: dict[str, Any]) -> None:
    if case["encoding"]["name"] != "nf4":
        pytest.skip("bitsandbytes' own FP4 is not offered: fp4 here is E2M1")
    coder = Table4("nf4", BlockTable(scales="float32"))
    values = torch.tensor(case["input"], dtype=torch.float32)
    stored = bytes.fromhex(case["expected"]["bytes_hex"])
    nibbles = [code for byte in stored for code in (byte >> 4, byte & 15)][: len(values)]
    found = []
    for block in values.split(64):
        found += coder.codes(block / block.abs().max()).tolist()
    assert sum(a != b for a, b in zip(found, nibbles, strict=True)) == 0
    out = torch.empty(len(values))
    coder.decode(coder.encode(values, 0, 0).data, out)
    same(case, out, case["expected"]["decoded"])


def check_microscaling(case: dict[str, Any]) -> None:
    values = torch.tensor(case["input"], dtype=torch.float32)
    scale = 2.0 ** (case["expected"]["scale_byte"] - 127)
    coder = Table4("fp4", BlockTable())
    decoded = torch.from_numpy(coder.values)[coder.codes(values / scale).long()] * scale
    assert torch.equal(decoded.abs(), torch.tensor(case["expected"]["decoded"]).abs())
    assert torch.equal(decoded, torch.tensor(case["expected"]["decoded"]) + 0.0)


def check_minmax(case: dict[str, Any]) -> None:
    values = torch.tensor(case["input"], dtype=torch.float32)
    coder, out = Range(RangeTable(bits=case["encoding"]["bits"])), torch.empty(len(values))
    data = coder.encode(values, 0, 0)
    low, step = data[:8].view(np.float32).tolist()
    assert low == pytest.approx(case["expected"]["min"], rel=1e-6)
    assert step == pytest.approx(case["expected"]["scale"], rel=1e-6)
    coder.decode(data.data, out)
    same(case, out, case["expected"]["decoded"])


def check_qsgd(case: dict[str, Any]) -> None:
    values, levels = torch.tensor(case["input"], dtype=torch.float32), case["encoding"]["levels"]
    coder = Qsgd(QsgdTable(levels=levels, scales="float32"))
    assert coder.rounding == MAGNITUDE
    assert float(norms(values[None])) == pytest.approx(case["expected"]["norm"], rel=1e-6)
    scale, q = coder.codes(values[None], torch.tensor(case["encoding"]["u"], dtype=torch.float32))
    assert [abs(code) for code in q[0].tolist()] == [abs(code) for code in case["expected"]["levels"]]
    same(case, q[0].float() * scale, case["expected"]["decoded"])
    stated = min(len(values) / levels**2, len(values) ** 0.5 / levels)
    assert stated == pytest.approx(case["expected"]["variance_bound"])


def check_natural(case: dict[str, Any]) -> None:
    values = torch.tensor(case["input"], dtype=torch.float32)
    draws = (torch.tensor(case["encoding"]["u"], dtype=torch.float64) * 2**23).to(torch.int32)
    exponents = NaturalPowers().exponents(values, draws)
    found = torch.copysign((exponents << 23).view(torch.float32), values)
    assert found.tolist() == case["expected"]["decoded"]


def check_sign(case: dict[str, Any]) -> None:
    size, at = case["encoding"]["block"], 0
    stored, coder = bytes.fromhex(case["expected"]["bytes_hex"]), codec(Signs, wide=True)
    for block, scale in zip(blocks_of(case, size), case["expected"]["scales"], strict=True):
        assert float(mean_magnitudes(block[None])) == pytest.approx(scale, rel=1e-6)
        row = coder.to_rows(block[None], 0, 0)[0]
        length = -(-len(block) // 8)
        assert bytes(row[4:].tolist()) == stored[at : at + length]
        at += length


def check_topk(case: dict[str, Any]) -> None:
    values, k = torch.tensor(case["input"], dtype=torch.float32), case["encoding"]["k"]
    places, taken = Largest.of(values, k).collect(values)
    assert places.tolist() == case["expected"]["indices"]
    assert (np.diff(places.astype(int), prepend=-1) - 1).tolist() == case["expected"]["gaps_minus_one"]
    out = torch.zeros(len(values))
    out[torch.from_numpy(places.astype(np.int64))] = taken
    assert out.tolist() == torch.tensor(case["expected"]["decoded"], dtype=torch.float32).tolist()
    kept = float(taken.double().square().sum() / values.double().square().sum())
    assert kept == pytest.approx(case["expected"]["contraction"], abs=1e-6) or kept >= k / len(values)


def check_index_code(case: dict[str, Any]) -> None:
    """Places are sent in Golomb-Rice code, which is shorter; they come back."""
    places = np.array(case["input"], dtype=np.uint32)
    shift = shift_for(len(places), 1 << 17)
    data = gaps_of(places, shift)
    assert places_of(memoryview(data), len(places), shift, 1 << 17).tolist() == case["input"]


def check_randomk(case: dict[str, Any]) -> None:
    values, taken = torch.tensor(case["input"], dtype=torch.float32), case["encoding"]["indices"]
    factor = case["encoding"]["d"] / case["encoding"]["k"]
    assert get_encoding("randomk(ratio=0.125)").factor == factor
    assert (values[taken] * factor).tolist() == torch.tensor(case["expected"]["values"]).tolist()


def check_refuse(case: dict[str, Any]) -> None:
    what = case["encoding"]
    if what["kind"] == "topk":
        places = np.array(what["indices"], dtype=np.uint32)
        if len(set(what["indices"])) < len(places):
            return  # A gap is written without one: a repeated place cannot be said.
        with pytest.raises(EncodingError):
            places_of(memoryview(gaps_of(places, 1)), len(places), 1, what["d"])
        return
    scales = np.array([float(scale) for scale in what["scales"]], dtype=np.float32)
    codes = np.array(what["q"], dtype=np.int8)
    data = scales[:1].tobytes() + codes.tobytes()
    with pytest.raises(EncodingError):
        get_encoding("int8(block=64, scales=float32)").decode(data, torch.empty(what["d"]))


CHECKS = {
    "cast": check_cast,
    "block_int": check_block_int,
    "block_int_stochastic": check_block_int,
    "table4": check_table4,
    "microscaling": check_microscaling,
    "minmax": check_minmax,
    "qsgd": check_qsgd,
    "natural": check_natural,
    "sign": check_sign,
    "topk": check_topk,
    "index_code": check_index_code,
    "randomk": check_randomk,
    "refuse": check_refuse,
}


def test_the_cases_hold(reference_dir: Path) -> None:
    cases = json.loads((reference_dir / "compression_cases.json").read_text())["cases"]
    checked = 0
    for case in cases:
        if case["kind"] in {**NOT_OFFERED, **ELSEWHERE} or "bnb_fp4" in case["name"]:
            continue
        if case["kind"] == "block_int" and "u" not in case["encoding"]:
            case["encoding"]["u"] = None
        CHECKS[case["kind"]](case)
        checked += 1
    assert checked >= 33

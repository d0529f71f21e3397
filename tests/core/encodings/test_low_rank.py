"""Low rank: the reference's rounds, the memory of a warm start, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roundtable.client.trainer import write_remembering
from roundtable.core.config import parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.composed.low_rank import FACTORS, factors
from roundtable.core.encodings.feedback import MEMORY
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout


@pytest.fixture(scope="module")
def cases(reference_dir: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((reference_dir / "compression_cases.json").read_text())["cases"]
    return {case["name"]: case for case in found if case["kind"] == "powersgd"}


@pytest.mark.parametrize("name", ["powersgd_rank1_ef", "powersgd_rank3_ef"])
def test_the_reference_rounds_in_float64(cases: dict[str, dict[str, Any]], name: str) -> None:
    case = cases[name]
    q, error = torch.tensor(case["encoding"]["Q0"], dtype=torch.float64).T, torch.tensor(0.0)
    for expected in case["expected"]["decoded_rounds"]:
        total = torch.tensor(case["input"], dtype=torch.float64) + error
        p, q = factors(total, q)
        torch.testing.assert_close(p @ q, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=1e-10)
        error = total - p @ q


def test_the_reference_rounds_as_a_silo_sends_them(cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Both memories go through the silo's state; an attempt that does not count leaves no trace."""
    case, path, layout = cases["powersgd_rank1_ef"], tmp_path / "update", Layout.of({"a": torch.empty(6, 5)})
    job = parse_job('task = "a:B"\n[transfer]\nup = "lowrank(rank=1)"')
    encoding = get_encoding(job.transfer.up).over(layout)
    kept = {"transfer:" + FACTORS: torch.tensor(case["encoding"]["Q0"]).T.reshape(-1)}
    for number, expected in enumerate(case["expected"]["decoded_rounds"]):
        for attempt in range(2):
            key, delta = StreamKey(0, "a", number, attempt), torch.tensor(case["input"]).reshape(-1)
            memory = write_remembering(path, delta, job.transfer, layout, key, kept).memory
        sent = torch.empty(layout.size)
        encoding.decode(path.read_bytes(), sent)
        torch.testing.assert_close(sent, torch.tensor(expected).reshape(-1), rtol=1e-4, atol=1e-5)
        kept = memory
    assert set(kept) == {MEMORY, "transfer:" + FACTORS}


def test_factors_of_silos_add_up_only_in_two_exchanges(cases: dict[str, dict[str, Any]]) -> None:
    """What a masked sum would have to carry; own factors of each silo give something else."""
    case = cases["powersgd_summed_factors"]
    updates = [torch.tensor(update, dtype=torch.float64) for update in case["input"]]
    q = torch.tensor(case["encoding"]["Q0"], dtype=torch.float64).T
    expected = torch.tensor(case["expected"]["decoded_sum"], dtype=torch.float64)
    p, summed = factors(torch.stack(updates).sum(0), q)
    torch.testing.assert_close(p @ summed, expected, rtol=1e-8, atol=1e-10)
    own = sum(torch.matmul(*factors(update, q)) for update in updates)
    assert float((own - expected).norm()) > 0.1 * float(expected.norm())


def test_a_warm_start_finds_the_subspace_of_a_matrix_that_stays() -> None:
    """Subspace iteration: the error comes down to that of the best approximation of this rank."""
    chance = torch.Generator().manual_seed(3)
    layout = Layout.of({"a": torch.empty(60, 40), "b": torch.empty(7)})
    left, right = torch.randn(60, 5, generator=chance), torch.randn(5, 40, generator=chance)
    matrix = left @ torch.diag(torch.tensor([9.0, 6.0, 1.0, 0.5, 0.2])) @ right
    vector = torch.cat((matrix.reshape(-1), torch.arange(7.0)))
    best = float(torch.linalg.svdvals(matrix)[2:].norm())
    errors = {}
    for warm in ("true", "false"):
        encoding, memory = get_encoding(f"lowrank(rank=2, warm={warm})").over(layout), {}
        for number in range(8):
            out = torch.empty(2407)
            data = b"".join(encoding.encode(vector, StreamKey(0, "a", number), memory))
            encoding.decode(data, out)
        assert len(data) == encoding.encoded_size(2407) == 4 * (2 * 100 + 7)
        assert torch.equal(out[2400:], vector[2400:])
        errors[warm] = float((out - vector).norm())
    assert errors["true"] == pytest.approx(best, rel=1e-3)
    assert errors["false"] > best * 1.01


def test_a_memory_of_another_rank_is_dropped_aloud_and_a_zero_one_recovers() -> None:
    layout = Layout.of({"a": torch.empty(30, 20)})
    vector, encoding = (
        torch.randn(600, generator=torch.Generator().manual_seed(1)),
        get_encoding("lowrank(rank=2)"),
    )
    with pytest.warns(UserWarning, match="have 7 values, and .* goes on from 40"):
        list(encoding.over(layout).encode(vector, StreamKey(), {FACTORS: torch.ones(7)}))
    out, memory = torch.empty(600), {FACTORS: torch.zeros(40)}
    encoding.over(layout).decode(b"".join(encoding.over(layout).encode(vector, StreamKey(), memory)), out)
    assert 0 < float(out.norm()) < float(vector.norm())
    assert bool(memory[FACTORS].any())


@pytest.mark.parametrize(
    "chain", ["lowrank(rank=4) | int4", "lowrank(rank=100) | float16", "lowrank | natural"]
)
def test_what_would_multiply_its_error_does_not_follow(chain: str) -> None:
    with pytest.raises(EncodingError, match="both factors would be rounded"):
        get_encoding(chain)


def test_without_a_layout_it_says_so() -> None:
    with pytest.raises(EncodingError, match="looks at each tensor, and no layout of 12 values"):
        get_encoding("lowrank").size_bound(12)

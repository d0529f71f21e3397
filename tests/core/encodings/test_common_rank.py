"""Low rank for sums: factors by a common basis add up, and two rounds make PowerSGD's step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roundtable.client.trainer import write_remembering
from roundtable.core.config import parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.composed.common_rank import CommonRank, orthonormal
from roundtable.core.encodings.feedback import MEMORY
from roundtable.core.errors import EncodingError
from roundtable.core.layout import Layout

CHAIN = "lowrank(rank=2, basis=cohort)"
LAYOUT = Layout.of(
    {"a": torch.empty(9, 3, 2), "b": torch.empty(7), "c": torch.empty(5, 2), "d": torch.empty(4, 8)}
)
"""Matrices of 9 x 6 and 4 x 8; a vector and a matrix of two columns, which travel whole."""


def encoding(layout: Layout = LAYOUT, chain: str = CHAIN) -> CommonRank:
    found = get_encoding(chain).over(layout)
    assert isinstance(found, CommonRank)
    return found


def sent(bound: CommonRank, vector: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(bound.encode(vector))), dtype=torch.float32)


def matrices(vector: Tensor) -> list[np.ndarray]:
    return [
        vector[s.offset : s.offset + s.size].view(s.shape[0], -1).double().numpy()
        for s in LAYOUT.averaged
        if s.name in "ad"
    ]


def test_sums_of_factors_are_factors_of_the_sum_and_the_basis_follows_from_them() -> None:
    """Rounds of four clients, two without a model, against NumPy in float64; what travels whole is whole."""
    chance, plain = torch.Generator().manual_seed(4), encoding()
    basis = torch.zeros(plain.basis_size)
    assert plain.basis_size == 2 * (9 + 6) + 2 * (4 + 8)
    spans: dict[int, list[np.ndarray | None]] = {1: [None, None], 0: [None, None]}
    for number in (1, 2, 3, 5, 6, 7, 9):
        updates = torch.randn(4, LAYOUT.size, generator=chance)
        bound = plain.at(basis, number)
        sums = torch.stack([sent(bound, update) for update in updates]).mean(0)
        sides = (9, 4) if number % 2 else (6, 8)
        assert len(sums) == plain.values(number) == 2 * sum(sides) + 7 + 10
        assert bound.encoded_size(LAYOUT.size) == 4 * len(sums)
        decoded, mean = bound.expand(sums), updates.mean(0)
        assert torch.equal(decoded[54:71], mean[54:71])
        odd = number % 2
        for place, (got, matrix) in enumerate(zip(matrices(decoded), matrices(mean), strict=True)):
            side, before = matrix.shape[odd], spans[odd][place]
            span = np.eye(side)[:, [side // 4, 3 * side // 4]] if before is None else before
            projected = matrix @ span @ span.T if odd else span @ span.T @ matrix
            np.testing.assert_allclose(got, projected, atol=2e-6)
            spans[1 - odd][place] = np.linalg.qr(matrix @ span if odd else matrix.T @ span)[0]
        basis = bound.following(sums)
    with pytest.raises(EncodingError, match="comes with each round's model"):
        plain.decode(b"", torch.empty(LAYOUT.size))
    with pytest.raises(EncodingError, match="basis of 3 values, and its tensors take 54"):
        plain.at(torch.zeros(3), 1)


def test_two_rounds_of_the_same_updates_make_the_references_step(reference_dir: Path) -> None:
    """The sum that PowerSGD makes in two exchanges."""
    cases = json.loads((reference_dir / "compression_cases.json").read_text())["cases"]
    (case,) = (each for each in cases if each["name"] == "powersgd_summed_factors")
    updates = torch.tensor(case["input"])
    start = orthonormal(np.array(case["encoding"]["Q0"], dtype=np.float32))
    rank = start.shape[1]
    plain = encoding(Layout.of({"a": torch.empty(updates.shape[1:])}), f"lowrank(rank={rank}, basis=cohort)")
    basis = torch.zeros(plain.basis_size)
    basis[: start.size] = torch.from_numpy(start).reshape(-1)
    for number in (1, 2):
        bound = plain.at(basis, number)
        total = torch.stack([sent(bound, update.reshape(-1)) for update in updates]).sum(0)
        basis = bound.following(total)
    expected = torch.tensor(case["expected"]["decoded_sum"]).reshape(-1)
    torch.testing.assert_close(bound.expand(total), expected, rtol=1e-4, atol=1e-5)


def test_what_is_dropped_is_remembered_and_sent_later(tmp_path: Path) -> None:
    """The same update of full rank over and over: all of it has arrived in the end, but for what is kept."""
    layout = Layout.of({"a": torch.empty(8, 6)})
    job = parse_job(
        f'task = "a:B"\n[transfer]\nup = "{CHAIN}"\n[privacy]\nlevel = "none"\nsecure_aggregation = true\n'
        "clip_norm = 100.0"
    )
    assert job.writes.remembers
    update, arrived, kept = torch.randn(48, generator=torch.Generator().manual_seed(1)), torch.zeros(48), None
    plain, basis = encoding(layout), torch.zeros(28)
    for number in range(1, 25):
        key = StreamKey(0, "a", number, 1)
        path = tmp_path / "update"
        kept = write_remembering(path, update.clone(), job.writes, layout, key, kept, "", basis).memory
        bound = plain.at(basis, number)
        values = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        arrived, basis = arrived + bound.expand(values), bound.following(values)
        torch.testing.assert_close(arrived + kept[MEMORY], number * update, rtol=1e-4, atol=1e-4)
    assert float(kept[MEMORY].norm()) < 12 * float(update.norm())


@pytest.mark.parametrize(
    "factor",
    [
        np.zeros((6, 3)),
        np.outer(np.arange(6.0), [1.0, 2.0, 3.0]),
        np.array([[1e-30, 1e30, 0.0]] * 2 + [[0.0, 1e30, 1.0]] * 2),
        np.eye(5)[:, ::-1][:, :4],
    ],
    ids=["nothing", "one direction", "many sizes", "unit vectors"],
)
def test_a_basis_is_orthonormal_whatever_the_sum(factor: np.ndarray) -> None:
    made = orthonormal(factor.astype(np.float32)).astype(np.float64)
    np.testing.assert_allclose(made.T @ made, np.eye(factor.shape[1]), atol=1e-6)
    largest = factor[:, [int(np.abs(factor).max(0).argmax())]] / max(np.abs(factor).max(), 1e-300)
    np.testing.assert_allclose(made @ (made.T @ largest), largest, atol=1e-5)

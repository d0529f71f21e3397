"""What runs the groups of the board: data as their authors made them, stragglers that stop early."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.simulation import simulate


@pytest.fixture
def board(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(root))
    yield importlib.import_module("benchmarks.reproduction.__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "labels_1", "labels_2", "labels_3"])
def test_a_split_of_images_is_a_cover_of_its_kind(board: ModuleType, kind: str) -> None:
    labels = np.random.default_rng(3).integers(0, 10, 6000)
    owners = board.mnist_cells.split(labels, kind, 10, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(owners)), np.arange(6000))
    held = [set(labels[rows].tolist()) for rows in owners]
    if kind.startswith("labels"):
        assert {len(mine) for mine in held} == {int(kind[-1])}
        assert all(client in mine for client, mine in enumerate(held))
    elif kind == "iid":
        assert {len(rows) for rows in owners} == {600}
    else:
        assert min(map(len, owners)) >= 10
        assert max(map(len, owners)) > 700


def test_rounds_are_counted_on_the_monotone_curve_and_shards_hold_two_labels_each(board: ModuleType) -> None:
    cells = board.mcmahan_cells
    assert cells.crossed([0.5, 0.9, 0.8, 0.98], 0.96) == pytest.approx(3.75)
    assert cells.crossed([0.97], 0.96) == pytest.approx(0.96 / 0.97)
    assert cells.crossed([0.5, 0.6], 0.96) is None
    labels = np.random.default_rng(3).integers(0, 10, 6000)
    owners = cells.shards(labels, 100, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(owners)), np.arange(6000))
    assert {len(rows) for rows in owners} == {60}
    # A shard may lie on the border of two labels.
    assert max(len(set(labels[rows].tolist())) for rows in owners) <= 4
    assert np.mean([len(set(labels[rows].tolist())) for rows in owners]) < 2.3


def test_the_synthetic_data_are_those_of_the_paper(board: ModuleType) -> None:
    make = board.synthetic_cells.generate
    shares = make(30, 1.0, 1.0, False, 1, np.random.RandomState(2))
    assert min(len(share.labels) for share in shares) >= 50
    # The j-th place of x varies by j^-1.2 within a client, between clients by 1 and by beta.
    large = max(shares, key=lambda share: len(share.labels))
    spread = large.inputs.var(0)
    assert spread[0] == pytest.approx(1.0, abs=0.2)
    assert spread[59] == pytest.approx(60**-1.2, rel=0.2)
    alike = make(30, 0.0, 0.0, True, 1, np.random.RandomState(2))
    means = torch.stack([share.inputs.mean(0) for share in alike])
    assert (
        float(means.abs().mean()) < 0.1 < float(torch.stack([s.inputs.mean(0) for s in shares]).abs().mean())
    )


def test_fedprox_stops_stragglers_early_and_is_fedprox_without_them(
    board: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two epochs a straggler does one; the batches of an epoch are the same in either."""
    synthetic = board.synthetic_cells
    models: list[Any] = []
    monkeypatch.setattr(synthetic, "last_loss", lambda job, task, train: models.append((job, task)) or 0.0)
    group = board.groups()["fedprox"]
    (cell,) = [cell for cell in group.cell if cell.id == "fedprox/1_1/90/mu1"]
    synthetic.run_fedprox(group.job(cell, 2), cell.options, None)
    ((job, task),) = models

    def ends(**algorithm: Any) -> torch.Tensor:
        shared = {"batch_size": 10, "learning_rate": 0.01}
        overrides = {"rounds": 1, "cohort.size": 3, "algorithm": {**shared, **algorithm}}
        return simulate(job, task, folder=board.HERE, overrides=overrides).model.vector

    partial = "partial_prox.py:PartialProx"
    all_of_it = ends(name=partial, mu=1.0, stragglers=0.0, epochs=2)
    torch.testing.assert_close(all_of_it, ends(name="fedprox", mu=1.0, epochs=2), atol=1e-6, rtol=1e-5)
    half = ends(name=partial, mu=1.0, stragglers=1.0, epochs=2)
    torch.testing.assert_close(half, ends(name="fedprox", mu=1.0, epochs=1), atol=1e-6, rtol=1e-5)
    assert float((half - all_of_it).abs().max()) > 1e-3


def test_a_few_rounds_of_each_table_of_images(board: ModuleType, mnist_path: Path) -> None:
    for name in ("pfedme_mnist", "niid_mnist"):
        group = board.groups()[name]
        cell = group.cell[0]
        table = {**group.group.job, "rounds": 2, "algorithm": {"steps": 3, "learning_rate": 0.01}}
        shorter = group.model_copy(update={"group": group.group.model_copy(update={"job": table})})
        value, _ = board.RUNNERS[name](shorter.job(cell, 0), cell.options, mnist_path)
        assert 0.05 < value < 0.99


def test_every_cell_of_every_group_is_a_job(board: ModuleType) -> None:
    known = board.groups()
    assert known.keys() == board.RUNNERS.keys()
    for group in known.values():
        for cell in group.cell:
            assert group.job(cell, 1).seed == 1

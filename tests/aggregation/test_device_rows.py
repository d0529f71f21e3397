"""Rules over rows that were moved to a GPU, or to a stand-in for one, against the same rules on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_gpu import GPUS, a_gpu

from roundtable.aggregation import (
    RULES,
    AggregationConfig,
    ClientRow,
    FileMatrix,
    RuleContext,
    TensorMatrix,
    aggregate,
)
from roundtable.aggregation.rows import device_rows
from roundtable.aggregation.rows.device_rows import DeviceRows
from roundtable.core import JobConfig
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.engine import make_plan
from roundtable.engine.validation.feasibility import check_device

ROWS, COLUMNS = 12, 20_000
CLIENTS = [ClientRow(f"silo-{index:02}") for index in range(ROWS)]
VALUES = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(6))
GIVEN: dict[str, dict[str, Any]] = {"centred_clipping": {"tau": 5.0}, "monna": {"pivot": 2}}


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of any size go to the GPU, of which torch sees one with a GiB that is free."""
    monkeypatch.setattr(device_rows, "WORTH_MOVING", 1)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))


def found(name: str, device: Any, matrix: Any = None) -> Any:
    rule = RULES[name]
    parameters = {**({"f": 2} if rule.takes("f") else {}), **GIVEN.get(name, {})}
    config = AggregationConfig(name, parameters, (("arc", {"f": 2}),), device=device)
    history = TensorMatrix(VALUES * 2) if rule.takes("history") else None
    context = RuleContext(VALUES[1], VALUES.mean(dim=0), history)
    return aggregate(matrix or TensorMatrix(VALUES), CLIENTS, config, context=context, diagnose=True)


@pytest.mark.parametrize("kind", GPUS)
@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_gives_the_same_but_for_the_last_digits(name: str, kind: str, worth: None) -> None:
    expected = found(name, "cpu")
    with a_gpu(kind):
        moved = found(name, "cuda")
        assert moved.vector.device.type == "cpu"
    torch.testing.assert_close(moved.vector.as_subclass(torch.Tensor), expected.vector, rtol=1e-5, atol=1e-6)
    assert moved.weights == pytest.approx(expected.weights, abs=1e-4)


@pytest.mark.parametrize("kind", GPUS)
def test_rows_that_do_not_fit_are_read_in_each_pass(
    kind: str, worth: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{index}.row" for index in range(ROWS)]
    for path, row in zip(paths, VALUES, strict=True):
        path.write_bytes(row.numpy().tobytes())
    read: list[int] = []
    kept: list[bool] = []
    own = FileMatrix.blocks

    def blocks(matrix: FileMatrix, budget_bytes: int = 8192 * ROWS * 8) -> Any:
        read.append(budget_bytes)
        return own(matrix, 8192 * ROWS * 8)

    monkeypatch.setattr(FileMatrix, "blocks", blocks)
    vectors = []
    for fits in (True, False):
        monkeypatch.setattr(DeviceRows, "_fits", lambda matrix, fits=fits: fits)
        read.clear()
        with a_gpu(kind):
            vectors.append(found("geometric_median", "cuda", FileMatrix(paths, COLUMNS)).vector)
        kept.append(len(read) == 1)
    assert kept == [True, False]
    assert torch.equal(vectors[0], vectors[1])


def test_small_rounds_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> torch.device:
        raise AssertionError("nobody asks for a GPU")

    monkeypatch.setattr("roundtable.aggregation.pipeline.gpu", none)
    assert ROWS * COLUMNS < device_rows.WORTH_MOVING
    assert torch.equal(found("krum", "cuda").vector, found("krum", "cpu").vector)


def test_what_a_gpu_cannot_make_faster_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer to reach a GPU than to be added up"):
        AggregationConfig("mean", device="cuda")
    (tmp_path / "mine.py").write_text("def own(matrix, weights):\n    return matrix.block(0, 1)[0]\n")
    with pytest.raises(ConfigError, match=r"'mine.py:own'.*not built in"):
        AggregationConfig("mine.py:own", folder=tmp_path, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_rows, "WORTH_MOVING", 1)
    with pytest.raises(AggregationError, match="torch sees no GPU here"):
        found("krum", "cuda")
    job = JobConfig.model_validate({"task": "t", "aggregation": {"rule": "median", "device": "cuda"}})
    with pytest.raises(ConfigError, match="torch sees no GPU here") as refused:
        check_device(make_plan(job, 3))
    assert refused.value.key == ("aggregation", "device")

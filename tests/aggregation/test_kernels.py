"""Compiled, plain and accelerator paths give the same result; the networks sort; the cache is safe."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.aggregation import RULES, AggregationConfig, ClientRow, RuleContext, TensorMatrix, aggregate
from roundtable.aggregation.rows import kernels as kernels_module
from roundtable.aggregation.rows.gram import combine, distances_from, gram, squared_norms
from roundtable.aggregation.rows.matrix import CELL, SelectedRows
from roundtable.aggregation.rows.sorting_networks import merge_exchange, network_for_mean, sorted_wires
from roundtable.core.errors import AggregationError

compiled = pytest.mark.skipif(kernels_module.load() is None, reason="no C++ compiler on this machine")


def both(monkeypatch: pytest.MonkeyPatch, work: Any) -> tuple[Any, Any]:
    """What `work` returns with the kernels and without them."""
    monkeypatch.setattr(kernels_module, "WORTH_COMPILING", 1)
    with_kernels = work()
    monkeypatch.setattr(kernels_module, "WORTH_COMPILING", 1 << 60)
    return with_kernels, work()


@compiled
@pytest.mark.parametrize("columns", [1, 31, 512, 8192 + 700, 3 * 8192 - 5])
def test_distances_from_one_row_keep_their_digits_where_rows_share_most(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    generator = torch.Generator().manual_seed(columns)
    common = 1e3 * torch.randn(columns, generator=generator)
    rows = common + 1e-3 * torch.randn(9, columns, generator=generator)
    chosen = SelectedRows(TensorMatrix(rows), [5, 1, 8, 2])
    exact = ((rows.double() - rows[8].double()) ** 2).sum(1)[[5, 1, 8, 2]].numpy()
    for found in both(monkeypatch, lambda: distances_from(chosen, 2)):
        np.testing.assert_allclose(found, exact, rtol=1e-13)
    rows[5, -1] = torch.inf
    with pytest.raises(AggregationError):
        distances_from(chosen, 2)


@pytest.mark.parametrize("rows", range(1, 10))
def test_merge_exchange_sorts_everything(rows: int) -> None:
    """A network that sorts all zeros and ones sorts all values (Knuth's zero-one principle)."""
    values = np.array(list(itertools.product([0.0, 1.0], repeat=rows))).T
    ordered = np.stack(sorted_wires(values, merge_exchange(rows)))
    assert (np.diff(ordered, axis=0) >= 0).all()
    assert (ordered.sum(axis=0) == values.sum(axis=0)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 20])
def test_pruned_networks_give_the_mean_of_the_middle(rows: int) -> None:
    values = np.random.default_rng(rows).standard_normal((rows, 500))
    ordered = np.sort(values, axis=0)
    for trimmed in range((rows + 1) // 2):
        first, last = trimmed, rows - 1 - trimmed
        network = network_for_mean(rows, first, last)
        assert len(network) <= len(merge_exchange(rows))
        found = np.stack(sorted_wires(values, network))[first : last + 1].mean(axis=0)
        np.testing.assert_allclose(found, ordered[first : last + 1].mean(axis=0), rtol=1e-12, atol=1e-14)
    assert network_for_mean(rows, 0, rows - 1) == ()


def test_size_of_networks() -> None:
    """The figures that the documentation states."""
    assert len(network_for_mean(20, 9, 10)) == 80
    assert len(network_for_mean(20, 4, 15)) == 84


@compiled
@pytest.mark.parametrize("rows", [1, 2, 5, 20, 60])
@pytest.mark.parametrize("columns", [1, 63, 200, CELL + 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kernels_agree_with_numpy(
    rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for work in (
        lambda: gram(TensorMatrix(values)),
        lambda: squared_norms(TensorMatrix(values)),
        lambda: combine(TensorMatrix(values), np.linspace(-1, 1, rows)).numpy(),
        lambda: RULES["trimmed_mean"].function(TensorMatrix(values), None, f=(rows - 1) // 3).vector.numpy(),
        lambda: (
            RULES["mean_around_median"].function(TensorMatrix(values), None, f=(rows - 1) // 3).vector.numpy()
        ),
    ):
        fast, plain = both(monkeypatch, work)
        np.testing.assert_allclose(fast, plain, rtol=tolerance, atol=tolerance * columns)
    fast, plain = both(monkeypatch, lambda: RULES["median"].function(TensorMatrix(values), None).vector)
    assert torch.equal(fast, plain)
    assert torch.equal(fast, torch.quantile(values.double(), 0.5, dim=0).to(dtype)) or rows % 2 == 0


@compiled
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_show(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule through kernels, whatever the number of threads, as without kernels."""
    monkeypatch.setattr("roundtable.aggregation.rows.column_threads._LEAST", 1 << 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    values = torch.randn(9, 3 * CELL + 77, generator=torch.Generator().manual_seed(2))
    clients = [ClientRow(f"silo-{index}") for index in range(9)]
    given: dict[str, dict[str, Any]] = {"centred_clipping": {"tau": 5.0}, "monna": {"pivot": "silo-2"}}
    for name, rule in RULES.items():
        parameters = {**({"f": 1} if rule.takes("f") else {}), **given.get(name, {})}
        settings_ = AggregationConfig(name, parameters)
        context = RuleContext(root_update=values.mean(dim=0))

        def work(settings_: AggregationConfig = settings_, context: RuleContext = context) -> torch.Tensor:
            return aggregate(TensorMatrix(values), clients, settings_, context=context).vector

        fast, plain = both(monkeypatch, work)
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


@compiled
@pytest.mark.parametrize("rule", ["mean", "median", "bulyan", "multi_krum", "geometric_median"])
def test_rows_in_another_order_are_not_moved(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels find the rows where they lie, and give to the bit what they give for rows in order."""
    monkeypatch.setattr(kernels_module, "WORTH_COMPILING", 1)
    monkeypatch.setattr(SelectedRows, "copies", None)
    values = torch.randn(12, 2 * CELL + 77, generator=torch.Generator().manual_seed(8))
    values[4, 5] = torch.nan
    clients = [ClientRow(f"silo-{index:02}") for index in range(len(values))]
    config = AggregationConfig(rule, {"f": 2} if RULES[rule].takes("f") else {})
    expected = aggregate(TensorMatrix(values), clients, config)
    order = [7, 2, 11, 0, 9, 5, 1, 10, 3, 4, 8, 6]
    found = aggregate(TensorMatrix(values[order]), [clients[index] for index in order], config)
    assert torch.equal(found.vector, expected.vector)
    assert found.weights == expected.weights
    assert [exclusion.client for exclusion in found.excluded] == ["silo-04"]


@compiled
@settings(max_examples=20, deadline=None)
@given(row=st.integers(0, 19), column=st.integers(0, 999), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_kernels_refuse_what_is_not_finite(row: int, column: int, bad: float) -> None:
    values = torch.randn(20, 1000, generator=torch.Generator().manual_seed(4))
    values[row, column] = bad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels_module, "WORTH_COMPILING", 1)
        with pytest.raises(AggregationError, match="not finite"):
            RULES["median"].function(TensorMatrix(values), None).vector  # noqa: B018


def test_small_matrices_never_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a small matrix must not start a compiler")

    monkeypatch.setattr(kernels_module, "load", refuse)
    values = torch.randn(20, 80_000, generator=torch.Generator().manual_seed(5))
    clients = [ClientRow(f"silo-{index:02}") for index in range(20)]
    settings_ = AggregationConfig("trimmed_mean", {"f": 4}, (("arc", {}), ("nnm", {})))
    assert torch.isfinite(aggregate(TensorMatrix(values), clients, settings_).vector).all()


@compiled
def test_the_cache_folder_must_belong_to_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = kernels_module.load.__wrapped__
    assert load() is not None
    libraries = list((tmp_path / "roundtable" / "kernels").iterdir())
    assert [path.suffix for path in libraries] == [".so"]
    os.chmod(tmp_path / "roundtable" / "kernels", 0o777)
    assert load() is None
    assert "writable by nobody else" in caplog.text


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    load = kernels_module.load.__wrapped__
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert load() is None
    monkeypatch.setenv("ROUNDTABLE_KERNELS", "off")
    assert load() is None


@compiled
def test_a_compiler_that_fails_costs_speed_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels_module.load.__wrapped__() is None
    assert "could not be compiled" in caplog.text
    assert not list((tmp_path / "roundtable" / "kernels").iterdir())


@pytest.mark.parametrize("pre", [(), (("arc", {"f": 2}), ("nnm", {"f": 2}))], ids=["alone", "arc+nnm"])
@pytest.mark.parametrize("name", sorted(RULES))
def test_what_an_accelerator_would_do_agrees_and_never_goes_through_numpy(
    name: str, pre: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic for accelerators, on tensors that give NumPy nothing unless they were fetched."""
    values = torch.randn(
        50 if name == "median" else 12, 3 * CELL + 5, generator=torch.Generator().manual_seed(9)
    )
    clients = [ClientRow(f"silo-{index:02}") for index in range(len(values))][::-1]
    given: dict[str, dict[str, Any]] = {"centred_clipping": {"tau": 5.0}, "monna": {"pivot": "silo-02"}}
    parameters = {**({"f": 2} if RULES[name].takes("f") else {}), **given.get(name, {})}

    def work() -> torch.Tensor:
        matrix, context = (
            TensorMatrix(values),
            RuleContext(root_update=values.mean(dim=0), previous=values[1]),
        )
        return aggregate(matrix, clients, AggregationConfig(name, parameters, pre), context=context).vector

    expected = work()
    for module in (
        "rows.matrix",
        "rows.kernels",
        "rows.reductions",
        "rows.row_passes",
        "rows.column_statistics",
    ):
        monkeypatch.setattr(f"roundtable.aggregation.{module}.accelerated", lambda device: True)
    fetched, to_numpy = set(), torch.Tensor.numpy

    def fetch(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        fetched.add(copy.data_ptr())
        return copy

    def refuse(tensor: torch.Tensor, *arguments: object, **options: object) -> np.ndarray:
        assert tensor.data_ptr() in fetched, "this would fail on a CUDA tensor"
        return to_numpy(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", fetch)
    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    monkeypatch.setattr(torch.Tensor, "__array__", refuse)
    torch.testing.assert_close(work(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(RULES))
def test_cuda_agrees_with_the_cpu(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = torch.randn(60 if name == "median" else 12, 300_000, generator=torch.Generator().manual_seed(6))
    clients = [ClientRow(f"silo-{index:02}") for index in range(len(values))]
    rule = RULES[name]
    given: dict[str, dict[str, Any]] = {"centred_clipping": {"tau": 5.0}, "monna": {"pivot": 2}}
    parameters = {**({"f": 2} if rule.takes("f") else {}), **given.get(name, {})}
    for pre in ((), (("arc", {"f": 2}), ("nnm", {"f": 2}))):
        found = [
            aggregate(
                TensorMatrix(values.to(device)),
                clients,
                AggregationConfig(name, parameters, pre),
                context=RuleContext(root_update=values.mean(dim=0).to(device), previous=values[1].to(device)),
                diagnose=True,
            )
            for device in ("cpu", "cuda")
        ]
        assert found[1].vector.device.type == "cuda"
        torch.testing.assert_close(found[1].vector.cpu(), found[0].vector, rtol=1e-5, atol=1e-6)
        assert found[1].weights == pytest.approx(found[0].weights, abs=1e-4)

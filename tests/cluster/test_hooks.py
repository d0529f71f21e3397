"""Gradients that do not travel exactly: what comes of them, what is kept, and what goes on after a break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cluster_cases import Case
from cluster_models import Language
from cluster_plans import STEPS, plan
from gradient_cases import (
    broken_off,
    encoded,
    keep_unsent,
    load_unsent,
    low_rank,
    one_not_finite,
    power_oracle,
)
from pretended_gpu import GPUS, a_gpu
from pydantic import ValidationError
from ranks import run_ranks

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.gradient_reduction import parse_reduction
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.stepping.encoded_gradients import EncodedGradients
from roundtable.core.encodings import get_encoding
from roundtable.core.errors import ConfigError


def test_low_rank_steps_are_those_of_the_paper() -> None:
    drawn = np.random.default_rng(3)
    matrices, start = drawn.normal(size=(2, 7, 5)), drawn.normal(size=(5, 2))
    expected = power_oracle(matrices, start, 4)
    assert np.abs(expected[3] - expected[0]).max() > 0.1
    for found in run_ranks(low_rank, 2, matrices.tolist(), start.tolist(), 2, 4):
        assert np.allclose(found, expected, rtol=0, atol=1e-12)


def test_low_rank_steps_equal_the_reference(reference_dir: Path) -> None:
    cases = json.loads((reference_dir / "compression_cases.json").read_text())["cases"]
    named = {case["name"]: case for case in cases}
    case = named["powersgd_rank1_ef"]
    # What two ranks have alike is its own mean.
    given = [case["input"]] * 2, case["encoding"]["Q0"], 1, 3
    for found in run_ranks(low_rank, 2, *given):
        expected = np.array(case["expected"]["decoded_rounds"])
        assert np.allclose(found, expected, rtol=0, atol=1e-8 * np.abs(expected).max())
    case = named["powersgd_summed_factors"]
    given = case["input"], case["encoding"]["Q0"], 2, 1
    for found in run_ranks(low_rank, 3, *given):
        expected = np.array(case["expected"]["decoded_sum"])
        assert np.allclose(3 * np.array(found[0]), expected, rtol=0, atol=1e-8 * np.abs(expected).max())


@pytest.mark.parametrize("chain", ["topk(ratio=0.05) | int8", "int4(block=64, rounding=stochastic)"])
def test_encoded_gradients_are_those_of_an_oracle_while_the_backward_pass_goes_on(chain: str) -> None:
    for found in run_ranks(encoded, 2, chain, 3):
        assert found["equal"] == [True] * 12
        assert found["elsewhere"]


def test_a_gradient_that_is_not_finite_is_so_on_all_ranks() -> None:
    assert run_ranks(one_not_finite, 2, "int8") == [[True], [True]]


def of(reduction: str, ranks: int = 2, **algorithm: object) -> Case:
    """Some steps of SGD, in float32."""
    return Case("case", plan("ddp", dp=ranks, reduction=reduction), Language(), {**STEPS, **algorithm})


@pytest.mark.parametrize("reduction", ["topk(ratio=0.1)", "powersgd(rank=2)"])
def test_a_round_goes_on_with_what_was_not_sent(reduction: str, tmp_path: Path) -> None:
    found = run_ranks(broken_off, 2, of(reduction, momentum=0.9), tmp_path)
    assert found == [{"same": True, "without memory": False}] * 2


@pytest.mark.slow
def test_fewer_ranks_send_what_more_had_not(tmp_path: Path) -> None:
    run_ranks(keep_unsent, 4, of("sign", 4), tmp_path)
    assert run_ranks(load_unsent, 2, of("sign"), tmp_path) == [{2.5}, {2.5}]


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"kind": "zero3", "fsdp": 2, "reduction": "topk(ratio=0.1)"}, "as much as the whole model's"),
        ({"kind": "zero2", "fsdp": 2, "dp": 2, "reduction": "int8"}, "summed twice"),
        ({"kind": "zero2", "fsdp": 2, "tp": 2, "reduction": "int8"}, "stand alone"),
        ({"kind": "zero3", "fsdp": 2, "reduction": "randomk(ratio=0.1)"}, "pieces of known sizes"),
        ({"kind": "ddp", "dp": 2, "reduction": "sign", "precision": "float16"}, "overflowed"),
        ({"kind": "zero3", "dp": 2, "reduction": "bfloat16", "local_steps": 2}, "reduce no gradients"),
    ],
)
def test_what_cannot_travel_so_is_refused(strategy: dict[str, object], said: str) -> None:
    kind = str(strategy.pop("kind"))
    with pytest.raises(ConfigError, match=said):
        plan(kind, **strategy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk", "either ratio or threshold"),
        ("powersgd(rank=0)", "greater than or equal to 1"),
        ("powersgd(bits=2)", "no parameter 'bits'"),
        ("exact(rank=2)", "takes no parameters"),
        ("bfloat16 | int8", "nothing can follow bfloat16"),
        ("float32", "is 'exact' here"),
        ("zip", "unknown encoding 'zip'.*powersgd"),
        ("topk(ratio=0.1, per=layer)", "no layout of 8 values"),
    ],
)
def test_a_reduction_that_is_none_is_said_to_be(text: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ClusterTable.model_validate({"strategy": {"reduction": text}})


def test_what_is_sent_and_kept_is_in_the_description() -> None:
    assert parse_reduction("topk(ratio=0.05) | int8").share == pytest.approx(0.022, rel=0.02)
    assert parse_reduction("int4").share == pytest.approx(1 / 8, rel=0.1)
    kept = {text: parse_reduction(text).keeps for text in ("exact", "bfloat16", "int8", "sign", "powersgd")}
    assert kept == {"exact": False, "bfloat16": False, "int8": False, "sign": True, "powersgd": True}
    assert "gradients by sign" in str(Strategy(plan("ddp", dp=2).mesh, "ddp", reduction="sign"))
    with pytest.raises(ValidationError, match="add up their gradients exactly"):
        ClusterTable.model_validate({"elastic": "replica", "strategy": {"reduction": "int8"}})


@pytest.mark.parametrize("kind", GPUS)
def test_gradients_on_a_gpu_are_encoded_there_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        for chain in ("topk(ratio=0.1) | int8", "sign", "int4(rounding=stochastic)"):
            here = _reduced(chain, "cpu")
            with a_gpu(kind):
                there = _reduced(chain, "cuda")
                assert all(each.device.type == "cuda" for each in there)
                found = [each.cpu() for each in there]
            assert all(map(torch.equal, found, here))
    finally:
        dist.destroy_process_group()


def _reduced(chain: str, device: str) -> list[torch.Tensor]:
    """A rank's gradient after three steps, and what it has left over."""
    weight: Any = torch.zeros(300, 20).to(device).requires_grad_()
    group: Any = dist.group.WORLD
    hook = EncodedGradients({weight: "w"}, group, get_encoding(chain))
    for step in range(3):
        gradient = torch.randn(300, 20, generator=torch.Generator().manual_seed(step)).to(device)
        hook.reduce([(weight, gradient)])
    return [gradient, *(left for _, left in hook.state(0))]

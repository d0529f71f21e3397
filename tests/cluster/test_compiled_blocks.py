"""Compiled blocks: tried, kept where they gain, remembered, and plain again where the compiler fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cluster_compiled import failing, fit_compiled, follow_trials, with_backend
from cluster_plans import case, plan
from ranks import run_ranks
from torch import Tensor, nn

from roundtable.cluster.stepping.compile_trial import cannot_compile
from roundtable.cluster.stepping.compiled_blocks import CompiledBlocks

STEPS = 12


class Branching(nn.Module):
    """No single graph: it looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if x.shape[0] == 3:
            raise ValueError("three examples are none of this layer's")
        return out if float(x.sum()) > 0 else -out


def test_a_trial_is_the_same_on_all_ranks_and_remembered(tmp_path: Path) -> None:
    trials = {
        "gains": [(1.0, 0.5, False, STEPS), (1.0, 0.6, False, STEPS)],
        "gains on one rank": [(1.0, 0.5, False, STEPS), (1.0, 0.99, False, STEPS)],
        "fails on one rank": [(1.0, 0.5, False, STEPS), (1.0, 0.5, True, STEPS)],
        "ends too early": [(1.0, 0.5, False, 8), (1.0, 0.5, False, 8)],
    }
    first, second = run_ranks(follow_trials, 2, tmp_path, trials)
    assert first == second
    said = {
        "gains": (True, "compiled: a step took 0.6 s with compiled blocks, 1 s without"),
        "gains on one rank": (False, "plain: a step took 0.99 s with compiled blocks, 1 s without"),
        "fails on one rank": (False, "plain: the compiler failed: BackendCompilerFailed: no compiler"),
    }
    for name, (on, text) in said.items():
        assert [tuple(each) for each in first[name]] == [(on, f"blocks are {text}")] * 2
    during, after = first["ends too early"]
    assert tuple(during) == (True, "blocks are being tried compiled")
    assert tuple(after) == (False, "blocks are plain: the ranks ended while compiled blocks were tried")


@pytest.mark.parametrize("backend", ["eager", failing], ids=["no graph", "no kernel"])
def test_what_cannot_be_compiled_is_plain_and_says_so(backend: object) -> None:
    block = Branching() if backend == "eager" else nn.Linear(4, 4)
    x = torch.randn(2, 4)
    expected = block(x)
    with with_backend(backend):
        blocks = CompiledBlocks([block])
        blocks.turn_on()
        assert blocks.on
        if backend == "eager":
            with pytest.raises(ValueError, match="three examples"):
                block(torch.randn(3, 4))
            assert blocks.on
        assert torch.equal(block(x), expected)
    assert not blocks.on
    assert blocks.failed.split(":")[0] in ("Unsupported", "UserError", "BackendCompilerFailed")
    assert "\n" not in blocks.failed
    blocks.turn_off()
    assert "forward" not in vars(block)


def test_what_would_not_stay_the_same_is_not_tried() -> None:
    assert cannot_compile(plan("zero3", fsdp=2), 4, private=False) == ""
    for strategy, blocks, private in [
        (plan("ddp", dp=2), 0, False),
        (plan("ddp", dp=2), 4, True),
        (plan(tp=2), 4, False),
        (plan(pp=2), 4, False),
        (plan("zero3", fsdp=2, checkpointing="every"), 4, False),
    ]:
        assert cannot_compile(strategy, blocks, private=private)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [plan("zero3", fsdp=2), plan("ddp", dp=2)], ids=["zero3", "ddp"])
def test_compiled_blocks_train_as_plain_ones_do(kind: object, tmp_path: Path) -> None:
    each = case("compiled", kind, {"steps": STEPS})  # type: ignore[arg-type]
    for found in run_ranks(fit_compiled, 2, each, tmp_path):
        assert found["on"], found["said"]
        assert found["worst"] < 1e-10
        assert found["said"].startswith("blocks are compiled: a step took")

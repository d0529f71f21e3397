"""Clipping comes after decoding: no encoding, honest or not, moves the sum further than the clip norm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from roundtable.aggregation.rows.encoded_matrix import rows_in_files
from roundtable.core import JobConfig, parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.engine import Rows, combine, initial_server_state, make_plan
from roundtable.engine.messages import RowReference, Update
from roundtable.engine.validation.transfer_composition import as_counted
from roundtable.privacy import SecureNoise, SecureRound, SeededNoise
from roundtable.privacy.audit.gaussian_bounds import least_mu
from roundtable.privacy.secagg import plain_sum

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
@pytest.mark.parametrize("up", ["qsgd(levels=1,block=4096)", "minmax(bits=2)", "randomk(ratio=0.2)", "int8"])
def test_an_update_that_becomes_longer_on_its_way_is_clipped_as_it_arrives(
    level: str, up: str, tmp_path: Path
) -> None:
    """The silo's vector has norm C; what is decoded of it may be longer, or whatever it claims."""
    plan = make_plan(parse_job(JOB.format(up=up, level=level)), population=50)
    encoding, path = as_counted(parse_job(JOB.format(up=up, level=level)), up), tmp_path / "update"
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
    most = CLIP / COHORT * (5 if up.startswith("randomk") else 1)
    if up.startswith(("qsgd", "minmax")):
        assert decoded(within) > 1.2 * CLIP, "the clip at the silo would not have held"
        assert float((published(1) - absent).norm()) == pytest.approx(CLIP / COHORT, rel=1e-3)
    assert decoded(1e6 * within) > 1e5 * CLIP
    assert float((published(1) - absent).norm()) <= most * (1 + 1e-4)


@pytest.mark.parametrize("weakened", [1.0, 0.7])
@pytest.mark.parametrize(
    ("level", "indices"),
    [("client", "own"), ("client", "cohort"), ("dp_ftrl", "own"), ("distributed", "cohort")],
)
def test_random_k_is_multiplied_after_the_noise_and_an_audit_finds_what_is_stated(
    level: str, indices: str, weakened: float, tmp_path: Path
) -> None:
    """The canary's update is far longer than C, in the values that are sent; all others are zero."""
    up = f"randomk(ratio=0.25, indices={indices})"
    stated = parse_job(
        JOB.format(up=up, level=level) + "dropout_tolerance = 0.0\n" * (level == "distributed")
    )
    weak = stated.model_copy(
        update={"privacy": stated.privacy.model_copy(update={"noise_multiplier": weakened})}
    )
    encoding, path, key = get_encoding(up), tmp_path / "update", StreamKey(0, "silo", 1, 1)

    def of_rows(job: JobConfig, signal: float) -> Tensor:
        plan, update = make_plan(job, population=50), torch.full((SIZE,), signal)
        path.write_bytes(b"".join(encoding.encode(update, key)))
        rows = rows_in_files([path], SIZE, [as_counted(job, up)], [key])
        updates = [Update("silo", RowReference(0), 1, loss=1.0)]
        state, model = initial_server_state(plan, SIZE), torch.zeros(SIZE)
        return combine(plan, Rows(rows, updates), model, state, round=1, seed=0, noise=SecureNoise()).vector

    def of_sums(job: JobConfig, signal: float) -> Tensor:
        round = SecureRound.of(job, SIZE, COHORT, 1)
        silos = [torch.full((SIZE,), signal), *torch.zeros(COHORT - 1, SIZE)]
        sources = [round.encode(update.numpy(), 1, None, noise=SecureNoise()) for update in silos]
        return round.decode(plain_sum(sources, round.parameters).total, COHORT, COHORT).vector

    publish = of_sums if level == "distributed" else of_rows
    noise = publish(weak, 0.0)
    sent = noise != 0
    if indices == "cohort":
        assert int(sent.sum()) == pytest.approx(SIZE / 4, rel=1e-3), (
            "what no silo sends shows no noise either"
        )
    # All values that are sent are C/cohort times 4 long together, and have noise beside: their mean tells.
    places = torch.from_numpy(encoding.places(SIZE, key if level != "distributed" else StreamKey(0, round=1)))
    moved = publish(weak, 1e3)[places].double().mean() * len(places) ** 0.5
    spread = float(noise[sent].double().std())
    assert float(moved) == pytest.approx(4 * CLIP / COHORT, abs=6 * spread)
    bound = least_mu(noise[sent].double().numpy()[None], np.array([4 * CLIP / COHORT]), 1 - 1e-6)
    if weakened == 1.0:
        # μ = 1/σ is charged for a round; dp_ftrl charges all rounds of a silo, and shares of noise allow for
        # silos that collude.
        assert (0.9 if level == "client" else 0.7) < bound <= 1.0
    else:
        assert bound > 1.0, "the audit refutes the stated noise"

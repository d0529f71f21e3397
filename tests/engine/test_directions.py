"""Cohorts chosen by where updates pointed: what is kept of them, and where that is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

from roundtable.aggregation import TensorMatrix
from roundtable.core import parse_job
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import Rows, combine, initial_server_state, make_plan
from roundtable.engine import messages as m

TABLE = """task = "t"
rounds = 2
[cohort]
strategy = "diversity"
balance = "directions"
[evaluation]
every = 0
"""


def update(client: str) -> m.Update:
    """An update of ten examples."""
    return m.Update(client, m.RowReference(0), 10)


def test_what_a_round_keeps_of_each_update_is_its_direction_and_nothing_of_one_left_out() -> None:
    plan = make_plan(parse_job(TABLE), 4)
    way = torch.randn(20_000, generator=torch.Generator().manual_seed(3))
    rows = torch.stack([way, 5 * way, -way, torch.full_like(way, torch.nan)])
    received = Rows(TensorMatrix(rows), [update(name) for name in "abcd"])
    state = initial_server_state(plan, 20_000)
    first = combine(plan, received, torch.zeros(20_000), state, round=1, seed=7)
    again = combine(plan, received, torch.ones(20_000), state, round=2, seed=7)
    told = first.event(m.Step(1, 1, m.TRAIN), "model", "", {}).directions
    assert set(told) == {"a", "b", "c"}
    assert told["a"] == told["b"] == again.account.directions["a"]
    a, c = (np.frombuffer(base64.b64decode(told[name]), dtype=np.int8) for name in "ac")
    assert np.array_equal(a, -c)
    assert len(a) == 128


@pytest.mark.parametrize(
    ("more", "error", "why"),
    [
        (
            '[aggregation]\nweighting = "uniform"\n[privacy]\nlevel = "client_local"\nclip_norm = 1.0\n'
            "delta = 1e-5\nnoise_multiplier = 1.0\n",
            PrivacyError,
            "compares single updates, which privacy levels and secure aggregation hide",
        ),
        ("[regions]\nsum = true\n", ConfigError, "regions.sum: a relay sends one sum, and cohort.balance"),
        (
            '[transfer]\nup = "topk(ratio=0.1)"\nfeedback = "ef21"\n',
            ConfigError,
            "compares what silos have sent in different rounds",
        ),
    ],
)
def test_it_is_refused_where_single_updates_are_hidden_or_are_none(
    more: str, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        make_plan(parse_job(TABLE + more), 10)

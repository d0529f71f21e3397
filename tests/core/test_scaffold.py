"""SCAFFOLD against reference cases computed by others, and what it declares."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roundtable.core.algorithms.contract import ClientRound, ServerRound
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.algorithms.scaffold import ScaffoldTable
from roundtable.core.layout import Layout

FILE = Path(os.environ.get("ROUNDTABLE_SHARED", "")) / "reference" / "algorithm_cases.json"


def cases() -> list[Any]:
    if not FILE.is_file():
        return [pytest.param({}, marks=pytest.mark.skip(reason="ROUNDTABLE_SHARED names no reference cases"))]
    document = json.loads(FILE.read_text(encoding="utf-8"))
    problems = document["problems"]
    return [
        pytest.param(
            {**case, **problems[case["problem"]], "turns": document["schedules"][case["schedule"]]},
            id=case["name"],
        )
        for case in document["cases"]
        if case["method"] == "scaffold" and case["params"]["option"] == 2
    ]


def gradient(case: Mapping[str, Any], client: Mapping[str, Any], rows: list[int], w: Tensor) -> Tensor:
    x = torch.tensor(client["x"], dtype=torch.float64)[rows]
    y = torch.tensor(client["y"], dtype=torch.float64)[rows]
    left = torch.sigmoid(x @ w) - y if case["kind"] == "logistic" else x @ w - y
    return x.T @ left / len(rows) + case.get("l2", 0.0) * w


def local_steps(case: Mapping[str, Any], number: str, batches: Any, start: Tensor, k: Tensor) -> Tensor:
    """local − global, by steps as torch's SGD takes them."""
    values, w, velocity = case["params"], start.clone(), torch.zeros_like(start)
    for rows in batches:
        g = gradient(case, case["clients"][int(number)], rows, w) + k + values.get("weight_decay", 0.0) * w
        velocity = values.get("momentum", 0.0) * velocity + g
        w = w - values["lr"] * velocity
    return w - start


@pytest.mark.parametrize("case", cases())
def test_its_hooks_give_the_reference(case: Mapping[str, Any]) -> None:
    """The client's and the server's part, in float64, with training written out here."""
    values, clients = case["params"], case["clients"]
    table = ScaffoldTable(
        name="scaffold",
        learning_rate=values["lr"],
        momentum=values.get("momentum", 0.0),
        weight_decay=values.get("weight_decay", 0.0),
    )
    algorithm = make_algorithm(table)
    server = algorithm.server()
    assert server is not None
    model = torch.tensor(case["w0"], dtype=torch.float64)
    control, kept = torch.zeros_like(model), [{} for _ in clients]
    shares = torch.tensor([len(client["y"]) for client in clients], dtype=torch.float64)
    if values.get("weights") == "uniform":
        shares = torch.ones(len(clients), dtype=torch.float64)
    shares /= shares.sum()
    for turn, expected, states in zip(case["turns"], case["global"], case["state"], strict=True):
        update, up, here = torch.zeros_like(model), torch.zeros_like(model), 0.0
        for number, batches in turn.items():
            own = kept[int(number)]
            round = ClientRound(
                Context("job", 1, number),
                algorithm.step(),
                values["lr"],
                model,
                {"control": control},
                own,
                Layout.of({"w": model}),
                [slice(0, len(model))],
            )
            k = algorithm.begin(round)
            assert k is not None
            sent = algorithm.end(round, local_steps(case, number, batches, model, k), len(batches))
            kept[int(number)] = dict(sent.kept)
            share = float(shares[int(number)])
            update, up, here = update + share * sent.update, up + share * sent.up["control"], here + share
        moved = server.step(
            ServerRound(
                1,
                model,
                {"control": control},
                update / here,
                {"control": up / here},
                {},
                # The share of those present, which is |S|/N for equal weights.
                here,
                1,
                lambda delta, x=model: x + values.get("server_lr", 1.0) * delta,  # type: ignore[arg-type]
            )
        )
        model, control = moved.model, moved.places["control"]
        torch.testing.assert_close(model, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            control, torch.tensor(states["c"], dtype=torch.float64), rtol=1e-9, atol=1e-9
        )

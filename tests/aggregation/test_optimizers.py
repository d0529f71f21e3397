"""Server optimizers against trajectories computed elsewhere, their state, and their schedules."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from roundtable.aggregation import OptimizerState, Schedule, make_optimizer
from roundtable.core import parse_job
from roundtable.core.errors import ConfigError, LayoutError

NAMES = {"adam": "fedadam", "yogi": "fedyogi", "adagrad": "fedadagrad", "avgm": "fedavgm"}
ALL = ("fedavg", "fedavgm", "diloco", "fedadagrad", "fedadam", "fedyogi", "fedlion")


def test_trajectories_match_the_reference(reference_dir: Path) -> None:
    cases = json.loads((reference_dir / "aggregation_cases.json").read_text())["server_optimizers"]
    checked = 0
    for case in cases:
        params = case["params"]
        if params["bias_correction"] == "t+1":
            continue
        options = {"learning_rate": params["lr"]}
        if case["kind"] == "avgm":
            options["momentum"] = params["b1"]
        else:
            options |= {
                "beta_1": params["b1"],
                "tau": params["tau"],
                "bias_correction": params["bias_correction"],
            }
            options |= {"beta_2": params["b2"]} if "b2" in params else {}
        optimizer = make_optimizer(NAMES[case["kind"]], options)
        model = torch.tensor(case["x0"], dtype=torch.float64)
        state = optimizer.init(len(model))
        state = OptimizerState(
            {name: vector.double() for name, vector in state.vectors.items()}, dict(state.scalars)
        )
        for step, delta in enumerate(case["deltas"]):
            state, model = optimizer.apply(state, model, torch.tensor(delta, dtype=torch.float64), step)
            expected = torch.tensor(case["expected_trajectory"][step], dtype=torch.float64)
            torch.testing.assert_close(model, expected, rtol=1e-9, atol=1e-12)
        checked += 1
    assert checked == 7


@pytest.mark.parametrize("name", ALL)
def test_resuming_from_saved_state_is_exact_and_arguments_stay_untouched(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = make_optimizer(name)
    deltas = [torch.randn(1000, generator=generator) for _ in range(6)]
    model, state = torch.zeros(1000), optimizer.init(1000)
    for step in range(3):
        state, model = optimizer.apply(state, model, deltas[step], step)
    saved = {key: vector.numpy().tobytes() for key, vector in state.vectors.items()}
    scalars, at_half = dict(state.scalars), model.clone()
    for step in range(3, 6):
        state, model = optimizer.apply(state, model, deltas[step], step)

    vectors = {key: torch.frombuffer(bytearray(data), dtype=torch.float32) for key, data in saved.items()}
    resumed, again = OptimizerState(vectors, scalars), at_half
    for step in range(3, 6):
        before = [again.clone(), *(vector.clone() for vector in resumed.vectors.values())]
        arguments = [again, *resumed.vectors.values()]
        resumed, again = optimizer.apply(resumed, again, deltas[step], step)
        assert all(torch.equal(was, now) for was, now in zip(before, arguments, strict=True))
    assert torch.equal(again, model)
    assert resumed.scalars == ({} if name == "fedavg" else {"steps": 6})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_state_follows_the_model_to_its_device(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    optimizer, model, delta = make_optimizer(name), torch.ones(5), torch.arange(5.0)
    state = optimizer.init(5)
    _, expected = optimizer.apply(state, model, delta, 0)
    state, found = optimizer.apply(state, model.cuda(), delta.cuda(), 0)
    assert all(vector.device.type == "cuda" for vector in (found, *state.vectors.values()))
    torch.testing.assert_close(found.cpu(), expected)


def test_slices_do_not_show_in_the_result() -> None:
    """A model longer than one slice moves as its pieces would."""
    columns = (1 << 18) + 77
    delta = torch.randn(columns, generator=torch.Generator().manual_seed(2))
    for name in ("fedadam", "fedyogi", "fedadagrad", "fedlion"):
        optimizer = make_optimizer(name)
        state, whole = optimizer.apply(optimizer.init(columns), torch.zeros(columns), delta, 0)
        _, tail = optimizer.apply(optimizer.init(77), torch.zeros(77), delta[-77:], 0)
        assert torch.equal(whole[-77:], tail)
        assert all(len(vector) == columns for vector in state.vectors.values())


def test_fedlion_moves_by_the_learning_rate() -> None:
    optimizer = make_optimizer("fedlion", {"learning_rate": 0.5})
    delta = torch.tensor([3.0, -1e-3, 0.0])
    state, model = optimizer.apply(optimizer.init(3), torch.zeros(3), delta, 0)
    assert model.tolist() == [0.5, -0.5, 0.0]
    torch.testing.assert_close(state.vectors["momentum"], 0.01 * delta)


def test_diloco_is_torchs_nesterov_by_the_negative_aggregate() -> None:
    """With the published settings where none are given; a schedule scales the step alone."""
    chance = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(7, generator=chance))
    theirs = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    ours = make_optimizer("diloco")
    model, state = weight.detach().clone(), ours.init(7)
    for step in range(5):
        delta = torch.randn(7, generator=chance)
        weight.grad = -delta
        theirs.step()
        state, model = ours.apply(state, model, delta, step)
        torch.testing.assert_close(model, weight.detach())
    job = parse_job('task = "t"\n[aggregation.server_optimizer]\nname = "diloco"')
    table = job.aggregation.server_optimizer
    assert (table.learning_rate, table.momentum) == (0.7, 0.9)
    with pytest.raises(ConfigError, match=r'set \[aggregation.server_optimizer\] name = "diloco"'):
        parse_job('task = "t"\n[algorithm]\nname = "diloco"')


def test_schedules() -> None:
    assert [Schedule("step", every=2, decay=0.5).factor(t) for t in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    cosine = Schedule("cosine", warm_up=2, rounds=12, floor=0.1)
    assert [cosine.factor(t) for t in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert math.isclose(cosine.factor(7), 0.55)
    assert math.isclose(cosine.factor(12), 0.1)
    assert math.isclose(cosine.factor(500), 0.1)
    model = torch.zeros(1)
    optimizer = make_optimizer("fedavg", {"learning_rate": 2.0}, {"name": "step", "every": 1, "decay": 0.5})
    state = optimizer.init(1)
    for step in range(3):
        state, model = optimizer.apply(state, model, torch.ones(1), step)
    assert model.item() == 2 + 1 + 0.5


@pytest.mark.parametrize(
    ("name", "parameters", "schedule", "message"),
    [
        ("adamw", {}, {}, "known are fedavg"),
        ("fedadam", {"lr": 1.0}, {}, "has no parameter 'lr'"),
        ("fedadam", {"beta_1": 1.0}, {}, r"beta_1 must be in \[0, 1\)"),
        ("fedadam", {"bias_correction": 1}, {}, "true or false"),
        ("fedavg", {"learning_rate": 0}, {}, "positive"),
        ("fedavg", {"learning_rate": "1"}, {}, "a number"),
        ("fedavg", {}, {"name": "linear"}, "must be one of"),
        ("fedavg", {}, {"name": "step"}, "needs every"),
        ("fedavg", {}, {"name": "cosine"}, "needs rounds"),
        ("fedavg", {}, {"warm_up": -1}, "cannot be -1"),
        ("fedavg", {}, {"wormup": 1}, "wormup"),
    ],
)
def test_what_cannot_be_used_is_refused(name: str, parameters: dict, schedule: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(name, parameters, schedule)


def test_state_of_another_model_is_refused() -> None:
    optimizer = make_optimizer("fedavgm")
    with pytest.raises(LayoutError, match="another model"):
        optimizer.apply(optimizer.init(3), torch.zeros(4), torch.zeros(4), 0)
    with pytest.raises(LayoutError, match="delta has 3"):
        optimizer.apply(optimizer.init(4), torch.zeros(4), torch.zeros(3), 0)

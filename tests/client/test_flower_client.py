"""A Flower client runs as it is; clients here are written after that API, without Flower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import roundtable as rt
from roundtable.core.errors import RoundtableError, TaskError

CLIENT = """
import numpy as np
import roundtable as rt

class Line:                       # fl.client.NumPyClient in the original
    def __init__(self, number):
        chance = np.random.default_rng(number)
        self.x = chance.normal(size=(20 + 10 * number, 3)).astype(np.float32)
        self.y = self.x @ np.array([1.0, -2.0, 0.5], np.float32) + number

    def get_parameters(self, config):
        return [np.zeros(3, np.float32), np.zeros((), np.float32)]

    def fit(self, parameters, config):
        w, b = parameters
        for _ in range(3):
            off = self.x @ w + b - self.y
            rate = config["learning_rate"]
            w, b = w - rate * self.x.T @ off / len(off), b - rate * off.mean()
        return [w, np.asarray(b)], len(self.y), {"round": float(config["server_round"])}

    def evaluate(self, parameters, config):
        off = self.x @ parameters[0] + parameters[1] - self.y
        return np.float32((off**2).mean()), len(self.y), {"near": np.float64((abs(off) < 1).mean())}

def client_fn(context):
    return Line(context.node_config["partition-id"])

task = rt.flower_client(client_fn)
"""
JOB = """
task = "line.py:task"
rounds = 4
[algorithm]
learning_rate = 0.1
[simulation]
clients = 3
"""


def made(folder: Path, text: str = CLIENT) -> dict[str, Any]:
    (folder / "line.py").write_text(text)
    (folder / "job.toml").write_text(JOB)
    names: dict[str, Any] = {}
    exec(compile(text, "line.py", "exec"), names)
    return names


def test_a_numpy_client_trains_to_the_weights_that_flowers_average_gives(tmp_path: Path) -> None:
    names = made(tmp_path)
    result = rt.simulate(tmp_path / "job.toml")
    clients = [names["Line"](number) for number in range(3)]
    weights = clients[0].get_parameters({})
    for number in range(1, 5):
        fitted = [each.fit(weights, {"learning_rate": 0.1, "server_round": number}) for each in clients]
        total = sum(count for _, count, _ in fitted)
        weights = [sum(each[0][place] * each[1] for each in fitted) / total for place in range(2)]
        measured = [each.evaluate(weights, {}) for each in clients]
        record = result.history[number - 1]
        for name, values in (
            ("loss", [loss for loss, _, _ in measured]),
            ("near", [found["near"] for _, _, found in measured]),
        ):
            expected = sum(value * each[1] for value, each in zip(values, measured, strict=True)) / total
            assert record[name] == pytest.approx(float(expected), rel=1e-4)
        assert record["train_round"] == number
    with pytest.raises(TaskError, match="keeps nothing between rounds"):
        rt.flower_client(lambda context: context.state).weights()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[w, np.asarray(b)], len", "[w], len"), r"returned 1 arrays of 2"),
        (
            ('len(self.y), {"round": float(config["server_round"])}', 'len(self.y), {"who": b"me"}'),
            "only numbers",
        ),
        (("[w, np.asarray(b)], len(self.y),", "[w, np.asarray(b)], 1.5,"), "reported 1.5 examples"),
        (("return Line(", "return print("), "without fit"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_words(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    assert change[0] in CLIENT
    made(tmp_path, CLIENT.replace(*change))
    with pytest.raises(RoundtableError, match=said):
        rt.simulate(tmp_path / "job.toml")


@pytest.mark.parametrize(
    "client_fn",
    [lambda cid: OldStyle(cid), lambda context: type("Wrapped", (), {"numpy_client": OldStyle("7")})()],
)
def test_older_ways_to_make_a_client_work(client_fn: Callable[..., Any]) -> None:
    task = rt.flower_client(client_fn, lambda: [np.ones(2)])
    assert [array.tolist() for array in task.weights().values()] == [[1.0, 1.0]]
    site = rt.Site("north", 7, 9)
    assert task.fit({"0": np.ones(2)}, site, {})[1] == 7
    assert task.evaluate({"0": np.ones(2)}, site) == {}


class OldStyle:
    def __init__(self, cid: str) -> None:
        self.count = int(cid)

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[Any, int, dict[str, float]]:
        return parameters, self.count, {}

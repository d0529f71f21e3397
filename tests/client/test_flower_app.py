"""Apps of Flower's message API run as they are; those here are written after its two quickstarts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from other_frameworks import SKLEARN_CLIENT, TORCH_CLIENT, write_quickstart

import roundtable as rt
from roundtable.client.adapters.flower_records import ArrayRecord, ConfigRecord, RecordDict
from roundtable.client.adapters.flower_stand_in import AppContext, ClientApp, Message, flower_stands_in
from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.task import initial_state

JOB = """
task = "federated.py:task"
rounds = 3
[model]
integers = "average"
[simulation]
clients = 3
"""


def quickstart(folder: Path, client: str = TORCH_CLIENT, name: str = "quickstart") -> Path:
    """The files of a Flower project, untouched, and ours beside them; its package is called `name`."""
    write_quickstart(folder, name, client)
    (folder / "job.toml").write_text(JOB)
    (folder / "federated.py").write_text(
        "import roundtable as rt\n"
        f'task = rt.flower_app("{name}/client_app.py:app", "{name}/task.py:Net",\n'
        '                     train_config={"lr": 0.05})\n'
    )
    return folder / "job.toml"


def averaged(app: Any, weights: Any, rounds: int, **config: float) -> tuple[Any, list[dict[str, float]]]:
    """FedAvg by hand over three clients, in Flower's words: the weights, and each round's metrics."""
    settings = {"batch-size": 12, "local-epochs": 1, "penalty": "l2"}
    history: list[dict[str, float]] = []
    for number in range(1, rounds + 1):
        found: dict[str, float] = {}
        for kind in ("train", "evaluate"):
            content = {
                "arrays": ArrayRecord(weights),
                "config": ConfigRecord({"server-round": number, **config}),
            }
            asked = Message(RecordDict(content), message_type=kind)
            replies = [
                app(
                    asked, AppContext(0, each, {"partition-id": each, "num-partitions": 3}, {}, settings)
                ).content
                for each in range(3)
            ]
            counts = [reply["metrics"]["num-examples"] for reply in replies]
            for name in replies[0]["metrics"]:
                found[name] = float(np.average([reply["metrics"][name] for reply in replies], weights=counts))
            if kind == "train":
                arrays = [reply["arrays"] for reply in replies]
                weights = {
                    name: np.asarray(
                        np.average([each[name].numpy() for each in arrays], 0, counts), old.dtype
                    )
                    for name, old in weights.items()
                }
        history.append(found)
    return weights, history


def test_the_pytorch_quickstart_trains_to_what_flowers_average_gives(tmp_path: Path) -> None:
    job = rt.load_job(quickstart(tmp_path, name="torch_start"))
    task = rt.load_task("federated.py:task", tmp_path)
    first = {name: value.numpy() for name, value in initial_state(task, job.seed).items()}
    assert not isinstance(task, rt.Task)
    result = rt.simulate(job, folder=tmp_path)
    assert "flwr" not in sys.modules
    with flower_stands_in():
        weights, history = averaged(task._app, first, 3, lr=0.05)  # type: ignore[attr-defined]
    trained = result.model.state_dict()
    for name in weights:
        # BatchNorm's counter is averaged too, and is a whole number at every client.
        slack = 1.0 if name.endswith("num_batches_tracked") else 2e-6
        np.testing.assert_allclose(trained[name], weights[name], rtol=2e-4, atol=slack, err_msg=name)
    for record, expected in zip(result.history, history, strict=True):
        for name, told in (("train_loss", "train_loss"), ("loss", "eval_loss"), ("acc", "eval_acc")):
            assert record[name] == pytest.approx(expected[told], rel=1e-4), name


def test_the_scikit_learn_quickstart_trains_to_what_flowers_average_gives(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    quickstart(tmp_path)
    (tmp_path / "client_app.py").write_text(SKLEARN_CLIENT)
    (tmp_path / "federated.py").write_text(
        'import roundtable as rt\ntask = rt.flower_app("client_app.py", "client_app.py:first")\n'
    )
    task = rt.load_task("federated.py:task", tmp_path)
    result = rt.simulate(tmp_path / "job.toml")
    with flower_stands_in():
        weights, history = averaged(task._app, task.weights(), 3)  # type: ignore[attr-defined, union-attr]
    trained = result.model.state_dict()
    for name in weights:
        np.testing.assert_allclose(trained[name], weights[name], rtol=1e-4, atol=1e-5)
    for record, expected in zip(result.history, history, strict=True):
        assert record["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)
        assert record["train_logloss"] == pytest.approx(expected["train_logloss"], rel=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "    model = Net()",
            '    context.state["n"] = MetricRecord({})\n    model = Net()',
            "context.state",
        ),
        ("(model.state_dict())", "([model.fc1.bias.detach().numpy()])", "other arrays than it got"),
        ('"num-examples": len', '"examples": len', "'num-examples'"),
        ('"train_loss": loss', '"train_loss": [loss, loss]', "'train_loss' is a list"),
        ('"train_loss": loss', '"train_loss": "small"', "'train_loss' is a str"),
        ("    return Message(content=content, reply_to=msg)", "    return content", "must return a Message"),
        ("@app.train()", "@app.query()", "is an analysis here"),
        (
            '"metrics": metrics}), reply_to=msg)',
            '"metrics": metrics}))\napp = print',
            "got a builtin_function",
        ),
        ("from flwr.common.logger import log", "from flwr.serverapp import Grid", r"coordinator runs rounds"),
        (
            "from flwr.common.logger import log",
            "from flwr.clientapp.mod import LocalDpMod",
            r"\[privacy\] table",
        ),
    ],
)
def test_what_an_app_cannot_have_here_is_refused_with_words(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in TORCH_CLIENT
    job = quickstart(tmp_path, TORCH_CLIENT.replace(old, new), tmp_path.name)
    with pytest.raises(RoundtableError, match=said):
        rt.simulate(job)


def test_a_partition_that_the_app_would_not_ask_is_refused(tmp_path: Path) -> None:
    job = quickstart(tmp_path, TORCH_CLIENT, "split_by_itself")
    job.write_text(f'{JOB}partition = {{ name = "dirichlet", alpha = 0.1 }}\n')
    with pytest.raises(ConfigError, match=r"partition: 'dirichlet' would split nothing.* by partition-id"):
        rt.simulate(job)


def test_a_flower_that_is_installed_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("flwr")
    monkeypatch.setitem(sys.modules, "flwr", real)
    with flower_stands_in(), flower_stands_in():
        assert sys.modules["flwr"] is not real
    assert sys.modules["flwr"] is real
    assert "flwr.app" not in sys.modules


def test_mods_and_a_lifespan_are_around_the_handler() -> None:
    app = ClientApp(mods=[lambda message, context, inner: (*inner(message, context), "app")])
    seen: list[str] = []

    @app.lifespan()
    def lifespan(context: Any) -> Iterator[None]:
        seen.append("before")
        yield
        seen.append("after")

    @app.train(mods=[lambda message, context, inner: (*inner(message, context), "own")])
    def train(message: Message, context: Any) -> tuple[str, ...]:
        return (*seen, "handler")

    assert app(Message(), AppContext(0, 0, {}, {}, {})) == ("before", "handler", "own", "app")
    assert seen == ["before", "after"]

"""An app of Flower's message API (`@app.train`, `@app.evaluate`) as a task.

What the handlers get and give follows FedAvg's convention of Flower 1.42: `content["arrays"]` and
`content["config"]` there, one ArrayRecord and one MetricRecord with `num-examples` back.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from typing_extensions import override

from roundtable.client.adapters.flower_client import FlowerTask
from roundtable.client.adapters.flower_records import ArrayRecord, ConfigRecord, NoState, RecordDict
from roundtable.client.adapters.flower_stand_in import AppContext, ClientApp, Message, flower_stands_in
from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import TaskError
from roundtable.core.paths import AnyPath
from roundtable.core.plugins.doors import described, import_file
from roundtable.core.plugins.folder_imports import load_inside
from roundtable.core.task import ArrayTask, Site

_EXAMPLES = "num-examples"
_PREFIXES = {"train": "train_", "evaluate": "eval_"}
"""What apps put before a metric's name, and tables here say anyway."""


def flower_app(
    app: AnyPath | ClientApp,
    weights: Callable[[], Any] | str,
    *,
    train_config: Mapping[str, Any] | None = None,
    evaluate_config: Mapping[str, Any] | None = None,
    run_config: Mapping[str, Any] | None = None,
) -> ArrayTask:
    """The task that an app of Flower's message API makes; the app's files stay as they are.

    `app` is its file, as `"quickstart/client_app.py:app"` (`app` where no name is given), relative to the
    file that calls; a `client_fn` may be named in the place of an app. Flower itself is not needed: its names
    are stood in for while the app is imported and while a handler runs. `weights` gives the first weights: a
    function, or a reference like `app` to one in the app's files; a module, a state_dict, a list or a dict
    of arrays. `train_config` and `evaluate_config` are what the app's server sends beside `server-round`.
    `run_config` is what handlers find in `context.run_config`, over `[tool.flwr.app.config]` of the nearest
    pyproject.toml and under the silo's own [data] table. `context.node_config` has `partition-id` and
    `num-partitions`: the client's number and how many there are in a simulation, 0 of 1 at a silo. Metrics
    lose the `train_` or `eval_` before their names, so that the loss is the table's loss.

    Raises TaskError for what cannot be carried, with what stands in its place: `context.state`, queries,
    replies with other keys than were sent, metrics that are no numbers.
    """
    home = Path(inspect.stack()[1].filename).parent
    found = app if isinstance(app, ClientApp) else _found(str(app), home, "app")
    if inspect.isfunction(found):
        found = ClientApp(found)
    if not isinstance(found, ClientApp):
        raise TaskError(
            "flower_app() takes the path of the file that makes the ClientApp, as client_app.py:app, and "
            f"got a {type(found).__name__}"
        )
    first = _first(weights, home)
    if found.client_fn is not None:
        return FlowerTask(found.client_fn, lambda: list(first().values()))
    if "train" not in found.handlers:
        others = ", ".join(sorted(found.handlers)) or "none"
        raise TaskError(
            f"the Flower app has no @app.train() (handlers: {others}). What asks and trains nothing is an "
            "analysis here (docs/analytics.md)"
        )
    settings = {**_pyproject(app, home), **(run_config or {})}
    return FlowerAppTask(found, first, settings, dict(train_config or {}), dict(evaluate_config or {}))


class FlowerAppTask(ArrayTask):
    """Handlers of a ClientApp behind the methods of an ArrayTask."""

    splits_by = "partition-id"

    def __init__(
        self,
        app: ClientApp,
        first: Callable[[], dict[str, np.ndarray]],
        run_config: Mapping[str, Any],
        train_config: Mapping[str, Any],
        evaluate_config: Mapping[str, Any],
    ) -> None:
        self._app = app
        self._first = first
        self._run_config = run_config
        self._train_config = train_config
        self._evaluate_config = evaluate_config

    @override
    def weights(self) -> dict[str, np.ndarray]:
        """The first weights, in the order in which handlers find them."""
        return self._first()

    @override
    def data(self, site: Site) -> Any:
        """The site itself: an app brings its own data."""
        return site

    @override
    def fit(
        self, weights: dict[str, np.ndarray], data: Any, options: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], int, dict[str, float]]:
        """One message to `@app.train()`."""
        config = {**self._train_config, "server-round": options.get("round", 0)}
        reply = self._asked("train", weights, data, config)
        records = list(reply.array_records.values())
        if len(records) != 1:
            raise TaskError(f"@app.train() must reply with one ArrayRecord, not {len(records)}")
        trained = {name: array.numpy() for name, array in records[0].items()}
        if trained.keys() != weights.keys():
            odd = sorted(trained.keys() ^ weights.keys())[:3]
            raise TaskError(
                f"@app.train() replied with other arrays than it got: {odd}. Return all of them, and name "
                "those that stay at the silo in [model] local"
            )
        count, means = _counted("train", reply)
        return trained, count, means

    @override
    def evaluate(
        self, weights: dict[str, np.ndarray], data: Any, context: Context | None = None
    ) -> Mapping[str, tuple[float, int]]:
        """One message to `@app.evaluate()`; nothing where the app has none."""
        if "evaluate" not in self._app.handlers:
            return {}
        config = {**self._evaluate_config, "server-round": 0 if context is None else context.round}
        count, means = _counted("evaluate", self._asked("evaluate", weights, data, config))
        return {name: (mean * count, count) for name, mean in means.items()}

    def _asked(
        self, kind: str, weights: dict[str, np.ndarray], site: Site, config: Mapping[str, Any]
    ) -> RecordDict:
        content = RecordDict({"arrays": ArrayRecord(weights), "config": ConfigRecord(config)})
        message = Message(content, dst_node_id=site.index, message_type=kind)
        place = {"partition-id": site.index, "num-partitions": site.count}
        settings = {**self._run_config, **site.options}
        with flower_stands_in():
            reply = self._app(message, AppContext(0, site.index, place, NoState(_no_state), settings))
        if not isinstance(reply, Message):
            raise TaskError(f"@app.{kind}() must return a Message, not a {type(reply).__name__}")
        if reply.has_error():
            raise TaskError(f"@app.{kind}() replied with an error: {reply.error}")
        return reply.content


def _counted(kind: str, content: RecordDict) -> tuple[int, dict[str, float]]:
    """The number of examples, and every other metric."""
    found = list(content.metric_records.values())
    if len(found) != 1 or _EXAMPLES not in found[0]:
        raise TaskError(f"@app.{kind}() must reply with one MetricRecord that has {_EXAMPLES!r}")
    metrics = dict(found[0])
    count = metrics.pop(_EXAMPLES)
    if isinstance(count, list) or count != int(count):
        raise TaskError(f"@app.{kind}() replied with {count!r} as {_EXAMPLES!r}: a whole number, please")
    for name, value in metrics.items():
        if isinstance(value, list):
            raise TaskError(f"@app.{kind}(): {name!r} is a list; give each of its numbers a name")
    before = _PREFIXES[kind]
    return int(count), {
        short if (short := name.removeprefix(before)) not in metrics else name: float(value)
        for name, value in metrics.items()
    }


def _no_state() -> None:
    raise TaskError(
        "context.state: a Flower app keeps nothing between rounds here. Weights that stay at a silo are "
        "[model] local; for more use an rt.Task"
    )


def _first(weights: Callable[[], Any] | str, home: Path) -> Callable[[], dict[str, np.ndarray]]:
    made = _found(weights, home, "") if isinstance(weights, str) else weights
    if not callable(made):
        raise TaskError(f"the first weights come from a function, not a {type(made).__name__}")

    def first() -> dict[str, np.ndarray]:
        with flower_stands_in():
            return _named(made())

    return first


def _named(given: Any) -> dict[str, np.ndarray]:
    if isinstance(given, nn.Module):
        given = given.state_dict()
    if isinstance(given, (list, tuple)):
        given = {str(place): array for place, array in enumerate(given)}
    if isinstance(given, ArrayRecord):
        given = {name: array.numpy() for name, array in given.items()}
    if not isinstance(given, Mapping) or not given:
        raise TaskError(
            f"the first weights are a module, a state_dict, a list or a dict of arrays, not a "
            f"{type(given).__name__}"
        )
    return {
        str(name): array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
        for name, array in given.items()
    }


def _found(reference: str, home: Path, otherwise: str) -> Any:
    """What a reference `file.py:name` names; the file is imported as a part of its package."""
    place, _, name = reference.partition(".py")
    name = name.removeprefix(":") or otherwise
    path = (home / f"{place}.py").resolve()
    with flower_stands_in():
        module = _imported(path)
    if not name or not hasattr(module, name):
        raise TaskError(f"flower_app(): {path.name} has no {name or 'name behind it: write file.py:name'!r}")
    return getattr(module, name)


def _imported(path: Path) -> ModuleType:
    said = "flower_app()"
    root = _root(path)
    if root == path.parent:
        return import_file(path, said, TaskError)
    if not path.is_file():
        raise TaskError(f"{said}: there is no file {path}")
    try:
        return load_inside(path, root)
    except (Exception, SystemExit) as error:
        raise TaskError(f"{said}: importing {path} failed: {described(error)}") from error


def _root(path: Path) -> Path:
    """The folder from which the app's own imports go."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _pyproject(app: AnyPath | ClientApp, home: Path) -> dict[str, Any]:
    """`[tool.flwr.app.config]` beside the app or its package; tables in it as names with dots."""
    if isinstance(app, ClientApp):
        return {}
    path = (home / f"{str(app).partition('.py')[0]}.py").resolve()
    file = _root(path) / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        table: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{file} cannot be read: {error}") from error
    for key in ("tool", "flwr", "app", "config"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return dict(_flat(table, ""))


def _flat(table: Any, before: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items() if isinstance(table, dict) else ():
        found += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(f"{before}{key}", value)]
    return found

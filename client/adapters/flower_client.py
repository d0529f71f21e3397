"""Flower's `NumPyClient` as a task: code written after that API runs here as it is.

Nothing of Flower need be installed: a client is whatever has `fit(parameters, config)`, with the weights
as a list of arrays. It is made anew for each call, as Flower does: what it keeps in attributes is lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from roundtable.core.errors import TaskError
from roundtable.core.task import ArrayTask, Site

_NUMBERS = (int, float, np.integer, np.floating, np.bool_)


@dataclass(frozen=True)
class FlowerContext:
    """What `client_fn(context)` reads: the client's number in a simulation, and the silo's own options."""

    node_id: int
    node_config: Mapping[str, Any]
    run_config: Mapping[str, Any]
    run_id: int = 0

    @property
    def state(self) -> Any:
        """Refused: nothing is kept here between rounds."""
        raise TaskError("context.state: a Flower client keeps nothing between rounds here; use an rt.Task")


def flower_client(
    client_fn: Callable[..., Any], weights: Callable[[], Sequence[np.ndarray]] | None = None
) -> ArrayTask:
    """The task that a Flower `client_fn` makes: name it in the job as `client.py:task`.

    `client_fn` takes Flower's context or, as of old, the client's number as text (`cid`), and returns a
    `NumPyClient` or its `.to_client()`. `context.node_config` has `partition-id` and `num-partitions`,
    `context.run_config` the silo's [data] table. `weights` gives the initial arrays; without it the
    first client's `get_parameters` is asked, where the job is submitted. The arrays are called "0",
    "1", ... in the list's order; whole numbers among them stay at the silo unless `[model] integers`
    says otherwise, where Flower averages them.

    `fit` gets a job's hyperparameters as its config, with `server_round`; its mean metrics must be
    numbers. Loss and metrics of `evaluate` become means over examples; its config is empty. Whatever
    does not fit raises TaskError.
    """
    return FlowerTask(client_fn, weights)


class FlowerTask(ArrayTask):
    """A `client_fn` behind the methods of an ArrayTask."""

    splits_by = "partition-id"

    def __init__(
        self, client_fn: Callable[..., Any], first: Callable[[], Sequence[np.ndarray]] | None = None
    ) -> None:
        if not callable(client_fn):
            raise TaskError(f"flower_client() takes a function, not a {type(client_fn).__name__}")
        self._client_fn = client_fn
        self._first = first

    @override
    def weights(self) -> dict[str, np.ndarray]:
        """The initial arrays by their place in the list."""
        if self._first is not None:
            return _named(self._first(), "weights()")
        client = self._client(Site("first", 0, 1))
        if not callable(getattr(client, "get_parameters", None)):
            raise TaskError(
                f"{type(client).__name__} has no get_parameters(): give flower_client() the first arrays as "
                "its second argument, a function"
            )
        return _named(client.get_parameters({}), f"{type(client).__name__}.get_parameters()")

    @override
    def data(self, site: Site) -> Any:
        """The site itself: a Flower client brings its own data."""
        return site

    @override
    def fit(
        self, weights: dict[str, np.ndarray], data: Any, options: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], int, dict[str, float]]:
        """One round of the client's own training."""
        client = self._client(data)
        config = {**options, "server_round": options.get("round", 0)}
        parameters, examples, metrics = _three(client, "fit", client.fit(_listed(weights), config))
        trained = _named(parameters, f"{type(client).__name__}.fit()")
        if len(trained) != len(weights):
            raise TaskError(
                f"{type(client).__name__}.fit() returned {len(trained)} arrays of {len(weights)}; name those "
                "that stay at the silo in [model] local, and return them all"
            )
        return trained, _count(client, "fit", examples), _means(client, "fit", metrics)

    @override
    def evaluate(self, weights: dict[str, np.ndarray], data: Any) -> Mapping[str, tuple[float, int]]:
        """The client's loss and metrics; nothing where it has no evaluate()."""
        client = self._client(data)
        if not callable(getattr(client, "evaluate", None)):
            return {}
        measured = client.evaluate(_listed(weights), {})
        loss, examples, metrics = _three(client, "evaluate", measured)
        count = _count(client, "evaluate", examples)
        means = {"loss": _number(client, "evaluate", "loss", loss)} | _means(client, "evaluate", metrics)
        return {name: (value * count, count) for name, value in means.items()}

    def _client(self, site: Site) -> Any:
        place = {"partition-id": site.index, "num-partitions": site.count}
        context = FlowerContext(site.index, place, dict(site.options))
        old = next(iter(inspect.signature(self._client_fn).parameters), "") == "cid"
        client = self._client_fn(str(site.index) if old else context)
        client = getattr(client, "numpy_client", client)
        if not callable(getattr(client, "fit", None)):
            raise TaskError(f"client_fn returned a {type(client).__name__} without fit(); give a NumPyClient")
        return client


def _listed(weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [weights[str(place)] for place in range(len(weights))]


def _named(arrays: Any, source: str) -> dict[str, np.ndarray]:
    if not isinstance(arrays, (list, tuple)) or not arrays:
        raise TaskError(f"{source} must give a list of arrays, not a {type(arrays).__name__}")
    return {str(place): np.asarray(array) for place, array in enumerate(arrays)}


def _three(client: Any, method: str, result: Any) -> tuple[Any, Any, Any]:
    if not isinstance(result, tuple) or len(result) != 3:
        raise TaskError(f"{type(client).__name__}.{method}() must return three values, as Flower's does")
    return result


def _count(client: Any, method: str, examples: Any) -> int:
    if isinstance(examples, bool) or not isinstance(examples, (int, np.integer)):
        raise TaskError(
            f"{type(client).__name__}.{method}() reported {examples!r} examples: a whole number, please"
        )
    return int(examples)


def _means(client: Any, method: str, metrics: Any) -> dict[str, float]:
    return {str(name): _number(client, method, str(name), value) for name, value in dict(metrics).items()}


def _number(client: Any, method: str, name: str, value: Any) -> float:
    if not isinstance(value, _NUMBERS):
        raise TaskError(
            f"{type(client).__name__}.{method}(): {name!r} is a {type(value).__name__}; only numbers are "
            "averaged"
        )
    return float(value)

"""A query that counts and sums over a table, as a survey: questions that a silo's policy can check.

What is read are calls of pandas and NumPy on a column: histograms, means, sums, counts, quantiles,
correlations.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from roundtable.migration.outcome import Migration
from roundtable.migration.sources import UNKNOWN, Source, arguments_of, calls_of, last_name, value_of

_MOMENTS = ("mean", "sum", "count", "std", "var", "size")
_QUANTILES = ("median", "quantile")
_BY_HAND = "ask by hand: docs/analytics.md"


def survey_of(outcome: Migration, source: Source, sources: list[Source], settings: Mapping[str, Any]) -> None:
    """Adds survey.toml to the outcome, or says what is in the way."""
    reading = _QueryReading(outcome, source, sources, settings)
    reading.read()
    if not reading.columns:
        outcome.lose("@app.query", source, 1, f"no columns could be read; {_BY_HAND}")
        return
    outcome.files["survey.toml"] = reading.text()
    outcome.carried.append(("@app.query", "survey.toml: roundtable analyse survey.toml"))


class _QueryReading:
    def __init__(
        self, outcome: Migration, source: Source, sources: list[Source], settings: Mapping[str, Any]
    ) -> None:
        self.outcome = outcome
        self.source = source
        self.sources = sources
        self.settings = settings
        self.columns: dict[str, tuple[float, float] | None] = {}
        self.histograms: dict[str, int] = {}
        self.described: list[str] = []
        self.quantiles: dict[str, list[float]] = {}
        self.correlated = False

    def read(self) -> None:
        for _, call in calls_of(self.source.tree, ("histogram",)):
            self._histogram(call)
        for name, call in calls_of(self.source.tree, (*_MOMENTS, *_QUANTILES, "corr", "value_counts")):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if name == "corr":
                self.correlated = True
            elif name == "value_counts":
                self.outcome.lose("value_counts()", self.source, call, f'ask = "table"; {_BY_HAND}')
            for column in self._columns(owner):
                self.columns.setdefault(column, None)
                if name in _MOMENTS and column not in self.described:
                    self.described.append(column)
                if name in _QUANTILES:
                    at = self._value(call.args[0], call) if name == "quantile" and call.args else 0.5
                    places = at if isinstance(at, list) else [at]
                    self.quantiles.setdefault(column, []).extend(p for p in places if isinstance(p, float))

    def text(self) -> str:
        """survey.toml."""
        lines = [f"# Made by `roundtable migrate flower` of {self.source.shown}.", 'table = "patients"']
        for column, limits in self.columns.items():
            lines += ["", f"[columns.{_key(column)}]"]
            if limits is None:
                self.outcome.lose(f"the range of {column}", self.source, 1, "least and most in survey.toml")
                lines += [
                    "# least = 0    # values outside of these are a mistake that the silo reports",
                    "# most = 1",
                ]
            else:
                lines += [f"least = {limits[0]!r}", f"most = {limits[1]!r}"]
        if self.described:
            lines += self._question("describe", f"columns = {json.dumps(self.described)}")
        for column, bins in self.histograms.items():
            lines += self._question("histogram", f'column = "{column}"', f"bins = {bins}", name=column)
        for column, at in self.quantiles.items():
            places = json.dumps(sorted(set(at)))
            lines += self._question("quantiles", f'column = "{column}"', f"at = {places}", name=column)
        if self.correlated:
            lines += self._question("correlation", f"columns = {json.dumps([*self.columns])}")
        return "\n".join(
            [*lines, "", "# [silos]", '# north = "north.csv"    # to answer on this machine', ""]
        )

    def _question(self, ask: str, *keys: str, name: str = "") -> list[str]:
        return ["", "[[questions]]", f'name = "{f"{ask} {name}".strip()}"', f'ask = "{ask}"', *keys]

    def _histogram(self, call: ast.Call) -> None:
        given = arguments_of(call)
        values = call.args[0] if call.args else given.get("a")
        edges = call.args[1] if len(call.args) > 1 else given.get("bins")
        limits, bins = self._bins(edges, call)
        if bins == 0:
            self.outcome.lose("np.histogram()", self.source, call, f"edges of equal width; {_BY_HAND}")
            return
        for column in self._columns(values):
            self.histograms[column] = bins
            self.columns[column] = limits if limits is not None else self.columns.get(column)

    def _bins(self, edges: ast.expr | None, call: ast.Call) -> tuple[tuple[float, float] | None, int]:
        """(least, most) and how many; 0 where that cannot be read."""
        if isinstance(edges, ast.Call) and last_name(edges.func) == "linspace":
            given = [self._value(each, call) for each in edges.args]
            if len(given) == 3 and all(isinstance(each, (int, float)) for each in given):
                return (float(given[0]), float(given[1])), int(given[2]) - 1
            return None, 0
        value = self._value(edges, call)
        if isinstance(value, int):
            within = self._value(arguments_of(call).get("range"), call)
            pair = (float(within[0]), float(within[1])) if isinstance(within, (list, tuple)) else None
            return pair, value
        if isinstance(value, list) and len(value) > 1:
            width = (value[-1] - value[0]) / (len(value) - 1)
            if all(abs(high - low - width) <= 1e-9 * width for low, high in pairwise(value)):
                return (float(value[0]), float(value[-1])), len(value) - 1
        return None, 0

    def _columns(self, node: ast.expr | None) -> list[str]:
        """The columns that `frame["age"]` or `frame[name]`, in a loop over names, may be."""
        if not isinstance(node, ast.Subscript):
            return []
        value = self._value(node.slice, node)
        if isinstance(value, str):
            return [value]
        return self._looped(node.slice.id) if isinstance(node.slice, ast.Name) else []

    def _looped(self, name: str) -> list[str]:
        for loop in ast.walk(self.source.tree):
            if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and loop.target.id == name:
                value = self._value(loop.iter, loop)
                if isinstance(value, list):
                    return [each for each in value if isinstance(each, str)]
                return self._chosen()
        return []

    def _chosen(self) -> list[str]:
        """What a server or pyproject.toml names as the columns, where the client loops over `.columns`."""
        for source in self.sources:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Dict):
                    found = value_of(node, [source.tree], self.settings)
                    for key, value in found.items() if isinstance(found, dict) else ():
                        if "feature" in str(key) or "column" in str(key):
                            return [str(each) for each in value] if isinstance(value, list) else []
        for key, value in self.settings.items():
            if ("feature" in key or "column" in key) and isinstance(value, str):
                return [each.strip() for each in value.split(",")]
        return []

    def _value(self, node: ast.expr | None, around: ast.AST) -> Any:
        function = self.source.function_around(around)
        bodies = [self.source.tree] if function is None else [function, self.source.tree]
        found = value_of(node, bodies, self.settings)
        return None if found is UNKNOWN else found


def _key(column: str) -> str:
    return column if column.isidentifier() and column.isascii() else json.dumps(column)

"""Partitions of others: a function of an installed package, or of a file beside the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from roundtable.core.errors import ConfigError
from roundtable.core.paths import AnyPath
from roundtable.core.plugins.calls import as_function, check_parameters, foreign_call, named_at
from roundtable.core.plugins.doors import resolve
from roundtable.simulation.world.natural_names import checked_names
from roundtable.simulation.world.split import Split

ENTRY_POINT_GROUP = "roundtable.partitions"
_ARGUMENTS = ("labels", "count", "seed")
_TABLE = ("simulation", "partition")


@dataclass(frozen=True)
class ForeignPartitioner:
    """A function `(labels, count, seed, **parameters) → owners`: the client's number of each row, [n]; or
    `(owners, names)`, with what the clients are called."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any]
    smallest: int
    remedy: str = "have fewer clients"

    def assign(self, labels: np.ndarray, count: int, seed: int) -> Split:
        reference = f"partition {self.name!r}"
        with named_at(*_TABLE), foreign_call(reference, self.function, ConfigError):
            given = self.function(labels.copy(), count, seed, **self.parameters)
            named = isinstance(given, tuple) and len(given) == 2
            owners = np.asarray(given[0] if named else given)
        if owners.shape != labels.shape or owners.dtype.kind not in "iu":
            raise ConfigError(
                f"{reference} gave {owners.dtype} {list(owners.shape)}, not a whole number for each of "
                f"{len(labels)} rows",
                key=_TABLE,
            )
        wrong = np.flatnonzero((owners < 0) | (owners >= count))
        if len(wrong):
            raise ConfigError(
                f"{reference} gave row {wrong[0]} to client {owners[wrong[0]]}; clients are numbered from 0 "
                f"to {count - 1}",
                key=_TABLE,
            )
        try:
            names = checked_names(given[1], count) if named else None
        except ValueError as error:
            raise ConfigError(f"{reference}: {error}", key=_TABLE) from None
        return Split.from_owners(owners.astype(np.int64), count, names)


def find_partitioner(
    spec: Mapping[str, Any], builtins: Mapping[str, Any], folder: AnyPath | None
) -> ForeignPartitioner:
    """Somebody else's partition; its parameters are the table's keys beside `name` and `min_size`.

    Raises ConfigError, with the table's key, where there is none or what the table says does not fit it.
    """
    name = spec["name"]
    with named_at(*_TABLE, "name"):
        definition = resolve("partition", name, builtins, ENTRY_POINT_GROUP, folder)
        function = as_function("partition", name, definition, _ARGUMENTS)
    parameters = {key: value for key, value in spec.items() if key not in ("name", "min_size")}
    check_parameters(f"partition {name!r}", function, parameters, skip=len(_ARGUMENTS), table=_TABLE)
    smallest = spec.get("min_size", 1)
    if type(smallest) is not int or smallest < 0:
        raise ConfigError(f"min_size: a whole number from 0 on, not {smallest!r}", key=(*_TABLE, "min_size"))
    return ForeignPartitioner(name, function, parameters, smallest)

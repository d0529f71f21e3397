"""Who has what: how one data set is split among simulated clients.

A partitioner is a frozen table of its parameters with one method, `assign`. Every split is an exact
cover (each row belongs to one client), depends on nothing but the labels, the number of clients
and the seed, and is computed once for all clients together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from blake3 import blake3
from pydantic import Field

from roundtable.core.errors import ConfigError
from roundtable.core.paths import AnyPath
from roundtable.core.seeds import numpy_generator
from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Finite, Table
from roundtable.simulation.world.foreign_partition import find_partitioner
from roundtable.simulation.world.split import Split

_REDRAWS = 50
_CACHED = 8


class Partitioner(Protocol):
    """One way to split."""

    @property
    def name(self) -> str:
        """Its name in the job file."""

    @property
    def smallest(self) -> int:
        """Rows that every client must have."""

    @property
    def remedy(self) -> str:
        """What to change where a client has fewer."""

    def assign(self, labels: np.ndarray, count: int, seed: int) -> Split:
        """The split of `len(labels)` rows among `count` clients."""


class _Partitioner(Table):
    remedy: ClassVar[str] = "have fewer clients"

    min_size: int = Field(1, ge=0, description="rows every client must have; 0 allows empty clients")

    @property
    def smallest(self) -> int:
        """Rows that every client must have."""
        return self.min_size


class Iid(_Partitioner):
    """Rows dealt out at random, sizes equal to within one."""

    name: Literal["iid"] = "iid"

    def assign(self, labels: np.ndarray, count: int, seed: int) -> Split:
        owners = np.arange(len(labels)) % count
        return Split.from_owners(numpy_generator(seed, "partition").permutation(owners), count)


class Dirichlet(_Partitioner):
    """Each label's rows are split in proportions drawn from Dir(alpha) (Hsu et al. 2019; Yurochkin 2019).

    The proportions depend on the seed, the label and the number of clients alone, so that a train
    and a test set that are split alike give a client the same mixture of labels in both.
    """

    remedy: ClassVar[str] = "raise alpha, have fewer clients"

    name: Literal["dirichlet"] = "dirichlet"
    alpha: Finite = Field(0.5, gt=0, description="concentration: 0.1 is very uneven, 100 nearly iid")

    def assign(self, labels: np.ndarray, count: int, seed: int) -> Split:
        kinds, codes = np.unique(labels, return_inverse=True)
        codes = codes.reshape(-1)
        for redraw in range(_REDRAWS):
            owners = np.empty(len(codes), dtype=np.int64)
            for code, kind in enumerate(kinds.tolist()):
                generator = numpy_generator(seed, "partition", str(kind), count, redraw)
                shares = generator.dirichlet(np.full(count, self.alpha))
                rows = generator.permutation(np.flatnonzero(codes == code))
                ends = np.rint(np.cumsum(shares) * len(rows)).astype(np.int64)
                owners[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right").clip(max=count - 1)
            if np.bincount(owners, minlength=count).min() >= self.min_size:
                break
        return Split.from_owners(owners, count)


class Shards(_Partitioner):
    """Rows sorted by label, cut into equal shards, so many a client (McMahan et al. 2017, section 3)."""

    remedy: ClassVar[str] = "have fewer clients or fewer shards a client"

    name: Literal["shards"] = "shards"
    shards: int = Field(2, ge=1, description="shards a client: most clients see at most so many labels")

    def assign(self, labels: np.ndarray, count: int, seed: int) -> Split:
        generator = numpy_generator(seed, "partition")
        shuffled = generator.permutation(len(labels))
        order = shuffled[np.argsort(labels[shuffled], kind="stable")]
        cards = generator.permutation(count * self.shards) // self.shards
        owners = np.empty(len(labels), dtype=np.int64)
        for rows, owner in zip(np.array_split(order, len(cards)), cards, strict=True):
            owners[rows] = owner
        return Split.from_owners(owners, count)


class Quantity(_Partitioner):
    """Random rows in sizes that differ: lognormal, or a power law over the clients' rank."""

    remedy: ClassVar[str] = "lower sigma or exponent, have fewer clients"

    name: Literal["quantity"] = "quantity"
    distribution: Literal["lognormal", "power"] = Field("lognormal", description="of the clients' sizes")
    sigma: Finite = Field(1.0, ge=0, description="lognormal: standard deviation of the sizes' logarithm")
    exponent: Finite = Field(1.0, ge=0, description="power: size proportional to rank ** -exponent")

    def assign(self, labels: np.ndarray, count: int, seed: int) -> Split:
        generator = numpy_generator(seed, "partition")
        if self.distribution == "lognormal":
            weights = generator.lognormal(0.0, self.sigma, count)
        else:
            weights = generator.permutation(np.arange(1, count + 1, dtype=np.float64) ** -self.exponent)
        spare = max(0, len(labels) - count * self.min_size)
        ends = np.rint(np.cumsum(weights / weights.sum()) * spare).astype(np.int64)
        sizes = np.diff(ends, prepend=0) + min(self.min_size, len(labels) // count)
        sizes[-1] += len(labels) - sizes.sum()
        owners = np.repeat(np.arange(count), sizes)
        return Split.from_owners(generator.permutation(owners), count)


class Natural(_Partitioner):
    """The array that the task gives to `site.shard` holds a key a row, such as a writer or a speaker.

    A key's rows are never divided. With as many clients as keys, client i has the i-th key in
    sorted order, and its name if keys are texts or numbers other than 0, 1, 2, …; with fewer, keys are dealt
    out at random, numbers of keys equal to within one.
    """

    remedy: ClassVar[str] = "have at most as many clients as there are keys"

    name: Literal["natural"] = "natural"

    def assign(self, labels: np.ndarray, count: int, seed: int) -> Split:
        keys, codes = np.unique(labels, return_inverse=True)
        owner = np.arange(len(keys)) % count
        if count < len(keys):
            owner = numpy_generator(seed, "partition").permutation(owner)
        names = _names(keys.tolist()) if count == len(keys) else None
        return Split.from_owners(owner[codes.reshape(-1)], count, names)


def _names(keys: list[Any]) -> tuple[str, ...] | None:
    """Keys that say more than the number of their client."""
    numbers = all(type(key) is int for key in keys)
    if not (numbers or all(isinstance(key, str) for key in keys)) or keys == [*range(len(keys))]:
        return None
    return tuple(map(str, keys))


PARTITIONERS: dict[str, type[_Partitioner]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity": Quantity,
    "natural": Natural,
}


class SeededPartition:
    """A partitioner under a seed: what `Site.partition` calls.

    Keeps the assignments of the last few label arrays. An array is known again by its memory while
    it is held here, else by its content, so that a task may load its labels anew for each client.
    """

    def __init__(self, partitioner: Partitioner, seed: int) -> None:
        self.partitioner = partitioner
        self.seed = seed
        self._by_memory: OrderedDict[tuple[Any, ...], tuple[np.ndarray, Split]] = OrderedDict()
        self._by_content: OrderedDict[tuple[str, int], Split] = OrderedDict()
        self._names: dict[int, tuple[str, ...] | None] = {}

    def __call__(self, labels: np.ndarray, index: int, count: int) -> np.ndarray:
        """Row numbers of client `index` of `count`; ConfigError where a client would have too few."""
        return self.assignment(labels, count).of(index)

    def names(self, count: int) -> tuple[str, ...] | None:
        """What the splits so far call `count` clients; None where none does, or two call them differently."""
        return self._names.get(count)

    def assignment(self, labels: np.ndarray, count: int) -> Split:
        """The whole split; computed at the first call, then remembered."""
        memory = (
            labels.__array_interface__["data"][0],
            labels.shape,
            labels.strides,
            labels.dtype.str,
            count,
        )
        held = self._by_memory.get(memory)
        if held is not None:
            return held[1]
        content = (_fingerprint(labels), count)
        assignment = self._by_content.get(content)
        if assignment is None:
            assignment = self._assign(labels, count)
            _remember(self._by_content, content, assignment)
        _remember(self._by_memory, memory, (labels, assignment))
        return assignment

    def _assign(self, labels: np.ndarray, count: int) -> Split:
        name, smallest = self.partitioner.name, self.partitioner.smallest
        if labels.ndim != 1:
            raise ConfigError(
                f"site.shard takes one label a row, an array of one dimension; got shape {list(labels.shape)}"
            )
        assignment = self.partitioner.assign(labels, count, self.seed)
        sizes = assignment.sizes
        lacking = int((sizes < smallest).sum())
        if lacking:
            first = int(np.argmax(sizes < smallest))
            what = "empty" if not sizes[first] else f"with {sizes[first]} rows"
            raise ConfigError(
                f"simulation.partition: {name} leaves {lacking} of {count} clients with fewer than "
                f"min_size = {smallest} of {len(labels)} rows (client {first} is {what}); "
                f"{self.partitioner.remedy}, "
                f"or allow it with min_size = {int(sizes.min())}"
            )
        if (
            assignment.names is not None
            and self._names.setdefault(count, assignment.names) != assignment.names
        ):
            self._names[count] = None
        return assignment


def make_partition(spec: Mapping[str, Any], seed: int, folder: AnyPath | None = None) -> SeededPartition:
    """The partition of a `[simulation.partition]` table, for example `{"name": "dirichlet", "alpha": 0.3}`.

    The same table and seed give the same split anywhere. `folder` is where a partition is that is named as
    file.py:function; None refuses it. Raises ConfigError for an unknown name (with the known ones) or
    parameter.
    """
    return SeededPartition(parse_partitioner(spec, folder), seed)


def parse_partitioner(spec: Mapping[str, Any], folder: AnyPath | None = None) -> Partitioner:
    """The checked table; ConfigError names the key and what was expected."""
    name = spec.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"simulation.partition: name is {name!r}; known: {', '.join(PARTITIONERS)}")
    if name not in PARTITIONERS:
        return find_partitioner(spec, PARTITIONERS, folder)
    document = TomlDocument(dict(spec), "simulation.partition", "")
    partitioner: Partitioner = validate(PARTITIONERS[name], document)  # type: ignore[assignment]
    return partitioner


def _fingerprint(labels: np.ndarray) -> str:
    data = np.ascontiguousarray(labels)
    body = repr(data.tolist()).encode() if data.dtype.hasobject else data.view(np.uint8).reshape(-1).data
    head = f"{data.dtype.str} {data.shape} ".encode()
    return blake3(head).update(body).hexdigest()


def _remember(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    cache[key] = value
    while len(cache) > _CACHED:
        cache.popitem(last=False)

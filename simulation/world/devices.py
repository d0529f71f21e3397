"""Devices in virtual time: how fast each client is, and when it is there.

Everything about a client follows from the job's seed and its number. What is kept is one number a
client and quantity, as an array, and only for quantities that differ between clients.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from roundtable.core.errors import ConfigError
from roundtable.core.observability.link_estimate import LinkEstimate, Rate
from roundtable.core.quantities import parse_size
from roundtable.core.seeds import numpy_generator
from roundtable.simulation.world.config import DevicesTable, Lognormal

_COLUMNS = ("client", "start", "end")
_RATES = ("speed", "download", "upload")
_FACTS = ("gpus", "memory", "disk", "selected", "completed")
_METADATA = "metadata."
_MOST_CHARACTERS = 500


@dataclass(frozen=True)
class Transfer:
    """Bytes that a round moves for each client."""

    down: int
    up: int


class Devices:
    """The devices of `count` clients."""

    def __init__(self, table: DevicesTable, count: int, seed: int, folder: Path | None = None) -> None:
        self.table = table
        self.count = count
        self._seed = seed
        self._rates = {name: self._drawn(name, getattr(table, name)) for name in _RATES}
        self._trace = _read_trace((folder or Path()) / table.trace) if table.trace is not None else None
        if self._trace is not None:
            self._rates.update(self._trace.rates)
        self._phase = (
            numpy_generator(seed, "devices", "phase").random(count) if table.availability < 1.0 else None
        )

    def traces(self, column: str) -> bool:
        """Whether the trace has this column of facts."""
        return self._trace is not None and column in self._trace.facts

    @property
    def traced_metadata(self) -> tuple[str, ...]:
        """What the trace lets clients declare: the KEY of each column `metadata.KEY`."""
        columns = self._trace.facts if self._trace is not None else {}
        return tuple(name.removeprefix(_METADATA) for name in columns if name.startswith(_METADATA))

    def traced(self, column: str, index: int) -> str | None:
        """What the trace says of client `index` in a column of facts; None for nothing."""
        if self._trace is None or column not in self._trace.facts:
            return None
        return self._trace.facts[column].get(index % self._trace.devices)

    @property
    def instant(self) -> bool:
        """Whether work takes no time, so that nobody needs to know how much of it there is."""
        return not self.table.latency and all(rate is None for rate in self._rates.values())

    @property
    def always_there(self) -> bool:
        """Whether nobody ever goes away."""
        return self._trace is None and self._phase is None

    def seconds(self, index: int, round: int, examples: int, transfer: Transfer) -> float:
        """From being asked to the update's arrival: latency, download, training on `examples`, upload."""
        if self.instant:
            return 0.0
        amounts = {"speed": examples, "download": transfer.down, "upload": transfer.up}
        total = self.table.latency + sum(
            amount / self._rate(name, index) for name, amount in amounts.items() if amount
        )
        return total * self._jitter(index, round)

    def way_seconds(self, index: int, round: int, transfer: Transfer) -> tuple[float | None, float | None]:
        """What of `seconds` is the model's way down, and the update's up; None where no rate is stated."""
        jitter = self._jitter(index, round)
        ways = {"download": transfer.down, "upload": transfer.up}
        down, up = (
            None if self._rates[name] is None else size / self._rate(name, index) * jitter
            for name, size in ways.items()
        )
        return down, up

    def link(self, index: int) -> LinkEstimate:
        """The client's line as if it had been measured."""
        up, down = self._rate("upload", index), self._rate("download", index)
        return LinkEstimate(
            up=Rate(up, 1.0) if up < inf else Rate(),
            down=Rate(down, 1.0) if down < inf else Rate(),
            round_trip=Rate(self.table.latency, 1.0) if self.table.latency else Rate(),
        )

    @property
    def upload_takes_time(self) -> bool:
        """Whether clients have a rate at which they upload."""
        return self._rates["upload"] is not None

    def online(self, now: float) -> np.ndarray | None:
        """Ascending numbers of those that are there at time `now`; None for everybody."""
        if self._trace is not None:
            there = self._trace.online(now)[np.arange(self.count) % self._trace.devices]
        elif self._phase is not None:
            there = (now / self.table.period + self._phase) % 1.0 < self.table.availability
        else:
            return None
        return np.flatnonzero(there)

    def leaves_at(self, index: int, now: float) -> float:
        """When client `index` goes away next: `now` if it is not there, inf if it never does."""
        if self._trace is not None:
            return self._trace.leaves_at(index % self._trace.devices, now)
        if self._phase is None:
            return inf
        position = (now / self.table.period + float(self._phase[index])) % 1.0
        return now + max(0.0, self.table.availability - position) * self.table.period

    def next_arrival(self, now: float) -> float | None:
        """The first time after `now` at which somebody comes online; None if nobody ever will."""
        if self._trace is not None:
            return self._trace.next_start(now)
        if self._phase is None:
            return None
        wait = (1.0 - (now / self.table.period + self._phase)) % 1.0
        return now + max(float(wait[wait > 0].min(initial=1.0)) * self.table.period, 1e-3)

    def _jitter(self, index: int, round: int) -> float:
        """What the client's time in this round is multiplied by."""
        if not self.table.jitter:
            return 1.0
        generator = numpy_generator(self._seed, "devices", "jitter", round, index)
        return float(generator.lognormal(0.0, self.table.jitter))

    def _rate(self, name: str, index: int) -> float:
        rate = self._rates[name]
        if rate is None:
            return inf
        if isinstance(rate, float):
            return rate
        return float(rate[index % len(rate)])

    def _drawn(self, name: str, spread: Lognormal | None) -> np.ndarray | float | None:
        if spread is None or spread.sigma == 0.0:
            return spread.median if spread else None
        normal = numpy_generator(self._seed, "devices", name).standard_normal(self.count, dtype=np.float32)
        rates: np.ndarray = spread.median * np.exp(spread.sigma * normal)
        return rates


class _Trace:
    """Online intervals of traced devices; client i is device i modulo their number."""

    def __init__(
        self,
        intervals: list[list[tuple[float, float]]],
        rates: dict[str, np.ndarray],
        facts: dict[str, dict[int, str]],
    ) -> None:
        self.devices = len(intervals)
        self.facts = facts
        self.rates = rates
        owners = [device for device, spans in enumerate(intervals) for _ in spans]
        self._owner = np.array(owners, dtype=np.int64)
        self._start = np.array([start for spans in intervals for start, _ in spans])
        self._end = np.array([end for spans in intervals for _, end in spans])

    def online(self, now: float) -> np.ndarray:
        there = np.zeros(self.devices, dtype=bool)
        there[self._owner[(self._start <= now) & (now < self._end)]] = True
        return there

    def leaves_at(self, device: int, now: float) -> float:
        spans = (self._owner == device) & (self._start <= now) & (now < self._end)
        return float(self._end[spans].max(initial=now))

    def next_start(self, now: float) -> float | None:
        later = self._start[self._start > now]
        return float(later.min()) if len(later) else None


def _read_trace(path: Path) -> _Trace:
    """Raises ConfigError that names the file, the line and what is wrong."""
    place = f"simulation.devices.trace: {path}"
    intervals: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, dict[str, float]] = {name: {} for name in _RATES}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            if missing := [name for name in _COLUMNS if name not in columns]:
                raise ConfigError(f"{place}: no column {', '.join(missing)}; needed: {', '.join(_COLUMNS)}")
            facts: dict[str, dict[str, str]] = {
                name: {} for name in columns if name in _FACTS or name.startswith(_METADATA)
            }
            if unknown := [name for name in columns if name not in (*_COLUMNS, *_RATES, *facts)]:
                raise ConfigError(
                    f"{place}: unknown column {unknown[0]!r}; optional: "
                    f"{', '.join((*_RATES, *_FACTS, 'metadata.KEY'))}"
                )
            for row in reader:
                start, end = float(row["start"]), float(row["end"])
                if not 0 <= start < end:
                    raise ValueError(f"start {start:g} must be at least 0 and before end {end:g}")
                intervals.setdefault(row["client"], []).append((start, end))
                for name in _RATES:
                    if row.get(name):
                        rates[name][row["client"]] = _positive(name, float(row[name]))
                for name in facts:
                    if row.get(name):
                        facts[name][row["client"]] = _fact(name, row[name])
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{place}, line {reader.line_num}: {error}") from error
    if not intervals:
        raise ConfigError(f"{place}: holds no intervals")
    number = {client: index for index, client in enumerate(intervals)}
    told = {name: {number[client]: text for client, text in texts.items()} for name, texts in facts.items()}
    return _Trace(list(intervals.values()), _complete(rates, list(intervals), place), told)


def _fact(name: str, text: str) -> str:
    """The text of a fact. Raises ValueError for a number that is none."""
    if name in ("memory", "disk"):
        parse_size(text)
    elif not name.startswith(_METADATA) and not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ValueError(f"{name} is a whole number from 0, not {text!r}")
    elif len(text) > _MOST_CHARACTERS:
        raise ValueError(f"{name} has {len(text)} characters; a silo declares at most {_MOST_CHARACTERS}")
    return text


def _positive(name: str, value: float) -> float:
    if not 0 < value < inf:
        raise ValueError(f"{name} must be above 0, not {value:g}")
    return value


def _complete(rates: dict[str, dict[str, float]], clients: list[str], place: str) -> dict[str, np.ndarray]:
    complete = {}
    for name, values in rates.items():
        if values and (lacking := [client for client in clients if client not in values]):
            raise ConfigError(f"{place}: client {lacking[0]!r} has no {name}, others have")
        if values:
            complete[name] = np.array([values[client] for client in clients])
    return complete

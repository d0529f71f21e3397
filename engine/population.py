"""The clients that an engine can choose from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from roundtable.engine.clients import ClientInfo, Held


class Population(Protocol):
    """Known clients and which of them are there now. Sequences are sorted and may be lazy."""

    @property
    def charged(self) -> int:
        """Of how many a secret sample is charged to be drawn; some of them may be known no more."""

    def known(self) -> Sequence[str]:
        """Every client, there or not: what Poisson sampling draws from."""

    def free(self) -> Sequence[str]:
        """Those that can be asked for something new: they are there, and not held."""

    def is_free(self, name: str) -> bool:
        """Whether this one can be asked for something new."""

    def is_online(self, name: str) -> bool:
        """Whether this one is there: it can go on with what it was asked."""

    def held(self) -> Mapping[str, Held]:
        """Those that are known and held, by name, and why."""

    def info(self, name: str) -> ClientInfo:
        """What is declared about it."""

    def join(self, info: ClientInfo, online: bool) -> None:
        """It is known, and there or not."""

    def leave(self, name: str) -> None:
        """It is not there now."""


@dataclass(frozen=True)
class _Sorted:
    known: tuple[str, ...]
    free: tuple[str, ...]
    held: Mapping[str, Held]


class Roster:
    """A population that is told of each client: the coordinator's silos."""

    def __init__(self, charged: int = 0) -> None:
        self._charged = charged
        self._infos: dict[str, ClientInfo] = {}
        self._online: set[str] = set()
        self._sorted: _Sorted | None = None

    @property
    def charged(self) -> int:
        return self._charged

    def known(self) -> Sequence[str]:
        return self._in_order().known

    def free(self) -> Sequence[str]:
        return self._in_order().free

    def _in_order(self) -> _Sorted:
        """It is asked with each step of a round, and somebody comes or goes seldom."""
        if self._sorted is None:
            held = {name: info.held for name, info in sorted(self._infos.items()) if info.held}
            free = tuple(sorted(name for name in self._online if name not in held))
            self._sorted = _Sorted(tuple(sorted(self._infos)), free, held)
        return self._sorted

    def is_free(self, name: str) -> bool:
        return name in self._online and not self._infos[name].held

    def is_online(self, name: str) -> bool:
        return name in self._online

    def held(self) -> Mapping[str, Held]:
        return self._in_order().held

    def info(self, name: str) -> ClientInfo:
        return self._infos.get(name, ClientInfo(name))

    def join(self, info: ClientInfo, online: bool) -> None:
        self._sorted = None
        self._infos[info.name] = info
        if online:
            self._online.add(info.name)

    def leave(self, name: str) -> None:
        self._sorted = None
        self._online.discard(name)


@dataclass(frozen=True)
class NumberedNames(Sequence[str]):
    """`client-0`, `client-1`, … as a sequence that holds nothing; zero-padded, so order is by number."""

    total: int

    @override
    def __len__(self) -> int:
        return self.total

    @override
    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < self.total:
            raise IndexError(index)
        return f"client-{index:0{len(str(self.total - 1))}d}"

    @override
    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(self.total))

    @override
    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self[self.index_of(name)] == name
        except (ValueError, IndexError):
            return False

    @staticmethod
    def index_of(name: str) -> int:
        """The number in a name."""
        return int(name.removeprefix("client-"))


class NumberedClients:
    """A simulated population of any size; only those that are away are remembered."""

    def __init__(self, count: int) -> None:
        self.names = NumberedNames(count)
        self._away: set[str] = set()

    @property
    def charged(self) -> int:
        return len(self.names)

    def known(self) -> Sequence[str]:
        return self.names

    def free(self) -> Sequence[str]:
        if not self._away:
            return self.names
        return [name for name in self.names if name not in self._away]

    def is_free(self, name: str) -> bool:
        return self.is_online(name)

    def is_online(self, name: str) -> bool:
        return name not in self._away

    def held(self) -> Mapping[str, Held]:
        return {}

    def info(self, name: str) -> ClientInfo:
        return ClientInfo(name)

    def join(self, info: ClientInfo, online: bool) -> None:
        if online:
            self._away.discard(info.name)
        else:
            self._away.add(info.name)

    def leave(self, name: str) -> None:
        self._away.add(name)

"""The population that the engine chooses from: any number of clients, there or not by virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from typing_extensions import override

from roundtable.engine import NumberedNames
from roundtable.engine.clients import ClientInfo, Held
from roundtable.simulation.world.declared import Declared


class SomeNames(Sequence[str]):
    """The names of some clients by their numbers, made when asked for."""

    def __init__(self, names: NumberedNames, numbers: np.ndarray) -> None:
        self._names = names
        self._numbers = numbers

    @override
    def __len__(self) -> int:
        return len(self._numbers)

    @override
    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        return self._names[int(self._numbers[index])]

    @override
    def __iter__(self) -> Iterator[str]:
        return (self._names[int(number)] for number in self._numbers)


class Fleet:
    """`engine.Population` over devices. The driver sets `now`; `gone` are the round's dropouts."""

    def __init__(self, names: NumberedNames, declared: Declared) -> None:
        self.names = names
        self.devices = declared.devices
        self.now = 0.0
        self.gone: set[int] = set()
        self._declared = declared
        self._unsuited = declared.unsuited()
        self._held: dict[str, Held] = {names[int(index)]: "unsuited" for index in self._unsuited}

    @property
    def charged(self) -> int:
        return len(self.names)

    def known(self) -> Sequence[str]:
        return self.names

    def free(self) -> Sequence[str]:
        there = self.devices.online(self.now)
        if there is None and not self.gone and not self._held:
            return self.names
        there = np.arange(len(self.names)) if there is None else there
        if self.gone:
            there = there[~np.isin(there, list(self.gone))]
        if self._held:
            there = there[~np.isin(there, self._unsuited)]
        return SomeNames(self.names, there)

    def is_free(self, name: str) -> bool:
        return name not in self._held and self.is_online(name)

    def held(self) -> Mapping[str, Held]:
        return self._held

    def is_online(self, name: str) -> bool:
        index = self.names.index_of(name)
        return index not in self.gone and self.devices.leaves_at(index, self.now) > self.now

    def info(self, name: str) -> ClientInfo:
        return self._declared.info(self.names.index_of(name), name)

    def join(self, info: ClientInfo, online: bool) -> None:
        if online:
            self.gone.discard(self.names.index_of(info.name))

    def leave(self, name: str) -> None:
        self.gone.add(self.names.index_of(name))

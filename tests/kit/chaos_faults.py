"""The faults: each does its harm, says to whom, how it is healed, and when all goes on again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGCONT, SIGSTOP

from bit_rot import flip
from chaos_world import HUBS, World
from small_disk import fill
from wires import Wire

from roundtable.core.failpoints import AGENT_POINTS, COORDINATOR_POINTS

REACHED = 10.0
"""Seconds that an armed place is waited for."""


@dataclass(frozen=True)
class Fault:
    """What was done to whom; `recovered` asks whether it is over with, from the moment it was healed on."""

    target: str
    heal: Callable[[], None]
    recovered: Callable[[], bool]
    detail: str = ""


def more(count: Callable[[], int]) -> Callable[[], bool]:
    """Whether the count has grown since the question was first asked."""
    seen: list[int] = []

    def grown() -> bool:
        now = count()
        if not seen and now >= 0:
            seen.append(now)
        return bool(seen) and now > seen[0]

    return grown


def nothing() -> None:
    """Heals what needs no healing."""


class SiloFaults:
    """What befalls a silo. Each is given the silo."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.kinds: dict[str, Callable[[str, random.Random], Fault]] = {
            "silo killed": self._kill,
            "silo killed at a place": self._kill_at,
            "silo stopped": self._stop,
            "silo stopped at a place, a bit of its files flipped": self._rot_at,
            "a bit of a silo's files flipped": self._rot,
            "silo cut off": self._cut,
            "silo half open": self._half_open,
            "silo delayed": self._delay,
            "silo throttled": self._throttle,
            "bytes of a silo's connection wrong": self._corrupt,
            "silo's clock set": self._set_clock,
        }
        if all(world.disks.values()):
            self.kinds["silo's disk full"] = self._full_disk

    def _fault(self, silo: str, heal: Callable[[], None], detail: str = "") -> Fault:
        return Fault(silo, heal, more(lambda: len(self._world.deliveries(silo))), detail)

    def _kill(self, silo: str, chance: random.Random) -> Fault:
        self._world.kill(silo)
        return self._fault(silo, lambda: self._world.start_silo(silo))

    def _kill_at(self, silo: str, chance: random.Random) -> Fault:
        place = f"*/*/{chance.choice(sorted(AGENT_POINTS))}"
        self._world.kill(silo)
        self._world.start_silo(silo, place)
        reached = came(self._world, silo, "dead")

        def heal() -> None:
            self._world.kill(silo)
            self._world.start_silo(silo)

        return self._fault(silo, heal, place + ("" if reached else ", not reached: killed"))

    def _stop(self, silo: str, chance: random.Random) -> Fault:
        self._world.signal(silo, SIGSTOP)
        return self._fault(silo, lambda: self._world.signal(silo, SIGCONT))

    def _rot_at(self, silo: str, chance: random.Random) -> Fault:
        place = f"*/*/{chance.choice(sorted(AGENT_POINTS))}:stop"
        self._world.kill(silo)
        self._world.start_silo(silo, place)
        return self._fault(silo, *stopped_and_spoilt(self._world, silo, chance, place))

    def _rot(self, silo: str, chance: random.Random) -> Fault:
        return self._fault(silo, nothing, spoil(self._world, silo, chance))

    def _spoil(self, silo: str, how: Callable[[Wire], None]) -> Fault:
        wires = [self._world.lines[silo, hub] for hub in HUBS]
        for wire in wires:
            how(wire)

        def heal() -> None:
            for wire in wires:
                self._world.wires.reset(wire) if wire.silent else wire.heal()

        return self._fault(silo, heal)

    def _cut(self, silo: str, chance: random.Random) -> Fault:
        return self._spoil(silo, self._world.wires.cut)

    def _half_open(self, silo: str, chance: random.Random) -> Fault:
        return self._spoil(silo, lambda wire: setattr(wire, "silent", True))

    def _delay(self, silo: str, chance: random.Random) -> Fault:
        return self._spoil(silo, lambda wire: setattr(wire, "delay", chance.uniform(0.02, 0.3)))

    def _throttle(self, silo: str, chance: random.Random) -> Fault:
        return self._spoil(silo, lambda wire: setattr(wire, "rate", chance.uniform(2e4, 2e5)))

    def _corrupt(self, silo: str, chance: random.Random) -> Fault:
        return self._spoil(silo, lambda wire: setattr(wire, "wrong", chance.randint(1, 5)))

    def _set_clock(self, silo: str, chance: random.Random) -> Fault:
        seconds = set_clock(self._world, silo, chance)
        return self._fault(silo, lambda: self._world.set_clock(silo, 0.0), f"{seconds:+.0f} s")

    def _full_disk(self, silo: str, chance: random.Random) -> Fault:
        disk = self._world.disks[silo]
        assert disk is not None
        return self._fault(silo, fill(disk).unlink)


class CentreFaults:
    """What befalls the coordinators and their database."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.kinds: dict[str, Callable[[random.Random], Fault]] = {
            "active coordinator killed": self._kill_active,
            "active coordinator killed at a place": self._kill_at,
            "active coordinator stopped": self._stop_active,
            "active coordinator stopped at a place, a bit of its files flipped": self._rot_at,
            "standby coordinator killed": self._kill_standby,
            "active coordinator parted from the database": self._part,
            "database crashed": self._crash_database,
            "database slow": self._slow_database,
        }

    def _fault(self, target: str, heal: Callable[[], None], detail: str = "") -> Fault:
        return Fault(target, heal, more(self._world.rounds), detail)

    def _kill_active(self, chance: random.Random) -> Fault:
        name, lease = self._world.active(), self._world.lease()
        self._world.kill(name)
        self._world.taken_over(name, lease)
        return self._fault(name, lambda: self._world.start_hub(name))

    def _kill_standby(self, chance: random.Random) -> Fault:
        name = self._world.standby()
        self._world.kill(name)
        return self._fault(name, lambda: self._world.start_hub(name))

    def _armed(self, chance: random.Random, action: str) -> tuple[str, str]:
        """Has a coordinator with a fault armed take over from the active one, which is killed."""
        place = f"*/*/{chance.choice(sorted(COORDINATOR_POINTS))}:{action}"
        former, name = self._world.active(), self._world.standby()
        self._world.kill(name)
        self._world.start_hub(name, place)
        self._world.kill(former)
        self._world.start_hub(former)
        return name, place

    def _kill_at(self, chance: random.Random) -> Fault:
        name, place = self._armed(chance, "kill")
        reached = came(self._world, name, "dead")

        def heal() -> None:
            self._world.kill(name)
            self._world.start_hub(name)

        return self._fault(name, heal, place + ("" if reached else ", not reached: killed"))

    def _rot_at(self, chance: random.Random) -> Fault:
        name, place = self._armed(chance, "stop")
        return self._fault(name, *stopped_and_spoilt(self._world, name, chance, place))

    def _stop_active(self, chance: random.Random) -> Fault:
        name, lease = self._world.active(), self._world.lease()
        self._world.signal(name, SIGSTOP)
        self._world.taken_over(name, lease)
        return self._fault(name, lambda: self._world.signal(name, SIGCONT))

    def _part(self, chance: random.Random) -> Fault:
        name, lease = self._world.active(), self._world.lease()
        wire, how = self._world.base[name], chance.choice(("cut", "half open"))
        if how == "cut":
            self._world.wires.cut(wire)
        else:
            wire.silent = True
        self._world.taken_over(name, lease)
        return self._fault(name, lambda: self._world.wires.reset(wire), how)

    def _crash_database(self, chance: random.Random) -> Fault:
        self._world.postgresql.stop()
        return self._fault("postgresql", self._world.postgresql.start)

    def _slow_database(self, chance: random.Random) -> Fault:
        name, delay = self._world.active(), chance.uniform(0.01, 0.08)
        self._world.base[name].delay = delay
        return self._fault(name, self._world.base[name].heal, f"{1000 * delay:.0f} ms")


class StorageFaults:
    """What befalls the bucket, and a coordinator's own disk and clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.kinds: dict[str, Callable[[random.Random], Fault]] = {
            "bucket away": self._away,
            "bucket half open": self._half_open,
            "bucket slow": self._slow,
            "bytes to or from the bucket wrong": self._corrupt,
            "a bit of a coordinator's files flipped": self._rot,
            "coordinator's clock set": self._set_clock,
        }
        if all(world.disks.values()):
            self.kinds["coordinator's disk full"] = self._full_disk

    def _fault(self, target: str, heal: Callable[[], None], detail: str = "") -> Fault:
        return Fault(target, heal, more(self._world.rounds), detail)

    def _away(self, chance: random.Random) -> Fault:
        self._world.wires.cut(self._world.bucket_line)
        return self._fault("bucket", self._world.bucket_line.heal)

    def _half_open(self, chance: random.Random) -> Fault:
        self._world.bucket_line.silent = True
        return self._fault("bucket", lambda: self._world.wires.reset(self._world.bucket_line))

    def _slow(self, chance: random.Random) -> Fault:
        self._world.bucket_line.rate = chance.uniform(2e4, 2e5)
        return self._fault("bucket", self._world.bucket_line.heal)

    def _corrupt(self, chance: random.Random) -> Fault:
        self._world.bucket_line.wrong = chance.randint(1, 3)
        return self._fault("bucket", self._world.bucket_line.heal)

    def _rot(self, chance: random.Random) -> Fault:
        name = chance.choice(HUBS)
        return self._fault(name, nothing, spoil(self._world, name, chance))

    def _set_clock(self, chance: random.Random) -> Fault:
        name = chance.choice(HUBS)
        seconds = set_clock(self._world, name, chance)
        return self._fault(name, lambda: self._world.set_clock(name, 0.0), f"{seconds:+.0f} s")

    def _full_disk(self, chance: random.Random) -> Fault:
        name = chance.choice(HUBS)
        disk = self._world.disks[name]
        assert disk is not None
        return self._fault(name, fill(disk).unlink)


def came(world: World, name: str, condition: str) -> bool:
    """Whether an armed process comes to its place while it is waited for."""
    end = time.monotonic() + REACHED
    while (now := world.condition(name)) == "running" and time.monotonic() < end:
        time.sleep(0.02)
    return now == condition


def stopped_and_spoilt(
    world: World, name: str, chance: random.Random, place: str
) -> tuple[Callable[[], None], str]:
    """Waits until a process stands still at its place, flips a bit of its newest files; how it goes on."""
    if not came(world, name, "stopped"):

        def start_again() -> None:
            world.kill(name)
            world.start(name)

        return start_again, f"{place}, not reached: killed"
    file = spoil(world, name, chance, newest=4)
    return lambda: world.signal(name, SIGCONT), f"{place}, {file}"


def spoil(world: World, name: str, chance: random.Random, newest: int = 0) -> str:
    """Flips a bit in one of a party's files, or in one of its so many newest; says in which."""
    for _ in range(50):
        with suppress(FileNotFoundError, IndexError):
            files = world.files_that_can_be_had_again(name)
            if newest:
                files = sorted(files, key=lambda path: path.stat().st_mtime)[-newest:]
            if files:
                path = chance.choice(files)
                flip(path, chance.randrange(path.stat().st_size or 1))
                return str(path.relative_to(world.state_of(name)))
        time.sleep(0.02)
    return "no file"


def set_clock(world: World, name: str, chance: random.Random) -> float:
    """Sets a clock by a minute to a day, ahead or back."""
    seconds = chance.choice((-1, 1)) * 10 ** chance.uniform(1.8, 4.9)
    world.set_clock(name, seconds)
    return seconds

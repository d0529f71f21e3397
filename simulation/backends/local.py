"""The backends that run clients inside one process, by name."""

from __future__ import annotations

from roundtable.simulation.backend import Backend, World
from roundtable.simulation.backends.sequential import Sequential
from roundtable.simulation.backends.stacked import Stacked
from roundtable.simulation.backends.vectorised import Vectorised
from roundtable.simulation.world.simulated_clients import Clients


def make_local(name: str, world: World, clients: Clients | None = None, device: str = "cpu") -> Backend:
    """The backend `name`, sequential, vectorised or stacked, in this process."""
    kinds: dict[str, type[Sequential] | type[Vectorised] | type[Stacked]] = {
        "sequential": Sequential,
        "vectorised": Vectorised,
        "stacked": Stacked,
    }
    return kinds[name](world, clients, device)

"""The backends that run clients inside one process, by name."""

from __future__ import annotations

from roundtable.simulation.backend import Backend, World
from roundtable.simulation.clients import Clients
from roundtable.simulation.sequential import Sequential


def make_local(name: str, world: World, clients: Clients | None = None, device: str = "cpu") -> Backend:
    """The backend `name` in this process."""
    assert name == "sequential"
    return Sequential(world, clients, device)

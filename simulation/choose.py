"""Which backend runs a job's clients, and why that one."""

from __future__ import annotations

from roundtable.simulation.backend import Backend, World
from roundtable.simulation.sequential import Sequential


def make_backend(world: World) -> tuple[Backend, str]:
    """The job's `simulation.backend`, and in words why it was taken."""
    return Sequential(world), "asked for"

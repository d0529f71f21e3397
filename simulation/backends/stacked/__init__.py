"""Many clients in one training step, with their weights stacked."""

from roundtable.simulation.backends.stacked.backend import Stacked

__all__ = ["Stacked"]

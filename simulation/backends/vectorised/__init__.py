"""Clients through recorded training steps."""

from roundtable.simulation.backends.vectorised.backend import Vectorised, why_not, why_not_recorded

__all__ = ["Vectorised", "why_not", "why_not_recorded"]

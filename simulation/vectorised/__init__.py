"""Clients through recorded training steps."""

from roundtable.simulation.vectorised.backend import Vectorised, why_not

__all__ = ["Vectorised", "why_not"]

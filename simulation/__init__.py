"""The round engine driven in virtual time over local clients."""

from roundtable.simulation.partition import make_partition

__all__ = ["make_partition"]

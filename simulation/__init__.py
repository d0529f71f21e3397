"""The round engine driven in virtual time over local clients."""

from roundtable.simulation.backend import Backend, Failed, Measured, Trained, Work, World
from roundtable.simulation.history import History
from roundtable.simulation.partition import make_partition
from roundtable.simulation.progress import Progress
from roundtable.simulation.result import Result
from roundtable.simulation.simulate import simulate

__all__ = [
    "Backend",
    "Failed",
    "History",
    "Measured",
    "Progress",
    "Result",
    "Trained",
    "Work",
    "World",
    "make_partition",
    "simulate",
]

"""The round engine driven in virtual time over local clients."""

from roundtable.simulation.backend import Backend, Failed, Measured, Trained, Work, World
from roundtable.simulation.comparison import Comparison, Run, compare, open_run
from roundtable.simulation.history import History
from roundtable.simulation.partition import make_partition
from roundtable.simulation.progress import Progress
from roundtable.simulation.report import PartitionReport, describe_partition
from roundtable.simulation.result import Result
from roundtable.simulation.simulate import simulate
from roundtable.simulation.sweep import grid, sweep

__all__ = [
    "Backend",
    "Comparison",
    "Failed",
    "History",
    "Measured",
    "PartitionReport",
    "Progress",
    "Result",
    "Run",
    "Trained",
    "Work",
    "World",
    "compare",
    "describe_partition",
    "grid",
    "make_partition",
    "open_run",
    "simulate",
    "sweep",
]

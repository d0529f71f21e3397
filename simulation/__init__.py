"""The round engine driven in virtual time over local clients."""

from roundtable.core.allocator import importing

with importing():
    from roundtable.simulation.backend import Backend, Failed, Measured, Trained, Work, World
    from roundtable.simulation.reporting.comparison import Comparison, Run, compare, open_run
    from roundtable.simulation.reporting.history import History
    from roundtable.simulation.reporting.partition_report import PartitionReport, describe_partition
    from roundtable.simulation.reporting.progress import Progress
    from roundtable.simulation.reporting.result import Result
    from roundtable.simulation.settings_search import ValueRange, draw, halving
    from roundtable.simulation.simulate import simulate
    from roundtable.simulation.sweep import grid, sweep
    from roundtable.simulation.world.partition import make_partition

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
    "ValueRange",
    "Work",
    "World",
    "compare",
    "describe_partition",
    "draw",
    "grid",
    "halving",
    "make_partition",
    "open_run",
    "simulate",
    "sweep",
]

"""What standardised columns do not go together with: refused before round 1, with the reason."""

from __future__ import annotations

from roundtable.aggregation import AggregationConfig
from roundtable.core.algorithms.analysis import AnalysisTable
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.tables.standardise_table import KEY


def check_standardise(job: JobConfig, aggregation: AggregationConfig) -> None:
    """Raises ConfigError or PrivacyError, with the key, for a job whose columns cannot be standardised as it
    says; figures that are still to be found are no mistake."""
    table = job.standardise
    if table is None:
        return
    if isinstance(job.algorithm, AnalysisTable):
        raise ConfigError(
            "an analysis asks for columns as they are, and standardises what it fits by itself: leave "
            "[standardise] out",
            key=(KEY,),
        )
    if job.privacy.level != "none" and (not table.complete or table.found == "exact"):
        raise PrivacyError(
            f"[standardise] and privacy.level = {job.privacy.level!r}: exact means of the silos' rows carry "
            "no noise, and would be told beside a model that does; give figures that are public as mean and "
            "sd of each column ([standardise.columns.NAME]), or answers of silos under [privacy]"
        )
    if aggregation.takes("root_update"):
        raise ConfigError(
            f"[standardise] and aggregation.rule = {job.aggregation.rule!r}: the coordinator trains on "
            "trusted data of its own, which are no silo's table; take another rule",
            key=(KEY,),
        )


def check_filled(job: JobConfig) -> None:
    """Raises ConfigError for a job that still lacks figures which every silo has to have alike."""
    table = job.standardise
    if table is not None and not table.complete:
        lacking = next(name for name, column in table.columns.items() if column.mean is None)
        raise ConfigError(
            f"column {lacking!r} has no mean and sd yet: `roundtable job submit` finds them by an analysis "
            "and writes them into the job; or give them ([standardise.columns.NAME])",
            key=(KEY, "columns"),
        )

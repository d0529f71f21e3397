"""From the updates of a round to one vector, and from that vector to the next model.

    config = AggregationConfig(rule="trimmed_mean", parameters={"f": 4})
    result = aggregate(TensorMatrix(updates), clients, config)
    state, model = optimizer.apply(state, model, result.vector, step)

Rules are pure functions of a matrix whose rows are updates, in memory or in files, and are found by the name
that a job file uses.
"""

from roundtable.aggregation import rules
from roundtable.aggregation.diagnosis import Diagnosis
from roundtable.aggregation.optimizers import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedLion,
    FedYogi,
    Nesterov,
    OptimizerState,
    ServerOptimizer,
    ServerSGD,
    make_optimizer,
)
from roundtable.aggregation.pipeline import AggregationConfig, AggregationResult, aggregate
from roundtable.aggregation.preaggregation import PRE_AGGREGATIONS
from roundtable.aggregation.registry import ENTRY_POINT_GROUP, RULES, RuleResult, find_rule, rule_names
from roundtable.aggregation.rows.encoded_matrix import rows_in_files
from roundtable.aggregation.rows.file_matrix import FileMatrix
from roundtable.aggregation.rows.gram import combine, gram, squared_distances, squared_norms
from roundtable.aggregation.rows.matrix import MixedRows, TensorMatrix, UpdateMatrix
from roundtable.aggregation.rules.mean import StreamingMean
from roundtable.aggregation.stages import RuleContext
from roundtable.aggregation.validation import ClientRow, Exclusion, check_update
from roundtable.core.algorithms.schedules import Schedule

__all__ = [
    "ENTRY_POINT_GROUP",
    "PRE_AGGREGATIONS",
    "RULES",
    "AggregationConfig",
    "AggregationResult",
    "ClientRow",
    "Diagnosis",
    "Exclusion",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedLion",
    "FedYogi",
    "FileMatrix",
    "MixedRows",
    "Nesterov",
    "OptimizerState",
    "RuleContext",
    "RuleResult",
    "Schedule",
    "ServerOptimizer",
    "ServerSGD",
    "StreamingMean",
    "TensorMatrix",
    "UpdateMatrix",
    "aggregate",
    "check_update",
    "combine",
    "find_rule",
    "gram",
    "make_optimizer",
    "rows_in_files",
    "rule_names",
    "rules",
    "squared_distances",
    "squared_norms",
]

"""The job: one TOML file, checked strictly.

Each table is a frozen model whose fields are explained where they stand; `roundtable job show
--resolved` prints them all with the values in force. Unknown keys and wrong types are errors that
name the file, the line, the key, what was expected and the nearest valid name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from blake3 import blake3
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from roundtable.core.algorithms.known_algorithms import AlgorithmField, may_keep_own
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.encodings.assembly import foreign_stages, get_encoding
from roundtable.core.encodings.composed.common_rank import CommonRank
from roundtable.core.errors import ConfigError
from roundtable.core.job_tables.cohort_table import CohortTable
from roundtable.core.job_tables.discounts import DISCOUNTED_BY, Discount, make_discount
from roundtable.core.job_tables.keep_table import KeepTable
from roundtable.core.job_tables.metrics_table import MetricsTable
from roundtable.core.job_tables.model_table import ModelTable
from roundtable.core.job_tables.queue_table import QueueTable, ResourcesTable
from roundtable.core.job_tables.region_table import RegionSumsTable
from roundtable.core.job_tables.simulation_table import SimulationTable
from roundtable.core.job_tables.stop_table import StopTable
from roundtable.core.job_tables.task_table import JobTaskTable, named_task
from roundtable.core.job_tables.transfer_table import TransferTable
from roundtable.core.measures.families import MOST_CELLS, expanded
from roundtable.core.paths import AnyPath
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy, Privacy, masking_of
from roundtable.core.tables.standardise_table import StandardiseTable
from roundtable.core.toml import TomlDocument, read_toml, validate
from roundtable.core.toml_tables import Finite, Name, Open, Seconds, Table, as_tuple


class RoundTable(Table):
    """`[round]`: whether a round waits for its cohort, or takes updates as they come (buffered).

    Buffered rounds are FedBuff's (Nguyen et al. 2022): clients train all the time, each from the model
    that was the newest when it was asked; so many updates make the next model.
    """

    mode: Literal["synchronous", "buffered"] = Field(
        "synchronous", description="rounds with a cohort each, or one model for each full buffer of updates"
    )
    buffer: int | None = Field(None, ge=1, description="buffered: updates that make a new model (K)")
    concurrency: int | None = Field(
        None, ge=1, description="buffered: clients that train at a time; default: all that are available"
    )
    max_staleness: int = Field(
        10, ge=0, description="buffered: models made since a client was asked, above which it is given up"
    )
    staleness: Literal["polynomial", "hinge", "constant"] = Field(
        "polynomial",
        description="buffered: what an update of staleness s is scaled by: (1 + s)^-a, or 1 up to b and then "
        "1/(1 + a(s - b)), or 1",
    )
    staleness_exponent: Finite = Field(0.5, ge=0, description="polynomial: a")
    staleness_slope: Finite = Field(0.1, gt=0, description="hinge: a")
    staleness_free: int = Field(0, ge=0, description="hinge: b, the staleness without a discount")

    @model_validator(mode="after")
    def _consistent(self) -> RoundTable:
        if (self.mode == "buffered") != (self.buffer is not None):
            raise ValueError('buffer belongs to mode = "buffered", and is needed there')
        unusual = {key for key, value in self if value != type(self).model_fields[key].default}
        if self.mode != "buffered" and unusual:
            raise ValueError(f'{", ".join(sorted(unusual))}: only with mode = "buffered"')
        for name, keys in DISCOUNTED_BY.items():
            if self.staleness != name and (lost := sorted(unusual & keys)):
                raise ValueError(f'{", ".join(lost)}: only with staleness = "{name}"')
        return self

    @property
    def discount(self) -> Discount:
        """What an old update is scaled by."""
        return make_discount(
            self.staleness, self.staleness_exponent, self.staleness_slope, self.staleness_free
        )


SERVER_MOMENTUM = 0.9
DILOCO_RATE = 0.7


class ServerOptimizerTable(Table):
    """`[aggregation.server_optimizer]`: what is done with the aggregated update (Reddi et al. 2021)."""

    name: str = Field(
        "fedavg",
        min_length=1,
        description="the step: fedavg, fedavgm, diloco, fedadagrad, fedadam, fedyogi, fedlion, an installed "
        "one, or file.py:Class",
    )
    parameters: Open = Field(
        default_factory=dict, description="of a step that is not built in: all that it takes"
    )
    learning_rate: Finite = Field(
        1.0, gt=0, description=f"the server's learning rate; of diloco by default {DILOCO_RATE}"
    )
    momentum: Finite | None = Field(
        None, ge=0, lt=1, description=f"fedavgm, diloco; default: {SERVER_MOMENTUM}"
    )
    beta_1: Finite | None = Field(None, ge=0, lt=1, description="fedadagrad, fedadam, fedyogi, fedlion")
    beta_2: Finite | None = Field(None, ge=0, lt=1, description="fedadam, fedyogi, fedlion")
    tau: Finite | None = Field(None, gt=0, description="constant added to the root of the second moment")
    schedule: Open | None = Field(
        None, description="learning-rate schedule over rounds, as a table with a name"
    )

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") == "diloco":
            return {"learning_rate": DILOCO_RATE, "momentum": SERVER_MOMENTUM, **values}
        return values


WEIGHT_RATIO, NORM_RATIO = 10.0, 100.0
Ratio = Annotated[Finite, Field(ge=1)]


class ValidationTable(Table):
    """`[aggregation.validation]`: what becomes of an update that must not be used as it is."""

    policy: Literal["exclude", "clip", "fail"] = Field(
        "exclude", description="leave it out, clip its norm, or fail the round"
    )
    max_norm: Finite | None = Field(None, gt=0, description="largest L2 norm of an update")
    weight_ratio: Ratio | Literal["off"] = Field(
        WEIGHT_RATIO,
        description='weighting = "examples": most that a silo weighs, in medians of the cohort; or "off"',
    )
    norm_ratio: Ratio | Literal["off"] = Field(
        NORM_RATIO,
        description='rule = "mean" without pre: largest L2 norm, in medians of the cohort; or "off"',
    )


class AggregationTable(Table):
    """`[aggregation]`: how updates become one."""

    rule: str = Field("mean", description="name of the rule: mean, median, trimmed_mean, krum, ...")
    parameters: Open = Field(default_factory=dict, description="the rule's own parameters")
    pre: Annotated[tuple[Open, ...], BeforeValidator(as_tuple)] = Field(
        (), description="pre-aggregations in order, each a table with a name and its parameters"
    )
    weighting: Literal["examples", "uniform", "inverse_loss", "custom"] = Field(
        "examples", description="weights of the mean"
    )
    weights: dict[str, Annotated[Finite, Field(ge=0)]] = Field(
        default_factory=dict, description='weight of each silo by name, for weighting = "custom"'
    )
    server_optimizer: ServerOptimizerTable = Field(default_factory=ServerOptimizerTable)
    validation: ValidationTable = Field(default_factory=ValidationTable)
    diagnosis: bool = Field(
        False, description="compare the round's updates with each other even if the rule does not"
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="cuda: built-in rules but the mean work on a GPU, from 16,777,216 values a round on",
    )


EVALUATION_SECONDS = 120.0
EVALUATION_BATCHES = 8
Bound = Annotated[Finite, Field(gt=0, le=1e12)]


class EvaluationTable(Table):
    """`[evaluation]`: models are evaluated by silos on their own test data.

    After a round its new model; with `bounds` before a round the model that it begins with, and what the
    silos measure travels inside the masked vectors of secure aggregation.
    """

    every: int = Field(
        1, ge=0, description="rounds between evaluations, the last round included; 0 for never"
    )
    clients: Literal["all", "cohort"] | None = Field(
        None,
        description="all that are available, or the round's cohort; default: all, with bounds the cohort",
    )
    deadline: Seconds = Field(
        EVALUATION_SECONDS, gt=0, description="time for an evaluation; who is late is left out"
    )
    batch_size: int | None = Field(
        None, ge=1, description="examples at once; default: 8 times algorithm.batch_size"
    )
    bounds: Annotated[dict[Name, Bound], AfterValidator(expanded)] = Field(
        default_factory=dict,
        max_length=MOST_CELLS,
        description="secure aggregation: the metrics to sum inside it, each with the largest absolute value "
        "that a silo's mean counts for, as { accuracy = 1.0, loss = 20.0 }; of one with state all cells: "
        '{ "risk..ranking_20" = 1.0 }',
    )

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationTable:
        if not self.bounds:
            return self
        if self.every == 0:
            raise ValueError("bounds name metrics to sum, and every = 0 measures none: leave one of them out")
        if self.clients == "all":
            raise ValueError(
                'clients = "all": with bounds what silos measure is in the masked vectors of those that '
                'train; say "cohort", or leave it out'
            )
        if self.deadline != EVALUATION_SECONDS:
            raise ValueError(
                "deadline: with bounds silos evaluate before they train, and cohort.deadline is for both; "
                "leave it out"
            )
        return self

    def before(self, round: int) -> Mapping[str, float]:
        """The bounds of the metrics that are summed of the model that `round` (from 1) begins with.

        Every party works this out alike, from the job and the number of the round.
        """
        return self.bounds if self.bounds and (round - 1) % self.every == 0 else {}


class TrackingTable(Table):
    """`[tracking]`: where the rounds' figures go beside the job's own history; each needs its extra."""

    tensorboard: str | None = Field(None, min_length=1, description="folder of event files")
    mlflow: str | None = Field(
        None, min_length=1, description="folder of a database, or a tracking server's address"
    )
    wandb: str | None = Field(None, min_length=1, description="project of an offline Weights & Biases run")


class JobConfig(Table):
    """A whole job file."""

    task: Annotated[JobTaskTable, BeforeValidator(named_task)] = Field(
        description="the task: its name, or a table of its name and its parameters"
    )
    name: Name | None = Field(None, description="name of the job; default: the task's")
    rounds: int = Field(10, ge=1, lt=1 << 32, description="rounds to run")
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(
        0, description="of initial weights, batches and simulated chance"
    )
    model: ModelTable = Field(default_factory=ModelTable)
    cohort: CohortTable = Field(default_factory=CohortTable)
    round: RoundTable = Field(default_factory=RoundTable)
    algorithm: AlgorithmField = Field(default_factory=AlgorithmTable)
    aggregation: AggregationTable = Field(default_factory=AggregationTable)
    privacy: Privacy = Field(default_factory=NoPrivacy, description="who is protected, and how")
    evaluation: EvaluationTable = Field(default_factory=EvaluationTable)
    metrics: MetricsTable = Field(
        default_factory=dict,
        description='figures from sums over all silos, by name: f1 = "2*tp/(2*tp+fp+fn)"',
    )
    stop: StopTable = Field(default_factory=StopTable)
    standardise: StandardiseTable | None = Field(
        None, description="columns of a silo's table that tasks get centred and scaled, the same everywhere"
    )
    keep: KeepTable = Field(default_factory=KeepTable)
    transfer: TransferTable = Field(default_factory=TransferTable)
    tracking: TrackingTable = Field(default_factory=TrackingTable)
    queue: QueueTable = Field(default_factory=QueueTable)
    resources: ResourcesTable = Field(default_factory=ResourcesTable)
    regions: RegionSumsTable = Field(default_factory=RegionSumsTable)
    simulation: SimulationTable = Field(default_factory=SimulationTable)

    @model_validator(mode="after")
    def _travels_by_the_algorithm(self) -> Self:
        travels = self.transfer.behind(self.algorithm.stage(), self.algorithm.name)
        object.__setattr__(self, "transfer", travels)
        return self

    @model_validator(mode="after")
    def _keeps_the_best(self) -> Self:
        """Early stopping gives the best model, where a model is measured that is the global one alone."""
        measured = self.evaluation.every != 0 or self.stop.central
        alone = self.stop.early and measured and not self.model.may_stay
        kept = self.keep.settled(alone and not may_keep_own(self.algorithm))
        object.__setattr__(self, "keep", kept)
        return self

    @property
    def evaluation_batch(self) -> int:
        """Examples of test data at once."""
        return self.evaluation.batch_size or EVALUATION_BATCHES * self.algorithm.batch_size

    @property
    def writes(self) -> TransferTable:
        """How silos write updates: in float32 where these are masked afterwards, in a form of their own.

        Factors by a basis of the cohort are float32 already.
        """
        plain = masking_of(self.privacy) is not None and self.common_rank is None
        return self.transfer.model_copy(update={"up": "float32"}) if plain else self.transfer

    @property
    def common_rank(self) -> CommonRank | None:
        """The encoding of updates as factors by a basis that all silos share; None for any other."""
        transfer = self.transfer
        if transfer.automatic or foreign_stages(transfer.up):
            return None
        encoding = get_encoding(transfer.up)
        return encoding if isinstance(encoding, CommonRank) else None

    @property
    def releases_sums(self) -> bool:
        """Whether silos train nothing and send sums of their records, with the noise that hides each one."""
        return self.algorithm.exact and isinstance(self.privacy, ExampleLevel)

    @property
    def title(self) -> str:
        """The job's name, or the task's where it has none."""
        return self.name or self.task.name.replace("/", ".").removesuffix(".py")

    def to_json(self) -> str:
        """Canonical JSON of every value in force: what an agent receives and what is hashed."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """BLAKE3 of `to_json`: approvals and audit entries name a job by it."""
        return blake3(self.to_json().encode()).hexdigest()


def load_job(path: AnyPath, overrides: Mapping[str, Any] | None = None) -> JobConfig:
    """Reads and checks a job file; `overrides` maps dotted keys to values and wins.

    Raises ConfigError with one line for each mistake: file, line, key, what was expected.
    """
    return read_job(job_document(path, overrides), Path(path).resolve().parent)


def job_document(path: AnyPath, overrides: Mapping[str, Any] | None = None) -> TomlDocument:
    """A job file with other values at some dotted keys, not checked yet. Raises ConfigError."""
    return overridden(read_toml(Path(path)), overrides)


def read_job(document: TomlDocument, folder: Path | None = None) -> JobConfig:
    """The checked job of a document; `folder` is where its files lie. Raises ConfigError as `load_job`."""
    return validate(JobConfig, document, folder)


def override_job(job: JobConfig, overrides: Mapping[str, Any] | None) -> JobConfig:
    """The job with other values at some dotted keys, checked as `load_job` checks a file."""
    if not overrides:
        return job
    values = job.model_dump(mode="json", exclude_unset=True)
    return read_job(overridden(TomlDocument(values, "job", ""), overrides))


def overridden(document: TomlDocument, overrides: Mapping[str, Any] | None) -> TomlDocument:
    """The document with other values at some dotted keys."""
    if any(key.startswith("task.") for key in overrides or ()):
        document.values["task"] = named_task(document.values.get("task", {}))
    for key, value in (overrides or {}).items():
        document.override(key, value)
    return document


def parse_job(text: str, source: str = "job") -> JobConfig:
    """Checks a job file's text, for example as a coordinator received it; `source` names it in mistakes."""
    return validate(JobConfig, TomlDocument.parse(text, source))


def job_from_json(text: str) -> JobConfig:
    """The job that `to_json` wrote; ConfigError for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"job: not valid JSON: {error}") from error
    return validate(JobConfig, TomlDocument(values, "job", ""))

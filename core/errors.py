"""Every error that Roundtable raises on purpose.

    RoundtableError
    ├── ConfigError             a job file, agent file or option that cannot be used
    ├── TaskError               a task that cannot be found, imported or run
    │   └── NoExamples          a silo without data for the step that it is asked for
    ├── LayoutError             tensors that do not fit the layout that was agreed
    │   └── ModelMismatch       a silo whose task makes another model than the job's, or none
    ├── EncodingError           bytes that are not what their header says
    ├── InvalidUpdate           an update that must not enter an aggregate
    ├── AggregationError        a rule that cannot give a sound answer for this input
    ├── PrivacyError            a mechanism or an accountant asked for the impossible
    │   └── BudgetExceeded      the next step would spend more than the budget holds
    ├── ProtocolError           a peer that does not follow the protocol
    ├── TransferError           an upload or download that did not arrive whole
    ├── StorageError            the database or the artifact directory is unusable
    ├── IdentityError           a certificate or key that cannot be used or trusted
    ├── AuditError              an audit log or a receipt that is not what was signed
    ├── UnavailableError        the other side cannot be reached, for now
    └── ResourceError           a port, disk or device that is missing or full
        └── InsufficientMemory  a step of training that would need more memory than there is

A message names what was wrong, where, and what to do about it. `SiteFailure` is not an error but
the record of one: it travels from the silo where something failed to the round that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override


class RoundtableError(Exception):
    """Base of all errors that a user can act upon; printed without a traceback."""


class ConfigError(RoundtableError):
    """A job file, agent file or option that cannot be used.

    `key` is where in the file the mistake is, for whoever has the file at hand (`toml.with_place`).
    """

    def __init__(self, message: str, key: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.key: tuple[str, ...] = key


class TaskError(RoundtableError):
    """A task that cannot be found, imported or run."""


class NoExamples(TaskError):
    """The silo has no data for this; the step is refused rather than answered with nothing."""


class LayoutError(RoundtableError):
    """Tensors that do not fit the layout that was agreed."""


class ModelMismatch(LayoutError):
    """A silo's task makes another model than the job's, or cannot make it: so it is in every attempt."""


class EncodingError(RoundtableError):
    """Bytes that are not what their header says."""


class InvalidUpdate(RoundtableError):
    """An update that must not enter an aggregate.

    `reason` is a short stable word that events and counters carry (`non_finite`, `norm`, `loss`, `layout`,
    `examples`, `duplicate`); the message is for people.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class AggregationError(RoundtableError):
    """A rule that cannot give a sound answer for this input."""


class PrivacyError(RoundtableError):
    """A mechanism or an accountant asked for the impossible."""


class BudgetExceeded(PrivacyError):
    """The next step would spend more than the budget holds."""


class ProtocolError(RoundtableError):
    """A peer that does not follow the protocol."""


class TransferError(RoundtableError):
    """An upload or download that did not arrive whole."""


class StorageError(RoundtableError):
    """The database or the artifact directory is unusable."""


class IdentityError(RoundtableError):
    """A certificate or key that cannot be used or trusted."""


class AuditError(RoundtableError):
    """An audit log or a receipt that is not what was signed."""


class UnavailableError(RoundtableError):
    """The other side cannot be reached, for now."""


class ResourceError(RoundtableError):
    """A port, disk or device that is missing or full."""


class InsufficientMemory(ResourceError):
    """A step of training that needs more memory than there is, said before it begins.

    `halvings`: after so many of its batches it would fit; 0 where no number helps.
    """

    def __init__(self, message: str, halvings: int = 0) -> None:
        super().__init__(message)
        self.halvings = halvings


@dataclass(frozen=True)
class SiteFailure:
    """What failed, where and when: every failure of a round carries all of it.

    `kind` is one of the words in `FAILURE_KINDS`; `detail` is the message, and `trace` the
    traceback where there is one (kept at the silo unless its policy lets it leave).
    """

    site: str
    round: int
    attempt: int
    phase: str
    kind: str
    detail: str
    trace: str = ""

    @override
    def __str__(self) -> str:
        return (
            f"{self.site} failed in round {self.round}, attempt {self.attempt}, {self.phase}: {self.detail}"
        )


MODEL_MISMATCH = "model_mismatch"
FAILURE_KINDS = (
    "node_failure",
    "network_partition",
    "out_of_memory",
    "gpu_error",
    "task_error",
    "data_corruption",
    "state_lost",
    "invalid_update",
    MODEL_MISMATCH,
    "slow_node",
    "busy",
    "refused",
    "protocol_violation",
)

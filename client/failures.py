"""Classifies what went wrong at the silo, into kinds that the round understands."""

from __future__ import annotations

import errno
import re
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch

from roundtable.client.device_faults import LACKING, DeviceFault, device_fault, killed
from roundtable.core.errors import (
    MODEL_MISMATCH,
    BudgetExceeded,
    ConfigError,
    EncodingError,
    InsufficientMemory,
    InvalidUpdate,
    LayoutError,
    ModelMismatch,
    NoExamples,
    PrivacyError,
    ProtocolError,
    ResourceError,
    RoundtableError,
    TaskError,
    TransferError,
)
from roundtable.core.plugins.doors import foreign_frames

_ABOUT_CODE = (RoundtableError, ImportError, SyntaxError)
"""Exceptions whose words are ours, or name modules and lines."""
_ABOUT_TASKS = (TaskError, ConfigError, LayoutError)
"""Errors of ours into which goes what the task's code raised."""
UNBEGUN = (
    "the training process ran out of memory before a first batch, where no smaller batch_size would help; "
    "give this silo's training more memory"
)


class Role(NamedTuple):
    """What a process of the agent's is in sentences about its end, and what helps where it lacks memory: with
    batches, and before the first one."""

    name: str
    remedy: str
    unbegun: str


TRAINING = Role("the training process", "a smaller batch_size needs less", UNBEGUN)
_FOLDERS = re.compile(r"(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\"]+[\\/])+")


class WorkFailed(RoundtableError):
    """Raised where a step cannot be answered; `kind` is one of FAILURE_KINDS, `trace` stays at the silo.

    `whole`: memory was lacking for what no smaller batch makes smaller. `halvings`: memory would not have
    sufficed, and after so many of its batches it would; 0 where nobody knows.
    """

    def __init__(
        self, kind: str, detail: str, trace: str = "", *, whole: bool = False, halvings: int = 0
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.trace = trace
        self.whole = whole
        self.halvings = halvings


@dataclass(frozen=True)
class FailureDiagnosis:
    """A classified error. `detail` may leave the silo: it has no path, and no message of the task's.

    `whole` and `halvings` as in WorkFailed.
    """

    kind: str
    detail: str
    trace: str
    whole: bool = False
    halvings: int = 0


def diagnose(error: Exception, *, begun: bool = True) -> FailureDiagnosis:
    """Classifies an error: its kind, a sentence that may travel, the traceback for the silo's own log.

    Messages of exceptions that are not ours may quote data ("could not convert 'Jane Doe' to
    float"), so only their class and place travel, also within a message of ours. `begun`: batches have been
    worked on; memory that was lacking before is none that smaller ones would need less of.
    """
    trace = "".join(traceback.format_exception(error))
    kind, fault = _kind_of(error), _fault_of(error)
    if isinstance(error, BudgetExceeded):
        # The figures follow from how many examples there are.
        return FailureDiagnosis(
            kind, "the silo's privacy budget holds no further round (its log has the figures)", trace
        )
    if isinstance(error, WorkFailed):
        return FailureDiagnosis(kind, _own_words(error), trace, error.whole)
    if isinstance(error, InsufficientMemory):
        known = error.halvings
        return FailureDiagnosis(kind, _own_words(error), trace, whole=not known, halvings=known)
    whole = kind == "out_of_memory" and not begun
    if isinstance(error, RoundtableError):
        meaning, words = "", _own_words(error)
    else:
        meaning = "the task's code raised an exception"
        words = f"{_place_of(error)} (the silo's log has the details)"
    if fault is not None:
        meaning = UNBEGUN if whole and fault.meaning == LACKING else fault.meaning
    return FailureDiagnosis(kind, f"{meaning}: {words}" if meaning else words, trace, whole)


@contextmanager
def before_batches() -> Iterator[None]:
    """Where memory is lacking within it, raises WorkFailed that says that smaller batches would not help."""
    try:
        yield
    except Exception as error:
        found = diagnose(error, begun=False)
        if not found.whole:
            raise
        raise WorkFailed(found.kind, found.detail, found.trace, whole=True) from error


def _own_words(error: RoundtableError) -> str:
    return _FOLDERS.sub("", _without_foreign_words(error))


def _without_foreign_words(error: RoundtableError) -> str:
    """Its message; of exceptions that it goes back to the class alone where their words may quote data."""
    text, cut = str(error), False
    for cause in islice(_chain(error), 1, None):
        said = f"{type(cause).__name__}: {cause}"
        if not isinstance(cause, _ABOUT_CODE) and said in text:
            text, cut = text.replace(said, type(cause).__name__), True
    return f"{text} (the silo's log has the details)" if cut else text


def _kind_of(error: Exception) -> str:
    if isinstance(error, WorkFailed):
        return error.kind
    if isinstance(error, (NoExamples, PrivacyError)):
        return "refused"
    if isinstance(error, InvalidUpdate):
        return "invalid_update"
    if isinstance(error, InsufficientMemory):
        return "out_of_memory"
    fault = _fault_of(error)
    if fault is not None:
        return fault.kind
    if isinstance(error, ModelMismatch):
        return MODEL_MISMATCH
    if isinstance(error, (EncodingError, TransferError)):
        return "data_corruption"
    if isinstance(error, (ConfigError, ProtocolError)):
        return "protocol_violation"
    if isinstance(error, ResourceError):
        return "node_failure"
    return "task_error"


def _fault_of(error: Exception) -> DeviceFault | None:
    """What the error, or one that it goes back to, shows of memory or device; None where none does.

    Loading a task, making its model and opening its data wrap whatever they meet with. An error of ours that
    is about something else, an update, a peer or a file, is what it says.
    """
    if isinstance(error, RoundtableError) and (
        isinstance(error, NoExamples) or not isinstance(error, _ABOUT_TASKS)
    ):
        return None
    return next((fault for each in _chain(error) if (fault := _shown_by(each)) is not None), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it goes back to, as a traceback shows it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _shown_by(error: BaseException) -> DeviceFault | None:
    lacking = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if lacking or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return device_fault("out of memory")
    if isinstance(error, subprocess.CalledProcessError):
        return killed(error.returncode)
    return device_fault(str(error)) if isinstance(error, (RuntimeError, ImportError)) else None


def _place_of(error: Exception) -> str:
    """Class of the exception, and the line of the task or library where it rose, without folders."""
    name = type(error).__name__
    if task := foreign_frames(error):
        return f"{name} in {task[-1].place}()"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return name
    file = re.split(r"[\\/]", frames[-1].filename)[-1]
    return f"{name} in {file}, line {frames[-1].lineno}, in {frames[-1].name}()"

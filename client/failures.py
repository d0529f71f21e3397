"""Classifies what went wrong at the silo, into kinds that the round understands."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

import torch

from roundtable.client.device_faults import DeviceFault, device_fault
from roundtable.core.errors import (
    MODEL_MISMATCH,
    BudgetExceeded,
    ConfigError,
    EncodingError,
    InvalidUpdate,
    ModelMismatch,
    NoExamples,
    PrivacyError,
    ProtocolError,
    ResourceError,
    RoundtableError,
    TransferError,
)
from roundtable.core.plugins.doors import foreign_frames

_ABOUT_CODE = (RoundtableError, ImportError, SyntaxError)
"""Exceptions whose words are ours, or name modules and lines."""
_FOLDERS = re.compile(r"(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\"]+[\\/])+")


class WorkFailed(RoundtableError):
    """Raised where a step cannot be answered; `kind` is one of FAILURE_KINDS, `trace` stays at the silo."""

    def __init__(self, kind: str, detail: str, trace: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.trace = trace


@dataclass(frozen=True)
class FailureDiagnosis:
    """A classified error. `detail` may leave the silo: it has no path, and no message of the task's."""

    kind: str
    detail: str
    trace: str


def diagnose(error: Exception) -> FailureDiagnosis:
    """Classifies an error: its kind, a sentence that may travel, the traceback for the silo's own log.

    Messages of exceptions that are not ours may quote data ("could not convert 'Jane Doe' to
    float"), so only their class and place travel, also within a message of ours.
    """
    trace = "".join(traceback.format_exception(error))
    kind = _kind_of(error)
    if isinstance(error, BudgetExceeded):
        # The figures follow from how many examples there are.
        return FailureDiagnosis(
            kind, "the silo's privacy budget holds no further round (its log has the figures)", trace
        )
    if isinstance(error, RoundtableError):
        return FailureDiagnosis(kind, _FOLDERS.sub("", _without_foreign_words(error)), trace)
    fault = _fault_of(error)
    advice = "the task's code raised an exception" if fault is None else fault.meaning
    return FailureDiagnosis(kind, f"{advice}: {_place_of(error)} (the silo's log has the details)", trace)


def _without_foreign_words(error: RoundtableError) -> str:
    """Its message; of exceptions that it goes back to the class alone where their words may quote data."""
    text, cause, cut = str(error), error.__cause__, False
    while cause is not None:
        said = f"{type(cause).__name__}: {cause}"
        if not isinstance(cause, _ABOUT_CODE) and said in text:
            text, cut = text.replace(said, type(cause).__name__), True
        cause = cause.__cause__
    return f"{text} (the silo's log has the details)" if cut else text


def _kind_of(error: Exception) -> str:
    if isinstance(error, WorkFailed):
        return error.kind
    if isinstance(error, (NoExamples, PrivacyError)):
        return "refused"
    if isinstance(error, InvalidUpdate):
        return "invalid_update"
    if isinstance(error, ModelMismatch):
        return MODEL_MISMATCH
    if isinstance(error, (EncodingError, TransferError)):
        return "data_corruption"
    if isinstance(error, (ConfigError, ProtocolError)):
        return "protocol_violation"
    if isinstance(error, ResourceError):
        return "node_failure"
    fault = _fault_of(error)
    return "task_error" if fault is None else fault.kind


def _fault_of(error: Exception) -> DeviceFault | None:
    """What the error shows of memory or device; None for every other exception of the task's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return device_fault("out of memory")
    return device_fault(str(error)) if isinstance(error, RuntimeError) else None


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

"""Which of the operators' calls the page makes: one row each, by the name that its addresses have."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from roundtable.proto import administration_pb2 as administration
from roundtable.proto import operator_pb2 as operator


@dataclass(frozen=True)
class PageCall:
    """A call with one answer, and the message that asks for it."""

    name: str
    request: type[Message]


READS: dict[str, PageCall] = {
    "status": PageCall("Operators/Status", operator.StatusRequest),
    "jobs": PageCall("Operators/ListJobs", operator.ListJobsRequest),
    "queue": PageCall("Operators/ListQueue", operator.ListQueueRequest),
    "clients": PageCall("Operators/ListClients", operator.ListClientsRequest),
    "privacy": PageCall("Operators/ShowPrivacy", operator.PrivacyRequest),
    "job-privacy": PageCall("Operators/ShowJobPrivacy", operator.JobRequest),
    "report": PageCall("Operators/ShowReport", operator.ShowReportRequest),
    "provenance": PageCall("Administration/GetProvenance", administration.ProvenanceRequest),
    "pending": PageCall("Administration/ListPending", administration.ListPendingRequest),
    "tokens": PageCall("Administration/ListTokens", administration.ListTokensRequest),
}
"""`GET /api/read/NAME`. A job itself has an address of its own: its history is thinned out there."""

CHANGES: dict[str, PageCall] = {
    "pause": PageCall("Operators/PauseJob", operator.JobRequest),
    "resume": PageCall("Operators/ResumeJob", operator.JobRequest),
    "cancel": PageCall("Operators/CancelJob", operator.JobRequest),
    "delete": PageCall("Operators/DeleteJob", operator.JobRequest),
    "move": PageCall("Operators/MoveJob", operator.MoveJobRequest),
    "disable": PageCall("Operators/DisableClient", operator.DisableClientRequest),
    "enable": PageCall("Operators/EnableClient", operator.EnableClientRequest),
    "ask-report": PageCall("Operators/AskReport", operator.AskReportRequest),
    "revoke-token": PageCall("Administration/RevokeToken", administration.RevokeTokenRequest),
    "confirm": PageCall("Administration/Confirm", administration.ConfirmRequest),
}
"""`POST /api/change/NAME`."""

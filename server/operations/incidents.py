"""Incidents as people read them: what kind, how bad, where, what to do about it, and what was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from roundtable.core.observability.released import Told
from roundtable.engine import messages as m

Severity = Literal["info", "warning", "error", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error", "critical")


@dataclass(frozen=True)
class Incident:
    """One incident. `kind` is one of FAILURE_KINDS, or quorum_missed, storage, coordinator, takeover,
    clone, quota, series or autoscaler."""

    kind: str
    severity: Severity
    advice: str
    action: str
    site: str = ""
    round: int = 0
    attempt: int = 0
    phase: str = ""

    def plain(self) -> dict[str, Any]:
        """As a JSON object, for an event's detail and for alerts."""
        return {name: value for name, value in asdict(self).items() if value not in ("", 0)}


_WENT_ON = "the round goes on without this silo; the next draw may choose another"
_OF_SILOS: dict[str, tuple[Severity, str, str]] = {
    "node_failure": ("warning", "look after the silo's machine and its agent's log", _WENT_ON),
    "network_partition": (
        "warning",
        "nothing, if it comes back; otherwise check the silo's line and firewall",
        "waits for it: what it has finished it delivers when it is back",
    ),
    "out_of_memory": (
        "error",
        "give the silo's training more memory, or set a smaller batch_size in the job",
        _WENT_ON,
    ),
    "gpu_error": ("error", "check the silo's GPU and driver (`nvidia-smi`, the agent's log)", _WENT_ON),
    "task_error": ("error", "the task's own code failed at the silo: its log has the traceback", _WENT_ON),
    "data_corruption": (
        "error",
        "check the silo's disk and line; repeated damage is no accident",
        "excluded the update",
    ),
    "state_lost": (
        "warning",
        "keep the agent's state folder on a disk that outlives the agent; what was lost of the job's "
        "training does not come back: a new job may begin with a model of before",
        _WENT_ON,
    ),
    "invalid_update": (
        "error",
        "the silo's task or data are not sound: see the reason",
        "excluded the update",
    ),
    "model_mismatch": (
        "error",
        "make alike at the silo what the reason names (a base, its tokenizer, the version of the task), then "
        "resume the job if it was paused",
        "the round goes on without this silo; where no quorum is left, the job is paused at once",
    ),
    "slow_node": (
        "warning",
        "give the silo more time (cohort.deadline) or less work, or select by reliability",
        _WENT_ON,
    ),
    "busy": (
        "info",
        "nothing, or let the silo say that it has room for fewer jobs at a time: nobody is blamed for it",
        _WENT_ON,
    ),
    "refused": ("warning", "the silo's policy does not allow this job: talk to its operator", _WENT_ON),
    "protocol_violation": (
        "error",
        "install the same version on both sides; if it is, treat the silo as hostile",
        "excluded the update",
    ),
}


def raised(severity: Severity, plight: Mapping[str, Any]) -> Severity:
    """The severity of a silo's failure in training, one higher for each of these that holds.

    - At least two silos and half of the cohort have failed in the attempt.
    - The silo has failed at least three times since its last update.
    - One more failure, and the attempt misses its quorum, or it is missed already.

    An error at most: critical is what stops a job. Where privacy withholds these figures, it is the
    severity of the kind.
    """
    failed, cohort, spare = (int(plight.get(name, 1)) for name in ("failed", "cohort", "spare"))
    steps = (failed >= 2 and 2 * failed >= cohort) + (int(plight.get("on_end", 0)) >= 3) + (spare <= 0)
    return SEVERITIES[min(SEVERITIES.index(severity) + steps, SEVERITIES.index("error"))]


def incident_of(told: Told[m.Note]) -> Incident | None:
    """The incident that an event of a job reports; None for events that report none."""
    note = told.value
    incident = _kind_of_incident(note)
    return incident and replace(incident, site=note.client, round=note.round, attempt=note.attempt)


def _kind_of_incident(note: m.Note) -> Incident | None:
    match note.kind:
        case "client_failed":
            kind = str(note.detail.get("kind", "node_failure"))
            severity, advice, action = _OF_SILOS.get(kind, _OF_SILOS["node_failure"])
            severity = raised(severity, note.detail)
            action, phase = str(note.detail.get("action", action)), str(note.detail.get("phase", ""))
            return Incident(kind, severity, advice, action, phase=phase)
        case "client_troubled":
            kind = str(note.detail["kind"])
            _, advice, _ = _OF_SILOS.get(kind, _OF_SILOS["node_failure"])
            return Incident(kind, "warning", advice, note.detail["action"], phase=note.detail["phase"])
        case "client_offline":
            return Incident("network_partition", *_OF_SILOS["network_partition"])
        case "update_excluded":
            return Incident("invalid_update", *_OF_SILOS["invalid_update"], phase=m.AGGREGATE)
        case "attempt_failed":
            advice = "the reasons of the silos are in the message; each has an event of its own"
            action = "gave the attempt up; a new cohort is drawn as often as cohort.retries says"
            return Incident("quorum_missed", "error", advice, action)
        case "round_closed":
            advice = "look after the silos that the reason names; a longer deadline may help"
            action = "closed the round without a model, which stays charged, and went on with the next"
            return Incident("quorum_missed", "error", advice, action)
        case "round_skipped":
            advice = "look after the silos that the reason names, or ask for fewer updates (cohort.minimum)"
            return Incident(
                "quorum_missed", "error", advice, "went on with the next round and the same model"
            )
        case "job_failed":
            advice = "mend what the reasons name and submit a new job; this one has spent its rounds"
            return Incident("quorum_missed", "critical", advice, "ended the job without a model")
        case "job_paused" if not note.message.startswith("paused by "):
            advice = "mend what the reason names, then `roundtable job resume`"
            return Incident(_why(note.message), "critical", advice, "paused the job; nothing of it is lost")
    return None


def _why(reason: str) -> str:
    """The kind of incident that paused a job."""
    if "is damaged" in reason or "is missing from" in reason:
        return "data_corruption"
    return "storage" if "is full" in reason else "quorum_missed"


def storage_incident(detail: str) -> Incident:
    """The incident of a database or a store that is away."""
    return Incident(
        "storage",
        "critical",
        f"mend it, and the job goes on by itself: {detail}",
        "waited and retried; nothing is acknowledged meanwhile",
    )


def rot_incident() -> Incident:
    """The coordinator's disk gave back other bytes than were stored, and a whole copy took their place."""
    advice = "check the coordinator's disk: what it has spoilt once it spoils again"
    return Incident("data_corruption", "error", advice, "fetched a whole copy and combined the round again")


def series_incident() -> Incident:
    """No run can be made after the last one of a job that is repeated."""
    advice = "mend what the reason names, and submit the job again: that begins another series"
    return Incident("series", "error", advice, "ended the series; the runs so far are not lost")


def autoscaler_incident() -> Incident:
    """The command that sizes a pool of silos fails."""
    advice = "run the command by hand with the object that docs/operator.md shows, and mend what it says"
    return Incident("autoscaler", "error", advice, "left the pool as it is; the command is run again")


def driver_incident() -> Incident:
    """A job's driver has met an error that nobody expected."""
    advice = "report what the coordinator's log says of it; `roundtable job resume` tries again"
    return Incident("coordinator", "critical", advice, "paused the job; what was durable is not lost")


def clone_incident(silo: str) -> Incident:
    """Somebody else has come with a silo's certificate."""
    return Incident(
        "clone",
        "critical",
        "ask the silo's people whether they have moved the agent; if not, its credentials are stolen: "
        "`roundtable client revoke`, then invite it anew",
        "refused the second installation; the first one goes on",
        site=silo,
    )


def quota_incident(quota: str) -> Incident:
    """A caller has used up a quota."""
    return Incident(
        "quota",
        "warning",
        f"ask who it is what they are doing; if it is sound, raise {quota} in [quotas] of coordinator.toml, "
        "and if not, revoke them",
        "refused what was beyond it; everybody else is served",
    )

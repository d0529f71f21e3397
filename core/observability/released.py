"""What each value that leaves a coordinator or a silo tells of the silos, and where it is withheld for that.

One table: whatever sends asks it. A field that is not in the table is not sent. docs/privacy.md shows the
table (`tools/privacy_table.py`), and a test compares it with every message, record and event that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar, final

from roundtable.core.privacy_table import BareUpdates, NoPrivacy, Private, has_secret_cohorts, hides_figures

_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


class Tells(Enum):
    """What a value is a function of."""

    PUBLIC = "the job, the software, the clock, who is connected, and what was released before"
    NOISY = "all silos' data, through the job's mechanism; charged where there is a guarantee"
    COHORT = "who was asked, who answered, and how many"
    UPDATE = (
        "one silo's update as it arrived: its digest, whether it could be used, how far it lies from others"
    )
    SILO = "one silo's training: losses, example counts, progress"
    TRAINING = "the training of all silos, and what they measure before it, summed without noise"
    EVALUATION = "the silos' test data"
    SECRET = "updates, keys, noise and the state of noise"


IN_THE_LOG = "the coordinator's own log says why"


def withheld(privacy: NoPrivacy | Private) -> frozenset[Tells]:
    """What nobody but the coordinator's own machine, or at the silo its own, may see of such a job."""
    kinds = {Tells.SECRET}
    if hides_figures(privacy):
        kinds.add(Tells.SILO)
        if not privacy.public_evaluation:
            kinds.add(Tells.EVALUATION)
    if not isinstance(privacy, NoPrivacy):
        kinds.add(Tells.TRAINING)
    if isinstance(privacy, BareUpdates):
        kinds.add(Tells.UPDATE)
    if has_secret_cohorts(privacy):
        kinds.add(Tells.COHORT)
    return frozenset(kinds)


def is_told(privacy: NoPrivacy | Private, *kinds: Tells) -> bool:
    """Whether values that tell all this may be sent."""
    return withheld(privacy).isdisjoint(kinds)


@final
@dataclass(frozen=True)
class Told(Generic[_Value]):
    """A value that may leave, held against what it tells. Encoders of what data have made take nothing else.

    `tell` and `public` make it, and the doors beside them that withhold a part; a test knows their names.
    """

    value: _Value

    def become(self, change: Callable[[_Value], _Other]) -> Told[_Other]:
        """What follows from the value alone may leave as it may."""
        return Told(change(self.value))


def tell(privacy: NoPrivacy | Private, kind: Tells, value: _Value, instead: _Value) -> Told[_Value]:
    """The value where this level tells such things, otherwise the other one."""
    return Told(value if is_told(privacy, kind) else instead)


def public(value: _Value) -> Told[_Value]:
    """A value that is a function of the job, the software or the clock, and of no silo's data."""
    return Told(value)


def released(
    channel: str, values: Mapping[str, Any], privacy: NoPrivacy | Private
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values that may be sent, and the names of those that may not: unknown ones among them."""
    table, kinds = FIELDS[channel], withheld(privacy)
    kept = {name: value for name, value in values.items() if table.get(name, Tells.SECRET) not in kinds}
    return kept, tuple(name for name in values if name not in kept)


@dataclass(frozen=True)
class EventKind:
    """An event of a job's history: what its message tells, and the message where that is withheld.

    One that is `about` a silo of the cohort is not sent at all where cohorts are secret.
    """

    message: tuple[Tells, ...] = (Tells.PUBLIC,)
    instead: str = ""
    about: bool = False
    detail: Mapping[str, Tells] = field(default_factory=dict)


def _of(kind: Tells, names: str) -> dict[str, Tells]:
    return dict.fromkeys(names.split(), kind)


_WORDS = (Tells.COHORT, Tells.UPDATE)

EVENTS: Mapping[str, EventKind] = {
    **dict.fromkeys(
        _of(
            Tells.PUBLIC,
            "job_submitted job_running job_waiting job_moved job_held job_released job_paused job_finished "
            "job_cancelled job_failed waiting_for_clients budget_spent series_over metric_missing",
        ),
        EventKind(),
    ),
    "metric_undefined": EventKind(
        (Tells.EVALUATION, Tells.TRAINING), "round {round}: a figure is not defined: " + IN_THE_LOG
    ),
    "client_held": EventKind(detail=_of(Tells.PUBLIC, "silo held")),
    **dict.fromkeys(
        ("round_started", "group_formed"),
        EventKind(
            (Tells.COHORT,),
            "round {round}: the cohort is secret",
            detail={**_of(Tells.COHORT, "cohort steps seconds"), "minimum": Tells.PUBLIC},
        ),
    ),
    "round_committed": EventKind(
        detail={
            **_of(Tells.TRAINING, "training before"),
            "evaluation": Tells.EVALUATION,
            **_of(Tells.COHORT, "cohort contributors"),
            # Of test data that are the server's own, in a simulation.
            **(_of(Tells.PUBLIC, "seconds epsilon central") | {"measured": Tells.SILO}),
        },
    ),
    "round_skipped": EventKind(_WORDS, "round {round} is skipped, the model stays: " + IN_THE_LOG),
    "round_closed": EventKind(_WORDS, "round {round} is closed without a model: " + IN_THE_LOG),
    "attempt_failed": EventKind(_WORDS, "round {round}, attempt {attempt} failed: " + IN_THE_LOG),
    "client_failed": EventKind(
        _WORDS,
        "{client} did not answer: " + IN_THE_LOG,
        about=True,
        detail={
            **_of(Tells.UPDATE, "kind action"),
            **_of(Tells.COHORT, "phase failed cohort spare on_end"),
            "course": Tells.SILO,
        },
    ),
    "client_troubled": EventKind(
        _WORDS, about=True, detail=_of(Tells.UPDATE, "kind action") | {"phase": Tells.COHORT}
    ),
    **dict.fromkeys(
        ("client_offline", "update_ready", "work_let_go"), EventKind((Tells.COHORT,), about=True)
    ),
    "client_replaced": EventKind((Tells.COHORT,), about=True, detail={"replacement": Tells.COHORT}),
    "update_received": EventKind(
        (Tells.COHORT,),
        about=True,
        detail=_of(Tells.SILO, "examples course") | _of(Tells.COHORT, "row asked") | {"digest": Tells.UPDATE},
    ),
    "encoding_changed": EventKind(_WORDS, about=True, detail=_of(Tells.UPDATE, "encoding before")),
    "update_excluded": EventKind(_WORDS, about=True, detail={"reason": Tells.UPDATE}),
    "update_clipped": EventKind(_WORDS, about=True, detail={"reason": Tells.UPDATE}),
}

FIELDS: Mapping[str, Mapping[str, Tells]] = {
    # What the coordinator keeps of a round for everybody: history, provenance, audit log.
    "round": {
        **_of(Tells.PUBLIC, "round attempt started ended withheld charge population central"),
        # Digests; the optimizer's state itself never leaves.
        **_of(Tells.NOISY, "model optimizer"),
        **_of(Tells.COHORT, "cohort contributors failures excused staleness closed transfers within"),
        **_of(Tells.UPDATE, "excluded weights diagnosis"),
        **_of(Tells.TRAINING, "training before"),
        **_of(Tells.EVALUATION, "evaluation client_metrics"),
    },
    # What the way of one silo's update took: how long it is may follow from its values.
    "transfer": {
        **_of(Tells.COHORT, "up_plain down down_plain down_seconds"),
        **_of(Tells.UPDATE, "up up_seconds decoding_seconds encoding"),
        **_of(Tells.SILO, "encoding_seconds error"),
    },
    "charge": {
        **_of(Tells.PUBLIC, "level charge noise_multiplier guarantee epsilon delta silo_charge"),
        **_of(Tells.PUBLIC, "secure_aggregation"),
        **_of(Tells.NOISY, "clip_norm standard_deviation"),
        **_of(Tells.COHORT, "silos cohort groups protocol"),
        **_of(Tells.TRAINING, "weight examples clipped"),
    },
    "provenance": _of(
        Tells.PUBLIC,
        "model job name config submitter initial_model privacy coordinator version time rounds",
    ),
    "provenance round": {
        **_of(Tells.PUBLIC, "round attempt ended charge withheld"),
        "model": Tells.NOISY,
        **_of(Tells.COHORT, "cohort participants"),
    },
    "audit of a round": {
        **_of(Tells.PUBLIC, "config round attempt charge versions withheld"),
        **_of(Tells.NOISY, "model optimizer"),
        **_of(Tells.COHORT, "cohort contributors closed asked"),
        "updates": Tells.UPDATE,
    },
    # Where a job stands, behind JobDetail and ClientActivity.
    "view": {
        **_of(Tells.PUBLIC, "round attempt phase status reason deadline"),
        "model": Tells.NOISY,
        **_of(Tells.COHORT, "clients waiting_for"),
    },
    # A round in numbers: trackers and spans. A mean has the prefix `train_` or `before_`, or its own name.
    "figures": {
        **_of(Tells.PUBLIC, "time seconds epsilon"),
        **_of(Tells.COHORT, "clients failed staleness down_bytes"),
        **_of(Tells.UPDATE, "excluded up_bytes communication"),
        **_of(Tells.TRAINING, "tokens tokens_per_second bytes_per_token"),
        "encoding_error": Tells.SILO,
    },
    "span": {"model": Tells.NOISY, **_of(Tells.COHORT, "cohort contributors")},
    # The coordinator's page of metrics, without the prefix `roundtable_`.
    "metrics": {
        **_of(
            Tells.PUBLIC,
            "coordinator_active database_up calls_refused round_seconds phase_seconds jobs job_rounds_done "
            "job_rounds_wanted job_running job_silos_online job_silos_known job_silos_needed "
            "job_round_began_timestamp_seconds job_round_deadline_seconds silos_certificate_ending "
            "silos_silent standby_lag_seconds quota_refusals privacy_epsilon_spent privacy_epsilon_budget "
            "privacy_epsilon_left event_loop_lag_seconds disk_free_bytes disk_size_bytes "
            "certificate_expires_timestamp_seconds certificate_issued_timestamp_seconds transfer_bytes "
            "rounds",
        ),
        **_of(Tells.COHORT, "queue_length updates incidents silos model_bytes silo_bandwidth_bytes"),
        **_of(Tells.COHORT, "silo_round_trip_seconds silo_encoding_bytes"),
        **_of(Tells.UPDATE, "updates_refused update_bytes decoding_seconds"),
        **_of(Tells.SILO, "encoding_seconds encoding_error"),
    },
    # The coordinator to operators.
    "StatusReply": _of(
        Tells.PUBLIC,
        "version coordinator clock uptime_seconds clients_online jobs_running database disk_free identity "
        "caller",
    ),
    "Event": {
        **_of(Tells.PUBLIC, "sequence time kind round attempt message detail"),
        "client": Tells.COHORT,
    },
    "Job": {
        **_of(
            Tells.PUBLIC, "id name status reason rounds_done rounds submitted updated submitter own algorithm"
        ),
        "model": Tells.NOISY,
        "best": Tells.EVALUATION,
    },
    # Refused for jobs at whose level silos' metrics are not told.
    "BestModel": {**_of(Tells.EVALUATION, "round value"), "model": Tells.NOISY},
    # Whose turn it is follows from the jobs and from who is connected.
    "QueuedJob": _of(
        Tells.PUBLIC, "job place project priority level since reason expected silos connected least"
    ),
    "JobDetail": {
        **_of(Tells.PUBLIC, "job job_config round attempt phase deadline history incidents initial_model"),
        **_of(Tells.COHORT, "clients waiting_for setups"),
    },
    # Stored of jobs alone whose cohorts are no secret: who says it takes part.
    "SiloSetup": _of(Tells.COHORT, "client time round machines ranks device memory plan degrees factor_rank"),
    # Of a silo's lines its own policy decides, and of the coordinator's the row of the event.
    "JobLogLine": _of(Tells.PUBLIC, "sequence time silo level round attempt phase kind text"),
    "JobLogLines": _of(Tells.PUBLIC, "lines"),
    # The silo's people have seen and approved each byte of it.
    "Report": _of(Tells.PUBLIC, "request silo author reason created expires status answered said report"),
    "JobUpdate": _of(Tells.PUBLIC, "events detail"),
    "ClientActivity": {
        **_of(Tells.COHORT, "client state since"),
        "note": Tells.UPDATE,
        **_of(Tells.SILO, "done total loss figures"),
    },
    "Client": {
        **_of(
            Tells.PUBLIC,
            "name online version tasks metadata devices last_seen drained disabled certificate_ends",
        ),
        # Of jobs whose cohorts are no secret: an estimate that moves says that its silo took part.
        **_of(Tells.COHORT, "state selected completed link"),
    },
    "Link": _of(Tells.COHORT, "up down round_trip encoding"),
    "PrivacyAccount": _of(
        Tells.PUBLIC,
        "population silo epsilon delta accountant relation releases reserved_epsilon jobs statement",
    ),
    "PrivacyBudget": _of(Tells.PUBLIC, "population epsilon delta accountant author time"),
    "Protection": _of(Tells.PUBLIC, "party holds assumption"),
    "JobPrivacy": _of(
        Tells.PUBLIC,
        "job level hides protections population silos rounds_done rounds delta epsilon forecast own_forecast "
        "budget population_budget statement people settled_job dimension",
    ),
    "PrivacyReply": _of(Tells.PUBLIC, "accounts budgets kept_by_silos"),
    "PrivacyCharge": _of(Tells.PUBLIC, "population silo job round attempt charge released time"),
    # The coordinator to a silo, of that silo's own work.
    "Hop": _of(Tells.NOISY, "base model delta"),
    "Instruction": _of(
        Tells.PUBLIC,
        "step deadline_seconds job_config train evaluate exchange submission counted hops region",
    ),
    "RegionModel": _of(Tells.NOISY, "start rounds time signature"),
    "Train": {
        "model": Tells.NOISY,
        # The silo's own encoding is chosen by what it has told; what it is to mask is a step of its own.
        **_of(Tells.PUBLIC, "layout encoding prepared"),
        "identities": Tells.COHORT,
        "steps": Tells.COHORT,
    },
    "Evaluate": {"model": Tells.NOISY, "layout": Tells.PUBLIC},
    # Masked or sealed for another silo; the cohort of a secure sum knows itself.
    "Exchange": {"payload": Tells.COHORT},
    "Withdraw": _of(Tells.PUBLIC, "step reason ended"),
    "UploadReceipt": _of(Tells.PUBLIC, "status reason time signature sealed sealed_hash"),
    "UploadState": _of(Tells.PUBLIC, "offset wanted receipt summed"),
    "Welcome": _of(
        Tells.PUBLIC, "version coordinator heartbeat_seconds clock identity revocations clone relay"
    ),
    # Of the silo's own credentials, to the holder of its installation's key.
    "CloneSeen": _of(Tells.PUBLIC, "time address"),
    "Refused": _of(Tells.PUBLIC, "reason"),
    "ReportWish": _of(Tells.PUBLIC, "request author reason created expires"),
    "Standing": _of(Tells.PUBLIC, "disabled reason"),
    # A silo to the coordinator.
    "Hello": _of(
        Tells.PUBLIC,
        "version protocol tasks metadata devices clock spooled identity coordinator seen installation "
        "maintenance capacity passage",
    ),
    "Passage": _of(Tells.PUBLIC, "relay signature"),
    "Capacity": _of(Tells.PUBLIC, "jobs gpus memory disk"),
    # A person at the silo decides, and writes the reason.
    "Maintenance": _of(Tells.PUBLIC, "drained reason"),
    # Where the level hides a silo's training, lines with figures of it leave if its own file says so.
    "SharedLines": {"lines": Tells.SILO},
    "SharedLine": _of(Tells.PUBLIC, "number time step level kind text"),
    # A person at the silo has seen each byte, or its file says that nobody need.
    "SiloReport": _of(Tells.PUBLIC, "request status reason report"),
    "Heartbeat": {"state": Tells.PUBLIC},
    # Of the silo's machines and the job's model.
    "Accepted": _of(Tells.PUBLIC, "step queued setup prepared"),
    "Setup": _of(Tells.PUBLIC, "machines ranks device memory plan degrees factor_rank"),
    "Progress": {**_of(Tells.PUBLIC, "step activity"), **_of(Tells.SILO, "done total loss figures")},
    # Sentences of the agent: no message of a task's exception, no figure of an account.
    "Failure": _of(Tells.PUBLIC, "step kind detail"),
    "Trouble": _of(Tells.PUBLIC, "step kind detail action"),
    "Evaluated": {"step": Tells.PUBLIC, "metrics": Tells.EVALUATION},
    "Reply": _of(Tells.PUBLIC, "step payload"),
    "Goodbye": {"reason": Tells.PUBLIC},
    # The bytes that follow are the update: masked, noisy, or bare to a coordinator that adds the noise.
    "UploadHeader": {
        # Of arrivals the network and the clock decide.
        **_of(Tells.PUBLIC, "step model layout encoding offset announcement time arrival"),
        # Of what the coordinator gets in the next breath; the signature is over these fields alone.
        **_of(Tells.PUBLIC, "content signature"),
        **_of(Tells.SILO, "examples metrics writing"),
    },
    "Writing": _of(Tells.SILO, "seconds error trials"),
    # Within the trials of a Writing.
    "Trial": _of(Tells.PUBLIC, "encoding size seconds error"),
    "Arrival": _of(Tells.PUBLIC, "size seconds"),
}
"""Channel → field → what it tells. Capitalised channels are messages of the wire."""


def event_released(
    kind: str,
    message: str,
    place: Mapping[str, Any],
    detail: Mapping[str, Any],
    privacy: NoPrivacy | Private,
) -> tuple[str, dict[str, Any]] | None:
    """Message and detail as they may be sent, None for an event that stays in the coordinator's own log.

    `place` has round, attempt and client. An event that is not in the table stays there as well.
    """
    known = EVENTS.get(kind)
    if known is None or (known.about and not is_told(privacy, Tells.COHORT)):
        return None
    kinds = withheld(privacy)
    told = kinds.isdisjoint(known.message)
    if not told and not known.instead:
        return None
    shown = {name: value for name, value in detail.items() if known.detail.get(name) in set(Tells) - kinds}
    return message if told else known.instead.format(**place), shown

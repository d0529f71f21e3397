"""From a job's text or row to its plan and its driver: which collaborators a job needs is decided here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundtable.core.algorithms.factors.own_ranks import RankTable
from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.encodings.foreign.approval import not_approved
from roundtable.core.errors import ConfigError
from roundtable.core.layout import Layout
from roundtable.core.models import open_model
from roundtable.core.observability.link_estimate import LinkEstimate
from roundtable.core.privacy_table import NoPrivacy, masking_of, privacy_from
from roundtable.engine import Plan, Roster, RoundEngine, make_plan, record_from_plain
from roundtable.engine import messages as m
from roundtable.engine.validation.layout_composition import check_layout
from roundtable.engine.validation.transfer_composition import check_cohort_is_all
from roundtable.server.door.from_operators import CONFIG_CHARACTERS
from roundtable.server.door.to_agents import SignedSubmission
from roundtable.server.jobs.actions import JobActions, JobParts
from roundtable.server.jobs.aggregate_action import AggregateAction
from roundtable.server.jobs.background import BackgroundTasks
from roundtable.server.jobs.combiner import Combiner
from roundtable.server.jobs.job_account import JobAccount, NoAccount
from roundtable.server.jobs.job_inbox import JobInbox
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.job_tracking import JobTracking
from roundtable.server.jobs.plain_rounds import PlainRounds
from roundtable.server.jobs.privacy_budget import Account, worst_charges
from roundtable.server.jobs.round_collection import RoundCollection
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.jobs.secagg.secure_rounds import SecureRounds
from roundtable.server.jobs.step_instructions import StepInstructions
from roundtable.server.operations.storage_troubles import StorageTroubles
from roundtable.server.queue.contenders import held_for
from roundtable.server.storage.artifact_store import DamagedArtifact
from roundtable.server.store import AgentRow, JobRow
from roundtable.server.store.ledger import Total


@dataclass(frozen=True)
class Submission:
    """A job as an operator submits it: its JSON, its initial model, and an identifier of the request.

    `job` is the identifier that the job gets; `time` and `coordinator` belong to what was signed.
    """

    job: str
    request_id: str
    config: str
    model: str
    submitter: str
    submitter_role: str
    signature: bytes = b""
    certificate: bytes = b""
    time: float = 0.0
    coordinator: str = ""


@dataclass(frozen=True)
class StoredJob:
    """A job as the database has it: its row, what its engine remembers of clients, its newest event's number,
    its rounds' records, all agents."""

    row: JobRow
    clients: Mapping[str, Mapping[str, Any]]
    sequence: int
    records: Sequence[str]
    agents: Sequence[AgentRow]


def parse_job(text: str) -> JobConfig:
    """The job that an operator has submitted as JSON. ConfigError for one that is too long or wrong."""
    if len(text) > CONFIG_CHARACTERS:
        raise ConfigError(f"the job is {len(text)} characters long; at most {CONFIG_CHARACTERS} are accepted")
    return job_from_json(text)


def plan_of(job: JobConfig, layout: Layout, population: int, spent: Sequence[Total] = ()) -> Plan:
    """The job's plan over a population of so many silos that bear what is `spent`."""
    slices = tuple(slice(spec.offset, spec.offset + spec.size) for spec in layout.averaged)
    plan = make_plan(job, population, slices, worst_charges(job.privacy, spent)).over(layout)
    check_layout(job, layout)
    check_cohort_is_all(job, population)
    return plan


def check_approved(job: JobConfig, services: JobServices) -> None:
    """ConfigError where the job names code of others that this coordinator's people have not named."""
    named = job.transfer.foreign
    if reasons := [*not_approved(named, services.encodings, "this coordinator", "coordinator.toml")]:
        raise ConfigError("; ".join(reasons), key=("transfer",))


def client_info(job: JobConfig, agent: AgentRow, link: LinkEstimate) -> m.ClientInfo:
    """What the engine of the job may know of an agent, and of its line."""
    held, counts = held_for(job, agent), (agent.selected, agent.completed)
    return m.ClientInfo(agent.name, agent.metadata, agent.size, held, link, *counts)


def layout_of(model: str, services: JobServices) -> Layout:
    """The layout of a stored model. Blocks. EncodingError, LayoutError where it is none of ours."""
    try:
        with services.artifacts.using(model) as path:
            return open_model(path).layout
    except DamagedArtifact:
        services.artifacts.mend(model)
    with services.artifacts.using(model) as path:
        return open_model(path).layout


def stored_plan(row: JobRow, services: JobServices) -> tuple[JobConfig, Layout, Plan]:
    """A stored job with its layout, and its plan as its ledger has it. Blocks: reads the initial model."""
    job = parse_job(row.config)
    check_approved(job, services)
    layout = layout_of(row.initial_model, services)
    settled = with_settled_noise(job, row.snapshot["noise"])
    return job, layout, plan_of(settled, layout, int(row.snapshot["population"]))


def make_driver(stored: StoredJob, services: JobServices, reserving: asyncio.Lock) -> JobRunner:
    """The driver of a stored job, its engine as it was; `reserving` is held while any job reserves privacy.

    Blocks: reads the layout from the initial model. Raises RoundtableError where the job cannot go on.
    """
    row = stored.row
    job, layout, plan = stored_plan(row, services)
    history = [record_from_plain(json.loads(record)) for record in stored.records]
    snapshot = {**row.snapshot["engine"], "clients": stored.clients}
    # Silos that have the task no more are not drawn, and their places in a secret draw stay.
    roster = Roster(int(row.snapshot["population"]))
    engine = RoundEngine.restore(job, snapshot, history, roster, plan.strategy)
    for agent in stored.agents:
        if agent.offers(job.task.name):
            info = client_info(job, agent, services.links.of(agent.name))
            engine.handle(m.ClientJoined(info, online=False), services.clock())
    inbox = JobInbox()
    tasks = BackgroundTasks(row.id)
    account: JobAccount = NoAccount()
    if not isinstance(job.privacy, NoPrivacy):
        population = services.populations.of(job)
        account = Account(row.id, job, plan, population, services.database, services.clock, reserving)
    collection: RoundCollection = PlainRounds(job, layout.sent, services)
    if masking_of(job.privacy) is not None:
        collection = SecureRounds(row.id, job, row.config, layout.sent, services, inbox, tasks)
    combiner = Combiner(job, plan, services.artifacts, services.trusted, services.shards)
    troubles = StorageTroubles(row.id, row.name, services.alerts, services.clock, inbox.notify)
    aggregate = AggregateAction(row.id, combiner, collection, account, services, inbox, troubles)
    ranked = job.algorithm if isinstance(job.algorithm, RankTable) else RankTable()
    instructions = StepInstructions(
        row.id, row.config, layout.fingerprint, _submission(row), services, ranked.choices
    )
    tracking = JobTracking(row.id, job, services.tracking, history)
    parts = JobParts(inbox, instructions, collection, account, aggregate, troubles)
    actions = JobActions(row.id, parts, tracking, services, tasks)
    durations = [record.ended - record.started for record in history]
    return JobRunner(row, job, layout, engine, parts, actions, services, stored.sequence, durations)


def with_settled_noise(job: JobConfig, noise: Mapping[str, Any]) -> JobConfig:
    """The job with the noise that was settled at its submission: nothing that is spent later, and no other
    version of the optimiser, changes it."""
    if not noise:
        return job
    privacy = privacy_from({**job.privacy.model_dump(), **noise}, "the stored job")
    return job.model_copy(update={"privacy": privacy})


def _submission(row: JobRow) -> SignedSubmission:
    """The submitter's signature as silos get it; jobs of older versions have none."""
    return SignedSubmission(
        submitter=row.submitter,
        request_id=row.request_id,
        signature=bytes.fromhex(row.snapshot.get("signature", "")),
        certificate=row.snapshot.get("certificate", "").encode(),
        initial_model=row.initial_model,
        **row.snapshot.get("signed", {}),
    )

"""What the coordinator remembers. `server/migrations` makes these tables; a test compares the two.

JSON is kept as text: it is read whole by one owner and never searched.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData(
    naming_convention={"pk": "pk_%(table_name)s"}
    | {kind: f"{kind}_%(table_name)s_%(column_0_name)s" for kind in ("uq", "ix", "fk")}
)

DIGEST = String(64)
NAME = String(100)


def _job() -> Column[str]:
    return Column("job", String(32), ForeignKey("jobs.id"), primary_key=True)


coordinator = Table(
    "coordinator",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("identity", String(64), nullable=False),
    Column("created", Double, nullable=False),
)

lease = Table(
    "lease",
    metadata,
    # One row: which coordinator may write. `token` grows with each holder, `expires` is the database's time.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("address", String(200), nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("expires", Double, nullable=False),
)

clients = Table(
    "clients",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("version", String(50), nullable=False),
    Column("tasks", Text, nullable=False),
    Column("metadata", Text, nullable=False),
    Column("devices", Text, nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("selected", Integer, nullable=False),
    Column("completed", Integer, nullable=False),
    Column("examples", BigInteger),
    # Why it is asked for nothing new, by its silo and by operators; empty where it is asked.
    Column("drained", Text, nullable=False, server_default=""),
    Column("disabled", Text, nullable=False, server_default=""),
    # core.observability.link_estimate as JSON; empty as long as nothing was measured.
    Column("link", Text, nullable=False, server_default=""),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", NAME, nullable=False, index=True),
    Column("request_id", String(200), nullable=False, unique=True),
    Column("submitter", NAME, nullable=False),
    # Empty for jobs of before roles were noted.
    Column("submitter_role", String(20), nullable=False, server_default=""),
    Column("config", Text, nullable=False),
    Column("initial_model", DIGEST, nullable=False),
    Column("model", DIGEST, nullable=False),
    Column("optimizer", DIGEST, nullable=False),
    # The best model where the job keeps it, with its round; empty where there is none.
    Column("best_model", DIGEST, nullable=False, server_default=""),
    Column("best_round", Integer, nullable=False, server_default="0"),
    Column("best_value", Double, nullable=False, server_default="0"),
    Column("status", String(20), nullable=False),
    Column("reason", Text, nullable=False),
    Column("rounds", Integer, nullable=False),
    Column("rounds_done", Integer, nullable=False),
    Column("snapshot", Text, nullable=False),
    # Grows by one with each transition; with the process that wrote it, so that a transition whose
    # answer was lost is not made twice, and one of a coordinator that was replaced is not made at all.
    Column("version", Integer, nullable=False),
    Column("writer", String(32), nullable=False),
    Column("submitted", Double, nullable=False),
    Column("updated", Double, nullable=False),
    # Which run of a job that is repeated, from 1, and 0 for others; whether another run is to follow it.
    Column("run", Integer, nullable=False, server_default="0"),
    Column("repeats", Integer, nullable=False, server_default="0"),
)

events = Table(
    "events",
    metadata,
    _job(),
    Column("sequence", Integer, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("kind", String(50), nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("client", NAME, nullable=False),
    Column("message", Text, nullable=False),
    Column("detail", Text, nullable=False),
)

rounds = Table(
    "rounds",
    metadata,
    _job(),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, nullable=False),
    Column("model", DIGEST, nullable=False),
    Column("optimizer", DIGEST, nullable=False),
    Column("record", Text, nullable=False),
    Column("committed", Double, nullable=False),
)

job_lines = Table(
    "job_lines",
    metadata,
    # The log of a job: the coordinator's own lines (silo is empty), and those that silos share.
    _job(),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("silo", NAME, nullable=False),
    # Orders the lines of whoever logged them, and tells one that is sent again.
    Column("number", BigInteger, nullable=False),
    Column("level", String(10), nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("phase", String(128), nullable=False),
    Column("kind", String(10), nullable=False),
    Column("text", Text, nullable=False),
    # By the coordinator's clock; `time` is that of whoever logged it.
    Column("received", Double, nullable=False),
    Index("uq_job_lines_number", "job", "silo", "number", unique=True),
)

job_clients = Table(
    "job_clients",
    metadata,
    # What a job's engine remembers of each client that it has asked: engine.state.ClientRecord as JSON.
    # Apart from the snapshot: few of thousands change with a transition.
    _job(),
    Column("client", NAME, primary_key=True),
    Column("record", Text, nullable=False),
)

job_setups = Table(
    "job_setups",
    metadata,
    # What silos train a job on: core.observability.training_setup as JSON, numbered from 1 for each silo.
    _job(),
    Column("client", NAME, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("round", Integer, nullable=False),
    Column("setup", Text, nullable=False),
)

updates = Table(
    "updates",
    metadata,
    _job(),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("client", NAME, primary_key=True),
    Column("digest", DIGEST, nullable=False, index=True),
    Column("size", BigInteger, nullable=False),
    Column("examples", BigInteger, nullable=False),
    Column("loss", Double),
    Column("metrics", Text, nullable=False),
    # "accepted", or "rejected" with a reason: a repeated upload gets the same answer.
    Column("receipt", String(20), nullable=False),
    Column("reason", Text, nullable=False),
    Column("received", Double, nullable=False),
    # The silo's signed statement as core.signing.envelope makes it; empty where it has no identity.
    Column("statement", Text, nullable=False, server_default=""),
)

relayed_sums = Table(
    "relayed_sums",
    metadata,
    _job(),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    # The first of the silos whose updates are in the sum, by name: no silo is in two sums of an attempt.
    Column("member", NAME, primary_key=True),
    Column("relay", NAME, nullable=False),
    Column("digest", DIGEST, nullable=False, index=True),
    Column("received", Double, nullable=False),
    # The relay's signed statement as core.signing.envelope makes it: whose updates, with which digests.
    Column("statement", Text, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("digest", DIGEST, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("created", Double, nullable=False),
)

_SHARED: dict[str, Any] = dict.fromkeys(("sqlite_where", "postgresql_where"), text("silo IN ('', '*')"))

ledger = Table(
    "ledger",
    metadata,
    Column("id", Integer, primary_key=True),
    # Whose privacy is spent: the group of silos or records that several jobs may draw on.
    Column("population", String(200), nullable=False),
    # One silo's own account; empty for the population's.
    Column("silo", NAME, nullable=False),
    Column("job", String(32), ForeignKey("jobs.id"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("charge", Text, nullable=False),
    # Whether anything that depends on the data has left the coordinator for this charge.
    Column("released", Boolean, nullable=False),
    Column("time", Double, nullable=False),
    Column("digest", String(64), nullable=False, server_default=""),
    Index("ix_ledger_account", "population", "silo"),
    # What all silos bear is charged once to an attempt; a silo's own charges are one for each digest of its
    # update: trained again, it has other noise.
    Index("uq_ledger_step", "job", "round", "attempt", "silo", unique=True, **_SHARED),
)

budgets = Table(
    "budgets",
    metadata,
    # The most that all jobs together may spend on a population, and the operator who said so.
    Column("population", String(200), primary_key=True),
    Column("epsilon", Double, nullable=False),
    Column("delta", Double, nullable=False),
    Column("accountant", String(20), nullable=False),
    Column("author", NAME, nullable=False),
    Column("time", Double, nullable=False),
)

invitations = Table(
    "invitations",
    metadata,
    Column("identifier", String(32), primary_key=True),
    Column("silo", NAME, nullable=False),
    # SHA-256 of the secret; the secret itself is stored nowhere.
    Column("digest", DIGEST, nullable=False),
    Column("uses", Integer, nullable=False),
    Column("used", Integer, nullable=False),
    Column("author", NAME, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double, nullable=False),
)

certificates = Table(
    "certificates",
    metadata,
    # What this coordinator has issued itself. Serial number in hexadecimal.
    Column("serial", String(40), primary_key=True),
    Column("name", NAME, nullable=False, index=True),
    # SHA-256 of the public key: a repeated enrolment with the same key is the same enrolment.
    Column("key", DIGEST, nullable=False),
    Column("invitation", String(32), nullable=False),
    Column("issued", Double, nullable=False),
    Column("expires", Double, nullable=False),
)

installations = Table(
    "installations",
    metadata,
    # SHA-256 of a silo's public key, and the agent's installation that came with it first.
    Column("key", DIGEST, primary_key=True),
    Column("name", NAME, nullable=False, index=True),
    Column("installation", String(64), nullable=False),
    Column("bound", Double, nullable=False),
    # When somebody else came with the key for the last time that was noted, and from where; 0 for never.
    Column("clone_time", Double, nullable=False, server_default="0"),
    Column("clone_address", Text, nullable=False, server_default=""),
)

reports = Table(
    "reports",
    metadata,
    # What operators have asked silos to report of themselves, and the JSON that a silo sent.
    Column("request", String(32), primary_key=True),
    Column("silo", NAME, nullable=False, index=True),
    Column("author", String(200), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double, nullable=False),
    # waiting, shown, denied, answered.
    Column("status", String(10), nullable=False),
    Column("answered", Double, nullable=False),
    Column("said", Text, nullable=False),
    Column("report", Text, nullable=False),
)

revoked = Table(
    "revoked",
    metadata,
    # Every certificate that a party had by then is void: who is certified anew is not concerned.
    Column("role", String(20), primary_key=True),
    Column("name", NAME, primary_key=True),
    Column("author", String(200), nullable=False),
    Column("reason", Text, nullable=False),
    Column("time", Double, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("identifier", String(32), nullable=False, unique=True),
    Column("digest", DIGEST, nullable=False),
    Column("role", String(20), nullable=False),
    Column("author", NAME, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double, nullable=False),
    Column("revoked", Boolean, nullable=False),
)

pending = Table(
    "pending",
    metadata,
    # What waits for a second person.
    Column("identifier", String(16), primary_key=True),
    Column("action", String(20), nullable=False),
    Column("role", String(20), nullable=False),
    Column("name", NAME, nullable=False),
    Column("author", String(200), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    # Append-only: the database itself refuses to change or delete a row.
    Column("sequence", Integer, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("action", String(50), nullable=False, index=True),
    Column("object", String(200), nullable=False),
    Column("detail", Text, nullable=False),
    Column("previous", DIGEST, nullable=False),
    Column("hash", DIGEST, nullable=False),
)

seals = Table(
    "seals",
    metadata,
    # A signature over the audit log up to an entry, as core.signing.envelope makes it.
    Column("sequence", Integer, primary_key=True, autoincrement=False),
    Column("document", Text, nullable=False),
    Column("time", Double, nullable=False),
)

archives = Table(
    "archives",
    metadata,
    # Append-only: which entries of the audit log, with their seals, are an artifact; the signed statement.
    Column("first", Integer, primary_key=True, autoincrement=False),
    Column("last", Integer, nullable=False),
    Column("document", Text, nullable=False),
    Column("artifact", DIGEST, nullable=False),
    Column("time", Double, nullable=False),
)

page_sessions = Table(
    "page_sessions",
    metadata,
    # Who has signed in to the page: `digest` is SHA-256 of the browser's secret.
    Column("digest", DIGEST, primary_key=True),
    Column("role", String(20), nullable=False),
    Column("name", String(200), nullable=False),
    Column("source", String(20), nullable=False),
    Column("credential", DIGEST, nullable=False),
    Column("created", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("expires", Double, nullable=False),
)

"""Which artifacts the database mentions, and which nothing needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from roundtable.core.config import JobConfig, job_from_json
from roundtable.core.errors import ConfigError, RoundtableError
from roundtable.core.job_tables.keep_table import KeepTable
from roundtable.engine.validation.repeatable import why_not_repeatable
from roundtable.server.store import tables
from roundtable.server.store.rows import ArtifactRow

SECRET_KINDS = ("update", "optimizer", "audit")
LIVE = ("waiting", "running", "paused")


@dataclass(frozen=True)
class Keep:
    """Which models stay: those of each job's `newest` rounds, and of every `every`-th (0: of no other),
    beside those that the job's own `[keep]` names.

    `updates` is the number of a job's newest rounds of which everything stays that it takes to make their
    models again: their updates, the models and the optimizer states that they began with. Of jobs that
    have been over since before `ended_before` nothing stays. `wanted` is the most models that a job's own
    `every` may name.
    """

    newest: int
    every: int = 0
    updates: int = 0
    ended_before: float = 0.0
    wanted: int = 100

    def check_wanted(self, job: JobConfig) -> None:
        """ConfigError for a job that wants more models kept than this coordinator keeps."""
        every = job.keep.every
        if every and job.rounds // every > self.wanted:
            remedy = "leave it out"
            if self.wanted:
                remedy = f"set keep.every = {-(-job.rounds // self.wanted)} or more"
            raise ConfigError(
                f"keep.every = {every} over {job.rounds} rounds would keep {job.rounds // every} models; "
                f"this coordinator keeps at most {self.wanted} of a job (keep_wanted): {remedy}"
            )

    def repeatable(self, config: str) -> int:
        """The number of a job's newest rounds that can be made again; `config` is the job's JSON."""
        return self.updates if self.updates and not _why_not(config) else 0

    def models(self, config: str) -> int:
        """The number of the newest rounds whose models stay."""
        repeatable = self.repeatable(config)
        return max(self.newest, repeatable + 1) if repeatable else self.newest


@lru_cache(maxsize=256)
def _wanted(config: str) -> KeepTable:
    """What the job itself wants kept; nothing where it cannot be read here, any more."""
    try:
        return job_from_json(config).keep
    except (RoundtableError, ValueError):
        return KeepTable()


@lru_cache(maxsize=256)
def _why_not(config: str) -> str:
    """Why nobody can make the job's models again; one that cannot be read here, any more, is one of those."""
    try:
        return why_not_repeatable(job_from_json(config))
    except (RoundtableError, ValueError) as error:
        return str(error)


def note_artifact(connection: Connection, artifact: ArtifactRow) -> None:
    """Inserts an artifact's row unless there is one."""
    known = sa.select(sa.literal(1)).where(tables.artifacts.c.digest == artifact.digest)
    if connection.execute(known).first() is None:
        connection.execute(sa.insert(tables.artifacts).values(asdict(artifact)))


def all_digests(connection: Connection) -> list[str]:
    """Every artifact that the database mentions."""
    return list(connection.execute(sa.select(tables.artifacts.c.digest)).scalars())


def note_upload(connection: Connection, artifact: ArtifactRow) -> None:
    """Notes what somebody has stored who may read it from then on, also where the same bytes were secret."""
    note_artifact(connection, artifact)
    table = tables.artifacts.c
    same = sa.update(tables.artifacts).where(table.digest == artifact.digest, table.kind.in_(SECRET_KINDS))
    connection.execute(same.values(kind=artifact.kind, created=artifact.created))


def is_readable(connection: Connection, digest: str) -> bool:
    """Whether operators may read it: it is mentioned, and no silo's update and no optimizer's state."""
    table = tables.artifacts.c
    query = sa.select(sa.literal(1)).where(table.digest == digest, table.kind.not_in(SECRET_KINDS))
    return connection.execute(query).first() is not None


def spent_updates(connection: Connection, job: str, round_number: int, keep: Keep) -> list[str]:
    """Digests of updates of this job up to a committed round, but for those that are to be kept."""
    kept = keep.repeatable(_config(connection, job))
    known = sa.select(tables.artifacts.c.digest)
    received = sa.union(
        *(
            sa.select(table.digest).where(
                table.job == job, table.round <= round_number - kept, table.digest.in_(known)
            )
            for table in (tables.updates.c, tables.relayed_sums.c)
        )
    )
    return list(connection.execute(received).scalars())


def old_models(connection: Connection, job: str, keep: Keep) -> list[str]:
    """Models and optimizer states of this job's rounds that need not be kept."""
    table, config = tables.rounds.c, _config(connection, job)
    newest = connection.execute(sa.select(sa.func.max(table.round)).where(table.job == job)).scalar() or 0
    known = sa.select(tables.artifacts.c.digest)
    digests_left: set[str] = set()
    for column, kept in (
        (table.model, keep.models(config)),
        (table.optimizer, keep.repeatable(config) + 1),
    ):
        query = sa.select(column).where(table.job == job, table.round <= newest - kept, column.in_(known))
        digests_left.update(connection.execute(query).scalars())
    return sorted(digests_left)


def old_deltas(connection: Connection) -> list[str]:
    """Changes from model to model, of all jobs: those that no snapshot of a job mentions are not needed."""
    table = tables.artifacts.c
    return list(connection.execute(sa.select(table.digest).where(table.kind == "delta")).scalars())


def _config(connection: Connection, job: str) -> str:
    return str(
        connection.execute(sa.select(tables.jobs.c.config).where(tables.jobs.c.id == job)).scalar_one()
    )


def left_over(connection: Connection, before: float) -> list[str]:
    """All updates, and models and optimizer states from before that time that no round has taken: of
    attempts that were given up, and initial models that no job was made of. Not the audit log's archives."""
    table, used = tables.artifacts.c, tables.rounds.c
    archives = sa.select(tables.archives.c.artifact)
    rounds = sa.union(sa.select(used.model), sa.select(used.optimizer), archives).subquery()
    old = sa.or_(table.created < before, table.kind == "update")
    query = sa.select(table.digest).where(old, table.digest.not_in(sa.select(rounds)))
    return sorted(connection.execute(query).scalars())


def mentioned(connection: Connection, digests: Sequence[str]) -> set[str]:
    """The subset of these that the database mentions."""
    query = sa.select(tables.artifacts.c.digest).where(tables.artifacts.c.digest.in_(digests))
    return set(connection.execute(query).scalars())


def forget_unused(connection: Connection, digests: Sequence[str], keep: Keep) -> list[str]:
    """Deletes the rows of those that no job needs, and returns them; the files may then go.

    Needed are each job's initial, newest and best model and optimizer state, what its running round has made
    and received, the rounds that are to be kept, and archives of the audit log.
    """
    gone = [digest for digest in digests if not _needed(connection, digest, keep)]
    if gone:
        connection.execute(sa.delete(tables.artifacts).where(tables.artifacts.c.digest.in_(gone)))
    return gone


def _needed(connection: Connection, digest: str, keep: Keep) -> bool:
    jobs = tables.jobs.c
    current = sa.select(jobs.id).where(
        _counts(keep),
        sa.or_(
            *(
                column == digest
                for column in (jobs.initial_model, jobs.model, jobs.optimizer, jobs.best_model)
            ),
            sa.and_(jobs.status.in_(LIVE), jobs.snapshot.contains(digest)),
        ),
    )
    archive = sa.select(tables.archives.c.first).where(tables.archives.c.artifact == digest)
    needed = any(connection.execute(query.limit(1)).first() for query in (current, archive))
    return needed or _recent(connection, digest, keep)


def _counts(keep: Keep) -> sa.ColumnElement[bool]:
    """Whether a job counts, that is needs anything: one that is over does for a time only, if one is set."""
    jobs = tables.jobs.c
    return sa.or_(jobs.status.in_(LIVE), jobs.updated >= keep.ended_before)


def _recent(connection: Connection, digest: str, keep: Keep) -> bool:
    """Whether it belongs to a round that is kept, of any job; how many are follows from the job's level."""
    jobs, rounds, updates = tables.jobs.c, tables.rounds.c, tables.updates.c
    place = (rounds.round, rounds.model, jobs.rounds_done, jobs.config)
    made = sa.select(*place).join(tables.jobs, jobs.id == rounds.job).where(_counts(keep))
    for row in connection.execute(made.where(sa.or_(rounds.model == digest, rounds.optimizer == digest))):
        age = row.rounds_done - row.round
        is_model = row.model == digest
        most = keep.models(row.config) if is_model else keep.repeatable(row.config) + 1
        every = keep.every and row.round % keep.every == 0
        if age < most or (is_model and (every or _wanted(row.config).rounds(row.round))):
            return True
    sent = sa.select(updates.round, jobs.rounds_done, jobs.config).join(tables.jobs, jobs.id == updates.job)
    sent = sent.where(_counts(keep))
    return any(
        row.rounds_done - row.round < keep.repeatable(row.config)
        for row in connection.execute(sent.where(updates.digest == digest, updates.receipt == "accepted"))
    )

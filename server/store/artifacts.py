"""Which artifacts the database mentions, and which nothing needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
_AT_ONCE = 500


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
    if connection.execute(_KNOWN, {"digest": artifact.digest}).first() is None:
        connection.execute(_INSERT, dict(vars(artifact)))


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


def left_behind(connection: Connection, job: str, round_number: int, keep: Keep) -> list[str]:
    """What this job, of which a round was committed, does not need any more: updates up to that round, older
    models and optimizer states, but for those that are to be kept; and changes from model to model, of all
    jobs. `forget_unused` finds out who else needs them."""
    config = str(connection.execute(_CONFIG, {"job": job}).scalar_one())
    repeatable = keep.repeatable(config)
    ages = {"last": round_number - repeatable, "models": keep.models(config), "optimizers": repeatable + 1}
    return list(connection.execute(_LEFT_BEHIND, {"job": job, **ages}).scalars())


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
    return set(connection.execute(_MENTIONED, {"digests": digests}).scalars())


def forget_unused(connection: Connection, digests: Sequence[str], keep: Keep) -> list[str]:
    """Deletes the rows of those that no job needs, and returns them; the files may then go.

    All of them are mentioned. Needed are each job's initial, newest and best model and optimizer state, what
    its running round has made and received, the rounds that are to be kept, and archives of the audit log.
    """
    gone: list[str] = []
    for place in range(0, len(digests), _AT_ONCE):
        some = digests[place : place + _AT_ONCE]
        needed = _needed(connection, some, keep)
        gone += [digest for digest in some if digest not in needed]
        if not needed.issuperset(some):
            connection.execute(_FORGET, {"digests": [digest for digest in some if digest not in needed]})
    return gone


def _needed(connection: Connection, digests: Sequence[str], keep: Keep) -> set[str]:
    """Those of them that are current, or belong to a round that is kept, of any job; how many rounds are
    follows from the job's level."""
    given = {"digests": digests, "ended_before": keep.ended_before}
    needed = set(connection.execute(_CURRENT, given).scalars())
    for row in connection.execute(_MADE, given):
        age = row.rounds_done - row.round
        every = keep.every and row.round % keep.every == 0
        if age < keep.models(row.config) or every or _wanted(row.config).rounds(row.round):
            needed.add(row.model)
        if age <= keep.repeatable(row.config):
            needed.add(row.optimizer)
    if keep.updates:
        for sent in connection.execute(_SENT, {**given, "most": keep.updates}):
            if sent.rounds_done - sent.round < keep.repeatable(sent.config):
                needed.add(sent.digest)
    return needed


# Built once: each round runs them, and building one takes longer than running it.
_jobs, _rounds, _updates, _archives = tables.jobs.c, tables.rounds.c, tables.updates.c, tables.archives.c
_artifacts, _sums = tables.artifacts.c, tables.relayed_sums.c
_JOB: sa.BindParameter[str] = sa.bindparam("job")
_DIGEST: sa.BindParameter[str] = sa.bindparam("digest")
_DIGESTS: sa.BindParameter[list[str]] = sa.bindparam("digests", expanding=True)
_mentioned = sa.select(_artifacts.digest)
# A job that is over needs anything for a time only, if one is set.
_counts = sa.or_(_jobs.status.in_(LIVE), _jobs.updated >= sa.bindparam("ended_before"))
_KNOWN = sa.select(sa.literal(1)).where(_artifacts.digest == _DIGEST)
_INSERT = sa.insert(tables.artifacts)
_MENTIONED = _mentioned.where(_artifacts.digest.in_(_DIGESTS))
_FORGET = sa.delete(tables.artifacts).where(_artifacts.digest.in_(_DIGESTS))
_CONFIG = sa.select(_jobs.config).where(_jobs.id == _JOB)
_newest = sa.select(sa.func.max(_rounds.round)).where(_rounds.job == _JOB).scalar_subquery()
_LEFT_BEHIND = sa.union(
    # From the few artifacts that there are: a long job has had many more updates.
    *(
        _mentioned.where(
            sa.exists().where(
                table.digest == _artifacts.digest, table.job == _JOB, table.round <= sa.bindparam("last")
            )
        )
        for table in (_updates, _sums)
    ),
    *(
        sa.select(column).where(
            _rounds.job == _JOB, _rounds.round <= _newest - sa.bindparam(kept), column.in_(_mentioned)
        )
        for column, kept in ((_rounds.model, "models"), (_rounds.optimizer, "optimizers"))
    ),
    _mentioned.where(_artifacts.kind == "delta"),
)
_named = (_jobs.initial_model, _jobs.model, _jobs.optimizer, _jobs.best_model)
_in_snapshot = sa.and_(_jobs.status.in_(LIVE), _jobs.snapshot.contains(_artifacts.digest))
_CURRENT = _MENTIONED.where(
    sa.or_(
        sa.exists().where(_counts, sa.or_(*(column == _artifacts.digest for column in _named), _in_snapshot)),
        sa.exists().where(_archives.artifact == _artifacts.digest),
    )
)
_MADE = (
    sa.select(_rounds.round, _rounds.model, _rounds.optimizer, _jobs.rounds_done, _jobs.config)
    .join(tables.jobs, _jobs.id == _rounds.job)
    .where(_counts, sa.or_(_rounds.model.in_(_DIGESTS), _rounds.optimizer.in_(_DIGESTS)))
)
_SENT = (
    sa.select(_updates.digest, _updates.round, _jobs.rounds_done, _jobs.config)
    .join(tables.jobs, _jobs.id == _updates.job)
    .where(
        _counts,
        _updates.digest.in_(_DIGESTS),
        _updates.receipt == "accepted",
        _updates.round > _jobs.rounds_done - sa.bindparam("most"),
    )
)

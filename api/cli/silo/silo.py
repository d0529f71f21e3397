"""`roundtable client …`: how a silo enrols, and what it says to jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import (
    ago,
    ask_secret,
    confirm,
    print_json,
    print_table,
    say,
    say_lines,
    tell,
)
from roundtable.core.errors import ConfigError

if TYPE_CHECKING:
    from roundtable.client.policy.config import AgentConfig
    from roundtable.client.policy.known_jobs import Decision
    from roundtable.client.policy.rules import Rules

_FOLDER = click.Path(path_type=Path)


@click.command()
@click.option("--coordinator", metavar="HOST[:PORT]", required=True, help="Its enrolment address; port 7444.")
@click.option(
    "--token",
    envvar="ROUNDTABLE_TOKEN",
    show_envvar=True,
    help="The invitation; asked for if it is left out, so that no process list shows it. - reads a line.",
)
@click.option("--credentials", type=_FOLDER, default="credentials", show_default=True, help="Folder to fill.")
@click.option("--passphrase", is_flag=True, help="Ask for a passphrase that seals the keys on disk.")
@json_option
def enroll(coordinator: str, token: str | None, credentials: Path, passphrase: bool, as_json: bool) -> None:
    """Enrol this silo with an invitation.

    Makes its keys here, and gets certificates for them. The keys never leave this machine. The coordinator is
    believed only if its authority is the one that the invitation names.
    """
    from roundtable.client.agent.enrolment import enroll as enrol_silo
    from roundtable.core.identity.invitation import Invitation

    if token is None:
        token = ask_secret("Invitation")
    elif token == "-":
        token = sys.stdin.readline()
    invitation = Invitation.parse(str(token))
    seal = None
    if passphrase:
        seal = ask_secret("Passphrase", twice=True).encode()
    identity = enrol_silo(coordinator, invitation, credentials, seal)
    sealed = ["The agent reads its passphrase from the file that ROUNDTABLE_PASSPHRASE_FILE names."]
    tell(
        as_json,
        {
            "name": identity.name,
            "folder": str(credentials),
            "expires": identity.expires.isoformat(),
            "sealed": seal is not None,
        },
        f"Enrolled as {identity.name!r}: {credentials}, valid until {identity.expires:%Y-%m-%d}.",
        "The agent renews it by itself. Next: name the folder in agent.toml; run `roundtable client`.",
        *(sealed if seal else []),
    )


@click.command("jobs")
@json_option
@click.pass_context
def jobs(context: click.Context, as_json: bool) -> None:
    """List the jobs that asked for this silo.

    With what its policy says to each.
    """
    from datetime import datetime

    from roundtable.client.policy.known_jobs import KnownJobs
    from roundtable.core.config import job_from_json

    config, rules = silo_of(context)
    known = KnownJobs(config.state)
    rows: list[tuple[str, ...]] = []
    listed = []
    for one in known.all():
        reasons = rules.objections(job_from_json(one.config), one.submitter or None, datetime.now())
        decision = known.decision(one)
        approved = decision is not None and decision.approved
        waits = "waits for approval" if config.policy.approval else "allowed"
        answer = _said(decision) if decision is not None else waits
        verdict = answer if decision is not None and not approved else reasons[0] if reasons else answer
        listed.append(
            {
                "job": one.id,
                "task": one.task,
                "submitter": one.submitter,
                "first_asked": one.first,
                "hash": one.digest,
                "objections": reasons,
                "approved": approved,
                "refused": decision is not None and not approved,
            }
        )
        rows.append((one.id, one.task, one.submitter or "unsigned", ago(one.first), one.digest[:12], verdict))
    if as_json:
        print_json(listed)
        return
    columns = ("job", "task", "submitter", "first asked", "hash", "here")
    print_table(columns, rows, "The coordinator has not asked for anything yet.")


@click.command("approve")
@click.argument("job")
@click.option("--yes", is_flag=True, help="Do not show the job and ask.")
@json_option
@click.pass_context
def approve(context: click.Context, job: str, yes: bool, as_json: bool) -> None:
    """Approve JOB in exactly the form that was requested.

    The silo takes part from the next round on. A job that changes needs another approval.
    """
    from datetime import datetime

    from roundtable.cli.shared.resolved import render
    from roundtable.client.policy.known_jobs import KnownJobs
    from roundtable.core.config import job_from_json
    from roundtable.core.identity.signing import VOUCHED_FOR

    if as_json and not yes:
        raise click.UsageError("--json asks nobody: look at the job with `client jobs`, and say --yes")
    config, rules = silo_of(context)
    known = KnownJobs(config.state)
    asked = known.find(job)
    resolved = job_from_json(asked.config)
    if not yes:
        say_lines(render(resolved))
        who = asked.submitter or "nobody whose signature proves it"
        if who.startswith(VOUCHED_FOR):
            who += " by the coordinator's word"
        confirm(f"Job {asked.id}, submitted by {who}, hash {asked.digest[:12]}. Take part?")
    known.approve(asked)
    reasons = rules.objections(resolved, asked.submitter or None, datetime.now())
    tell(
        as_json,
        {"job": asked.id, "task": asked.task, "hash": asked.digest, "approved": True, "objections": reasons},
        f"Approved job {asked.id} ({asked.task}), configuration {asked.digest[:12]}.",
        *(f"The policy refuses it all the same: {reason}" for reason in reasons),
    )


@click.command("refuse")
@click.argument("job")
@click.option("--reason", default="", help="For the coordinator's operators: one line; no data.")
@json_option
@click.pass_context
def refuse(context: click.Context, job: str, reason: str, as_json: bool) -> None:
    """Take no further part in JOB.

    It holds from the job's next step on, whatever the policy says and whatever the job becomes, until
    `roundtable client approve`. What has left before cannot be taken back.
    """
    from roundtable.client.policy.known_jobs import KnownJobs

    config, _ = silo_of(context)
    known = KnownJobs(config.state)
    asked = known.find(job)
    known.refuse(asked, reason)
    tell(
        as_json,
        {"job": asked.id, "task": asked.task, "hash": asked.digest, "refused": True, "reason": reason},
        f"Refused: this silo takes no further part in job {asked.id} ({asked.task}).",
    )


@click.command("explain")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--submitter", help="As if this operator had signed it.")
@json_option
@click.pass_context
def explain(context: click.Context, file: Path, submitter: str | None, as_json: bool) -> int:
    """Say whether this silo would take part in a job, and why.

    FILE describes the job. Nothing is run.
    """
    from datetime import datetime

    from roundtable.core.config import load_job

    config, rules = silo_of(context)
    reasons = rules.objections(load_job(file), submitter, datetime.now())
    if as_json:
        bounds = list(config.policy.bounds())
        print_json({"objections": reasons, "approval": config.policy.approval, "bounds": bounds})
        return 1 if reasons else 0
    for reason in reasons:
        say(f"no: {reason}")
    if not reasons:
        after = ", once a person has approved it" if config.policy.approval else ""
        say(f"yes: this silo would take part{after}")
    for line in config.policy.bounds():
        say(line)
    return 1 if reasons else 0


@click.command("forget")
@click.argument("silo")
@json_option
@click.pass_context
def forget(context: click.Context, silo: str, as_json: bool) -> None:
    """Forget the key of another silo in secure aggregation.

    The next one that SILO shows is taken as its own. For a silo that enrolled again with new keys. Ask its
    people first: a key that is not theirs is the sign of a coordinator that invents silos.
    """
    from roundtable.client.policy.peers import KnownPeers

    config, _ = silo_of(context)
    KnownPeers(config.state).forget(silo)
    tell(as_json, {"forgotten": silo}, f"Forgotten: the next key that {silo} shows is taken as its own.")


@click.command("hash")
@click.argument("name")
@click.option("--encoding", is_flag=True, help="NAME is an installed encoding, and not a task.")
@json_option
@click.pass_context
def hash_code(context: click.Context, name: str, encoding: bool, as_json: bool) -> None:
    """Print the hash of a task's code, or of an encoding's.

    A task's is for [tasks.NAME] blake3 in agent.toml, an encoding's for [encodings].
    """
    from roundtable.core.encodings.foreign.foreign_codec import ENTRY_POINT_GROUP
    from roundtable.core.plugins.code_hash import hash_of_code
    from roundtable.core.task import hash_of_task

    if encoding:
        digest = hash_of_code("encoding", name, ENTRY_POINT_GROUP, None)
        tell(as_json, {"name": name, "kind": "encoding", "blake3": digest}, digest)
        return
    config, rules = silo_of(context)
    if name not in rules.references:
        offered = ", ".join(sorted(rules.references)) or "none"
        raise ConfigError(f"[tasks] names no {name!r}; it names {offered}")
    digest = hash_of_task(rules.references[name], config.folder)
    tell(as_json, {"name": name, "kind": "task", "blake3": digest}, digest)


def _said(decision: Decision) -> str:
    """What a person has said, in a table's cell."""
    if decision.approved:
        return f"approved by {decision.by}"
    return f"refused by {decision.by}" + (f": {decision.reason}" if decision.reason else "")


def silo_of(context: click.Context) -> tuple[AgentConfig, Rules]:
    """The settings that `roundtable client --config` names, and their rules."""
    from roundtable.client.policy.config import load_agent_config

    assert context.parent is not None
    config = load_agent_config(context.parent.params["config"])
    return config, config.rules()

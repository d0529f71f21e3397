"""`roundtable job record`: when and by whom a job ran, on what, what it made, what went wrong.

Joined from what the coordinator tells: what the job's level of privacy withholds is in none of its parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import connect, connection_options, json_option
from roundtable.cli.shared.output import amount, duration, print_json, print_table, say
from roundtable.cli.shared.rounds import figures_of, metrics_of
from roundtable.proto import EVENTS_AT_ONCE

if TYPE_CHECKING:
    from roundtable.operator import OperatorClient
    from roundtable.proto.common_pb2 import Event
    from roundtable.proto.operator_pb2 import Client, JobDetail, SiloSetup

_BEGINS, _WAITS = "job_running", ("job_waiting", "job_paused")
_OVER = ("job_finished", "job_cancelled", "job_failed")


@click.command("record")
@click.argument("name", metavar="JOB")
@connection_options
@json_option
def record(name: str, coordinator: str | None, credentials: Path | None, as_json: bool) -> None:
    """Show the whole record of JOB, now or when it is over.

    Its times, the silos with what they trained on (ranks, devices, plan), its rounds, models and faults.
    """
    with connect(coordinator, credentials) as operator:
        detail = operator.job(name)
        found = job_record(detail, _events(operator, detail.job.id), operator.clients())
    if as_json:
        print_json(found)
        return
    _print(found)


def _events(operator: OperatorClient, job: str) -> list[Event]:
    """The job's events so far, oldest first."""
    found: list[Event] = []
    for update in operator.watch(job):
        found += update.events
        if len(update.events) < EVENTS_AT_ONCE:
            break
    return found


def _print(found: Mapping[str, Any]) -> None:
    job, times = found["job"], found["times"]
    say(f"job        {job['id']}  {job['name']}, by {job['submitter']}")
    say(f"status     {job['status']}{': ' + job['reason'] if job['reason'] else ''}")
    for name in ("submitted", "began", "ended"):
        if times[name]:
            say(f"{name:10} {datetime.fromtimestamp(times[name], UTC).isoformat(' ', 'seconds')}")
    say(f"ran        {duration(times['ran'])}, waited {duration(times['waited'])}")
    wish = {key: value for key, value in found["resources"].items() if value}
    say(f"asks for   {json.dumps(wish) if wish else 'nothing of its silos'}")
    say()
    rows = [_silo_row(name, silo) for name, silo in found["silos"].items()]
    columns = ("silo", "asked", "answered", "machines", "ranks", "device", "memory", "plan")
    print_table(columns, rows, "No silo that may be told of has taken part.")
    if found["rounds"]:
        say()
        rows = [_round_row(each) for each in found["rounds"]]
        print_table(("round", "attempt", "silos", "took", "model", "metrics"), rows, "")
    say()
    faults = [
        (str(f["round"]), f["severity"], f["incident"], f["silo"], f["message"], f.get("action", ""))
        for f in found["faults"]
    ]
    print_table(("fault in", "severity", "kind", "silo", "what", "what was done"), faults, "No fault.")


def _silo_row(name: str, silo: Mapping[str, Any]) -> tuple[str, ...]:
    counts = str(silo["asked"]), str(silo["contributed"])
    if not silo["setups"]:
        return (name, *counts, "", "", "", "", "")
    setup = silo["setups"][-1]
    changed = f" (set up {len(silo['setups'])} times)" if len(silo["setups"]) > 1 else ""
    memory = amount(setup["memory"]) if setup["memory"] else ""
    where = str(setup["machines"]), str(setup["ranks"]), setup["device"], memory
    rank = f"factors of rank {setup['factor_rank']}" if setup["factor_rank"] else ""
    return (name, *counts, *where, ", ".join(filter(None, (setup["plan"], rank))) + changed)


def _round_row(each: Mapping[str, Any]) -> tuple[str, ...]:
    told = {"training": {}, "before": {}, **each["metrics"]}
    metrics = ", ".join(f"{name} {value}" for name, value in metrics_of(told).items())
    silos = f"{each['contributors']}/{each['cohort']}" if each["cohort"] else "secret"
    took = duration(each["ended"] - each["started"])
    return str(each["round"]), str(each["attempt"]), silos, took, each["model"][:12], metrics


def job_record(detail: JobDetail, events: Sequence[Event], clients: Iterable[Client]) -> dict[str, Any]:
    """The record as JSON values.

    `times`: submitted, began and ended (Unix time, None where not yet), how many seconds it ran and waited.
    `silos`: of each that took part what it trains on, now and before, with its software and rounds.
    `rounds`: of each its times, cohort and metrics. `models`: digests by round. `faults`: incidents with
    their context, oldest first.
    """
    job, config = detail.job, json.loads(detail.job_config or "{}")
    records = [json.loads(record) for record in detail.history]
    return {
        "job": {
            "id": job.id,
            "name": job.name,
            "submitter": job.submitter,
            "status": job.status,
            "reason": job.reason,
            "rounds_done": job.rounds_done,
            "rounds": job.rounds,
            "task": config.get("task", {}),
            "privacy": config.get("privacy", {}).get("level", "none"),
        },
        "times": _times(job.submitted, events),
        "queue": config.get("queue", {}),
        "resources": config.get("resources", {}),
        "silos": _silos(records, detail.setups, clients),
        "rounds": [_round(record) for record in records],
        "models": _models(detail, records),
        "faults": [_fault(event) for event in events if "incident" in _detail(event)],
    }


def _times(submitted: float, events: Sequence[Event]) -> dict[str, float | None]:
    began = ended = since = None
    ran = waited = 0.0
    idle: float | None = submitted
    for event in events:
        if event.kind == _BEGINS:
            began = event.time if began is None else began
            waited += max(0.0, event.time - idle) if idle is not None else 0.0
            since, idle = event.time, None
        elif event.kind in (*_WAITS, *_OVER):
            ran += max(0.0, event.time - since) if since is not None else 0.0
            since, idle = None, event.time if idle is None else idle
            ended = event.time if event.kind in _OVER else None
    return {"submitted": submitted, "began": began, "ended": ended, "ran": ran, "waited": waited}


def _silos(
    records: Sequence[Mapping[str, Any]], setups: Iterable[SiloSetup], clients: Iterable[Client]
) -> dict[str, dict[str, Any]]:
    silos: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        return silos.setdefault(name, {"asked": 0, "contributed": 0, "setups": []})

    for record in records:
        for name in record.get("cohort", ()):
            of(name)["asked"] += 1
        for name in record.get("contributors", ()):
            of(name)["contributed"] += 1
    for setup in setups:
        of(setup.client)["setups"].append(
            {
                "time": setup.time,
                "round": setup.round,
                "machines": setup.machines,
                "ranks": setup.ranks,
                "device": setup.device,
                "memory": setup.memory,
                "plan": setup.plan,
                "degrees": dict(setup.degrees),
                "factor_rank": setup.factor_rank,
            }
        )
    for client in clients:
        if client.name in silos:
            known = {"version": client.version, "devices": list(client.devices)}
            silos[client.name] |= {**known, "metadata": dict(client.metadata)}
    return dict(sorted(silos.items()))


def _round(record: Mapping[str, Any]) -> dict[str, Any]:
    figures = figures_of(record)
    return {
        "round": record["round"],
        "attempt": record["attempt"],
        "started": record["started"],
        "ended": record["ended"],
        "cohort": len(record.get("cohort", ())),
        "contributors": len(record.get("contributors", ())),
        "failures": dict(record.get("failures", {})),
        "metrics": {name: figures[name] for name in ("training", "before", "evaluation") if figures[name]},
        "model": record.get("model", ""),
        "within": record.get("within", {}),
    }


def _models(detail: JobDetail, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    job = detail.job
    best = {"round": job.best.round, "value": job.best.value, "digest": job.best.model.digest}
    return {
        "initial": detail.initial_model.digest,
        "newest": job.model.digest,
        "best": best if job.HasField("best") else None,
        "rounds": {str(r["round"]): r["model"] for r in records if r.get("model")},
    }


def _fault(event: Event) -> dict[str, Any]:
    detail = dict(_detail(event))
    incident = detail.pop("incident")
    return {
        "time": event.time,
        "event": event.kind,
        "message": event.message,
        **{("incident" if key == "kind" else key): value for key, value in incident.items()},
        "silo": event.client,
        "round": event.round,
        "attempt": event.attempt,
        "context": detail,
    }


def _detail(event: Event) -> Mapping[str, Any]:
    found = json.loads(event.detail) if event.detail else {}
    return found if isinstance(found, dict) else {}

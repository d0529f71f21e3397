"""How a job reads: what a file describes, where a submitted one stands, how its model is loaded."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundtable.cli.shared.output import ago, amount, duration, print_table, say
from roundtable.cli.shared.rounds import figures_of, metrics_of
from roundtable.core.observability.transfer_figures import TransferSums

if TYPE_CHECKING:
    from roundtable.core.job_tables.task_table import JobTaskTable
    from roundtable.preparation import Prepared
    from roundtable.proto.operator_pb2 import ClientActivity, JobDetail
    from roundtable.simulation.reporting.client_table import ClientTable


_THROUGHPUT = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "bytes_per_token": ("bytes/token", "{:.3g}"),
    "communication": ("transfers", "{:.0%}"),
}
"""Figures of a round → the column's title, and how they read."""


_FIRST = 3


def loading_lines(task: JobTaskTable, path: Path, *, partial: bool = False) -> list[str]:
    """Three lines of Python that load a model file; `partial`: one without the frozen tensors."""
    made = f", parameters={task.parameters!r}" if task.parameters else ""
    some, loosely = (", partial=True", ", strict=False") if partial else ("", "")
    return [
        "import roundtable as rt",
        f"model = rt.load_task({json.dumps(task.name, ensure_ascii=False)}{made}).model()",
        f"model.load_state_dict(rt.load_model({json.dumps(str(path), ensure_ascii=False)}{some}){loosely})",
    ]


def summary_of(prepared: Prepared) -> dict[str, Any]:
    """What a sound job file amounts to, by name."""
    from roundtable.core.initial_model import travel_note
    from roundtable.core.task import lacks
    from roundtable.engine.validation.secure_feasibility import most_bytes, secure_summary

    job, layout = prepared.job, prepared.model.layout
    missing = lacks(prepared.task)
    by_script = f"by scripts at the silos (rt.join): the task has no {', '.join(missing)}"
    staying = [spec.name for spec in layout.tensors if spec.rule != "average"]
    warning = {"warning": " ".join(prepared.warnings)} if prepared.warnings else {}
    return (
        {
            "name": job.title,
            "task": type(prepared.task).__name__,
            "trained": by_script if missing else "by the task, at the silos",
            "rounds": job.rounds,
            "algorithm": job.algorithm.name,
            "aggregation": job.aggregation.rule,
            "privacy": job.privacy.level,
            "parameters": layout.model.size,
            "bytes a round and silo": most_bytes(job, layout.sent),
            "tensors that do not travel": staying,
            "frozen": travel_note(job, layout) or "nothing: all that is trained travels",
            "layout": layout.fingerprint,
            "digest": job.digest,
        }
        | warning
        | ({"secure aggregation": secure} if (secure := secure_summary(job, layout.sent)) else {})
    )


def in_one_line(value: Any) -> str:
    """A value of the summary for people: of many names the first."""
    if not isinstance(value, list):
        return str(value)
    rest = f" and {len(value) - _FIRST:,} more (--json)" if len(value) > _FIRST else ""
    return ", ".join(map(str, value[:_FIRST])) + rest or "none"


def print_detail(detail: JobDetail) -> None:
    """A submitted job: its state, its silos, its rounds."""
    job = detail.job
    say(f"job        {job.id}  {job.name}")
    say(f"status     {job.status}{': ' + job.reason if job.reason else ''}")
    say(f"rounds     {job.rounds_done} of {job.rounds} committed")
    say(f"submitted  {ago(job.submitted)} by {job.submitter}")
    say(f"model      {job.model.digest[:16]}  {job.model.size:,} bytes")
    if job.HasField("best"):
        metric = json.loads(detail.job_config or "{}").get("stop", {}).get("metric")
        best = job.best
        say(f"best       {best.model.digest[:16]}  round {best.round}, {metric} {best.value:.5g}")
    if ranks := {setup.client: setup.factor_rank for setup in detail.setups if setup.factor_rank}:
        say(f"ranks      {', '.join(f'{client} {rank}' for client, rank in ranks.items())} (by memory)")
    if detail.waiting_for:
        say(f"now        round {detail.round}, attempt {detail.attempt}: {detail.waiting_for}")
    if detail.clients:
        say()
        rows = [
            (c.client, c.state, duration(max(0.0, time.time() - c.since)), c.note) for c in detail.clients
        ]
        print_table(("client", "state", "for", "note"), rows, "")
    _print_steps(detail)
    _print_incidents(detail)
    records = [json.loads(record) for record in detail.history]
    if records:
        say()
        _print_history(records)
        _print_within(records)
        _print_measured(measured_by_silo(records, detail.job_config))
        _print_transfers(records)


def _print_steps(detail: JobDetail) -> None:
    """The newest training step of each silo with a cluster."""
    rows = [step_row(client) for client in detail.clients if client.HasField("figures")]
    if rows:
        say()
        names = ("training at", "step", "loss", "rate", "gradient", "speed", "FLOPs", "memory")
        print_table((*names, "communication", "waiting"), rows, "")


def step_row(client: ClientActivity) -> tuple[str, ...]:
    """A silo's newest step as a table's row; what it does not tell stays empty."""
    figures = {field.name: float(value) for field, value in client.figures.ListFields()}

    def known(name: str, form: str, factor: float = 1.0) -> str:
        return form.format(figures[name] * factor) if name in figures else ""

    def part(name: str) -> str:
        return (
            f"{figures[name] / figures['seconds']:.0%}" if name in figures and figures.get("seconds") else ""
        )

    tokens = known("tokens_per_second", "{:,.0f} tokens/s")
    return (
        client.client,
        f"{client.figures.step}/{client.figures.steps}",
        f"{client.loss:.4f}" if client.loss == client.loss else "",
        known("learning_rate", "{:.2g}"),
        known("gradient_norm", "{:.3g}"),
        tokens or known("examples_per_second", "{:,.1f} examples/s"),
        known("flops_utilisation", "{:.1%}"),
        known("memory_bytes", "{:.2f} GiB", 2.0**-30),
        part("communication_seconds"),
        part("waiting_seconds"),
    )


def _print_incidents(detail: JobDetail) -> None:
    """What went wrong of late, what was done about it, and what somebody should do."""
    incidents = [(event, json.loads(event.detail)["incident"]) for event in detail.incidents]
    if not incidents:
        return
    say()
    rows = [
        (
            ago(event.time),
            incident["severity"],
            incident["kind"],
            event.client,
            event.round,
            incident["action"],
        )
        for event, incident in incidents
    ]
    print_table(("incident", "severity", "kind", "silo", "round", "what was done"), rows, "")
    event, incident = incidents[-1]
    say(f"newest     {event.message}")
    say(f"advice     {incident['advice']}")


def _print_history(records: list[dict[str, Any]]) -> None:
    figures = [figures_of(record) for record in records]
    names = list(dict.fromkeys(name for each in figures for name in metrics_of(each)))
    forms = {name: form for name, form in _THROUGHPUT.items() if any(name in each for each in figures)}
    rows = [
        (
            record["round"],
            *(metrics_of(each).get(name, "") for name in names),
            f"{each['contributors']}/{each['cohort']}" if "cohort" in each else "secret",
            *way_of(record),
            *(form.format(each[name]) if name in each else "" for name, (_, form) in forms.items()),
            duration(each["seconds"]),
        )
        for record, each in zip(records, figures, strict=True)
    ]
    titles = (title for title, _ in forms.values())
    print_table(("round", *names, "silos", "up", "down", *titles, "time"), rows, "")


def _print_within(records: list[dict[str, Any]]) -> None:
    """The rounds within regions that led to the newest round."""
    told = [record["within"] for record in records if record.get("within")]
    if told:
        say()
        rows = [
            (relay, number, silos, f"{examples:,}", made[:16])
            for relay, rounds in told[-1].items()
            for number, silos, examples, made in rounds
        ]
        print_table(("region of", "round", "silos", "examples", "model"), rows, "")


def measured_by_silo(records: list[dict[str, Any]], config: str) -> ClientTable | None:
    """What each silo measured of the newest model that silos told figures of; None where none did, or where
    they may not be told."""
    from roundtable.core.config import job_from_json
    from roundtable.simulation.reporting.client_table import ClientTable

    told = [record for record in records if record.get("client_metrics")]
    if not told or not config:
        return None
    return ClientTable.of_sums(job_from_json(config), told[-1]["round"], told[-1]["client_metrics"])


def _print_measured(table: ClientTable | None) -> None:
    if table is not None and table.columns:
        say()
        print_table((f"model {table.round} at", *table.columns), table.cells(), "")


def way_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """What a round sent up and down, in words; empty where that is not told."""
    sums = TransferSums.of(record.get("transfers", {}).values())
    return sent(sums.up, sums.up_ratio), sent(sums.down, sums.down_ratio)


def sent(size: int, ratio: float | None) -> str:
    """Bytes in words, and how many times smaller they are than without encoding."""
    if not size:
        return ""
    return f"{amount(size)} ({ratio:.1f} ×)" if ratio is not None and ratio > 1.05 else amount(size)


def _print_transfers(records: list[dict[str, Any]]) -> None:
    """The newest round's transfers by silo, and the sums over all rounds."""
    told = [record for record in records if record.get("transfers")]
    if not told:
        return
    say()
    rows = [transfer_row(silo, each) for silo, each in told[-1]["transfers"].items()]
    title = f"round {told[-1]['round']}"
    print_table((title, "encoding", "up", "in", "down", "in", "encoded", "decoded", "error"), rows, "")
    sums = TransferSums.of(each for record in told for each in record["transfers"].values())
    say()
    say(
        f"sent       up {sent(sums.up, sums.up_ratio) or 'not told'}, "
        f"down {sent(sums.down, sums.down_ratio) or 'not told'}, {sums.updates} updates of "
        f"{len(told)} rounds"
    )


def transfer_row(silo: str, transfer: Mapping[str, Any]) -> tuple[str, ...]:
    """A silo's transfer as a table's row; what is not told stays empty."""
    sums = TransferSums.of([transfer])
    seconds = {
        name: f"{transfer[name]:.2f} s" if name in transfer else ""
        for name in ("up_seconds", "down_seconds", "encoding_seconds", "decoding_seconds")
    }
    return (
        silo,
        transfer.get("encoding", ""),
        sent(sums.up, sums.up_ratio),
        seconds["up_seconds"],
        sent(sums.down, sums.down_ratio),
        seconds["down_seconds"],
        seconds["encoding_seconds"],
        seconds["decoding_seconds"],
        f"{transfer['error']:.3f}" if "error" in transfer else "",
    )


def transfer_sums(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What all updates of these rounds took together, with both ratios."""
    sums = TransferSums.of(each for record in records for each in record.get("transfers", {}).values())
    return {**sums._asdict(), "up_ratio": sums.up_ratio, "down_ratio": sums.down_ratio}

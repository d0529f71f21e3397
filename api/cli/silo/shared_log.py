"""`roundtable client shared`: what of the agent's log has gone to the coordinator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, say
from roundtable.cli.silo.silo import silo_of


@click.command("shared")
@click.argument("job", required=False)
@json_option
@click.pass_context
def shared(context: click.Context, job: str | None, as_json: bool) -> None:
    """Show the log lines that were shared with operators.

    Of all jobs, or of JOB. They are read from the silo's own signed log, audit.jsonl in the state folder, and
    its archives; JOB may be the beginning of an identifier.
    """
    from roundtable.client.agent.silo_log import NAME

    config, _ = silo_of(context)
    found = [line for line in _shared(config.state / NAME) if line["job"].startswith(job or "")]
    if as_json:
        print_json(found)
        return
    for line in found:
        day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line["time"]))
        place = f"{line['job']}, round {line['round']}" if line["round"] else line["job"]
        say(f"{day} {line['level'].upper():<7} {place}, {line['kind']}: {line['text']}")
    if not found:
        kinds = ", ".join(config.log_sharing.kinds)
        say(f"Nothing was shared; [log_sharing] shares {kinds or 'nothing'}.")


def _shared(path: Path) -> list[dict[str, Any]]:
    """What the silo's log and its archives say was shared; AuditError or ResourceError for damaged ones."""
    from roundtable.client.agent.silo_log import ARCHIVES
    from roundtable.client.sharing.line_sharing import SHARED
    from roundtable.core.errors import ResourceError
    from roundtable.core.evidence.audit_archive import named_archive, unpack

    archives = [file for file in (path.parent / ARCHIVES).glob("*") if named_archive(file.name)]
    sources: list[Iterable[str]] = [unpack(file) for file in archives]
    if path.exists():
        sources.append(path.read_text(encoding="utf-8").splitlines())
    found: dict[int, list[dict[str, Any]]] = {}
    for text in chain.from_iterable(sources):
        try:
            entry = json.loads(text).get("entry", {})
            if entry.get("action") == SHARED:
                found[entry["sequence"]] = [
                    {"job": entry["object"], **line} for line in entry["detail"]["lines"]
                ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            how = f"`roundtable audit verify {path} --silo` shows where"
            raise ResourceError(f"{path} is damaged; {how}") from error
    return [line for sequence in sorted(found) for line in found[sequence]]

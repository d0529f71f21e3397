"""`roundtable client shared`: what of the agent's log has gone to the coordinator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
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
    """Show the lines of this silo's log that were shared with operators, of all jobs or of JOB.

    They are read from the silo's own signed log, audit.jsonl in the state folder; JOB may be the beginning of
    an identifier.
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


def _shared(path: Path) -> Iterator[dict[str, Any]]:
    from roundtable.client.sharing.line_sharing import SHARED
    from roundtable.core.errors import ResourceError

    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(text).get("entry", {})
            lines = entry["detail"]["lines"] if entry.get("action") == SHARED else ()
            yield from ({"job": entry["object"], **line} for line in lines)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            how = f"`roundtable audit verify {path} --silo` shows where"
            raise ResourceError(f"{path} is damaged; {how}") from error

"""`roundtable audit archive`: the audit log's archives, kept where the coordinator cannot lose them."""

from __future__ import annotations

from pathlib import Path

import click

from roundtable.cli.coordinator.audit import ca_option
from roundtable.cli.coordinator.trust import administrate
from roundtable.cli.shared.options import connection_options, json_option
from roundtable.cli.shared.output import tell


@click.command("archive")
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), required=True)
@ca_option
@connection_options
@json_option
def archive(
    output: Path, authority: Path, coordinator: str | None, credentials: Path | None, as_json: bool
) -> None:
    """Fetch the audit log's archives into a folder.

    Those that the folder OUTPUT has not yet, each checked.
    """
    from roundtable.core.errors import AuditError
    from roundtable.core.evidence.archive_shelf import keep_archive, stated_archive

    ca = authority.read_bytes()
    output.mkdir(parents=True, exist_ok=True)
    with administrate(coordinator, credentials) as operator:
        all_of_them = [stated_archive(line, ca, "coordinator")[0] for line in operator.audit_archives()]
        wanted = [each for each in all_of_them if not (output / each.name).exists()]
        if not all_of_them:
            tell(
                as_json,
                {"folder": str(output), "archives": 0, "new": 0},
                "Nothing of the audit log is archived: `[retention] audit` of the coordinator says when.",
            )
            return
        got, part = 0, list[str]()
        for line in operator.audit(wanted[0].first) if wanted else ():
            part.append(line)
            if not line.startswith('{"archive"'):
                continue
            name = keep_archive(output, part, ca).name
            if name not in {each.name for each in all_of_them}:
                raise AuditError(f"the coordinator has sent {name}, which it did not state")
            got, part = got + 1, []
            if name == all_of_them[-1].name:
                break
    last = all_of_them[-1].last
    tell(
        as_json,
        {"folder": str(output), "archives": len(all_of_them), "last_entry": last, "new": got},
        f"{output} has {len(all_of_them)} archives, entries 1 to {last}; {got} are new.",
    )

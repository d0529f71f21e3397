"""Which encodings of others a silo runs, and a coordinator decodes: what its people have named, by hash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import Field

from roundtable.core.encodings.foreign.foreign_codec import ENTRY_POINT_GROUP
from roundtable.core.errors import ConfigError
from roundtable.core.plugins.code_hash import hash_of_code
from roundtable.core.plugins.doors import is_file
from roundtable.core.toml import read_toml, validate
from roundtable.core.toml_tables import ApprovedCode, Table


class ApprovalTable(Table):
    """A file of approvals alone, for whoever has no coordinator.toml or agent.toml."""

    encodings: ApprovedCode = Field(description="installed encodings of others → hash of the code")


def read_approvals(file: Path) -> Mapping[str, str]:
    """The table [encodings] of such a file; ConfigError that names the line."""
    return validate(ApprovalTable, read_toml(file)).encodings


def not_approved(
    encodings: Iterable[str], approved: Mapping[str, str], who: str, where: str
) -> Iterator[str]:
    """Why encodings of others do not run here, a sentence for each; nothing of them is run or imported.

    `approved` is the party's own table [encodings], name → hash, in the file that is called `where`.
    """
    for name in dict.fromkeys(encodings):
        if is_file(name):
            yield (
                f"the encoding {name!r} is a file beside the job, and a job that was sent brings no code: "
                f"install a package that offers it as an entry point in the group {ENTRY_POINT_GROUP!r}, or "
                "run the job in a simulation"
            )
            continue
        try:
            digest = hash_of_code("encoding", name, ENTRY_POINT_GROUP, None)
        except ConfigError as error:
            yield str(error)
            continue
        allowed = approved.get(name)
        if allowed is None:
            yield (
                f"{who} has not approved the encoding {name!r}, which is code of others: read it, then write "
                f'[encodings] {name} = "{digest}" into {where}'
            )
        elif allowed != digest:
            yield (
                f"the code of the encoding {name!r} is not what {who} has approved: its hash begins with "
                f"{digest[:12]}, [encodings] {name} of {where} with {allowed[:12]}"
            )

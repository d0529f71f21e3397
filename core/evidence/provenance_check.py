"""Checks offline where a model comes from, against the coordinator's signed statement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from roundtable.core.errors import AuditError, IdentityError
from roundtable.core.identity.signing import open_envelope


def check_provenance(model: Path, statement: Path, ca: bytes) -> tuple[str, dict[str, Any]]:
    """(coordinator, statement) where the statement is signed and the file is the model that it names.

    AuditError otherwise.
    """
    try:
        document = json.loads(statement.read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        signer, values = open_envelope(document, ca, "coordinator", "provenance")
        digest = blake3().update_mmap(model).hexdigest()
    except OSError as error:
        raise AuditError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, IdentityError) as error:
        raise AuditError(f"{statement} proves nothing: {error}") from error
    if digest != values.get("model"):
        raise AuditError(
            f"{model} is not the model that {signer} has signed for: its digest begins with {digest[:12]}, "
            f"the statement's with {str(values.get('model'))[:12]}"
        )
    return signer, values

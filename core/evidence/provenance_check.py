"""Checks offline where a model comes from, against the coordinator's signed statement and its audit log."""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

from roundtable.core.errors import AuditError, EncodingError, IdentityError, LayoutError
from roundtable.core.evidence.audit_log import Log
from roundtable.core.identity.signing import Signed, open_envelope
from roundtable.core.models import model_digest, open_model


def check_provenance(model: Path, statement: Path, ca: bytes) -> Signed:
    """The statement, where the coordinator has signed it and the file is the model that it names.

    AuditError otherwise.
    """
    try:
        document = json.loads(statement.read_bytes())
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        found = open_envelope(document, ca, "coordinator", "provenance")
        digest = _artifact_digest(model)
    except OSError as error:
        raise AuditError(f"{error.filename} cannot be read: {error.strerror}") from error
    except LayoutError as error:
        raise AuditError(f"{model} is not the model that was trained: {error}") from error
    except (ValueError, RecursionError, IdentityError) as error:
        raise AuditError(f"{statement} proves nothing: {error}") from error
    if digest != found.values.get("model"):
        raise AuditError(
            f"{model} is not the model that {found.signer} has signed for: its digest begins with "
            f"{digest[:12]}, the statement's with {str(found.values.get('model'))[:12]}"
        )
    return found


def is_recorded(statement: Signed, log: Log, proven: int) -> bool:
    """Whether the log holds, among its entries up to `proven`, every round that the statement tells of."""
    job, config = statement.values["job"], statement.values["config"]
    known = {
        (item.detail["round"], item.detail["model"])
        for item in log.until(proven)
        if item.action == "round_committed" and item.object == job and item.detail["config"] == config
    }
    return all((one["round"], one["model"]) in known for one in statement.values["rounds"])


def _artifact_digest(model: Path) -> str:
    """The digest that names the artifact; of a file with frozen tensors put in, that of the file without."""
    try:
        whole = open_model(model)
    except EncodingError:
        whole = None
    if whole is None or not whole.layout.frozen or whole.lacking:
        return blake3().update_mmap(model).hexdigest()
    return model_digest(whole.without_frozen())

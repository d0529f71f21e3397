"""Names that tables of rounds, clients and models have for columns of their own."""

from __future__ import annotations

COLUMNS = frozenset(
    [
        "round",
        "attempt",
        "clients",
        "failed",
        "excluded",
        "time",
        "seconds",
        "epsilon",
        "staleness",
        "up_bytes",
        "down_bytes",
        "encoding_error",
        "tokens",
        "tokens_per_second",
        "bytes_per_token",
        "communication",
        "merge_error",
        "client",
        "client_name",
        "model",
        "model_name",
        "train_loss",
    ]
)
CENTRAL = "central_"
"""What the names of metrics begin with that a simulation's server measures on test data of its own."""


def why_not_a_metric(name: str) -> str | None:
    """Why no metric of a model may have this name; None where one may."""
    if name not in COLUMNS and not name.startswith(CENTRAL):
        return None
    return (
        f"{name!r} is a column that tables of results have of their own, which a metric of that name would "
        f"overwrite; call it another name, such as {f'my_{name}'!r}"
    )

"""All of `[privacy]` that says what noise a job has is settled with it, and not its noise multiplier alone.

Jobs of before with correlated noise have that of the banded square root of the prefix sums.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_JOBS = sa.table("jobs", sa.column("id"), sa.column("config"), sa.column("snapshot"))


def upgrade() -> None:
    connection = op.get_bind()
    for job, config, text in connection.execute(sa.select(_JOBS)).all():
        snapshot = json.loads(text)
        if "noise" in snapshot:
            continue
        snapshot["noise"] = _settled(json.loads(config), snapshot.pop("noise_multiplier", None))
        changed = sa.update(_JOBS).where(_JOBS.c.id == job).values(snapshot=json.dumps(snapshot))
        connection.execute(changed)


def _settled(config: dict[str, Any], noise_multiplier: float | None) -> dict[str, Any]:
    if noise_multiplier is None:
        return {}
    privacy = config.get("privacy", {})
    if privacy.get("level") != "dp_ftrl":
        return {"noise_multiplier": noise_multiplier}
    coefficients = [1.0]
    for j in range(1, min(privacy.get("bands", 16), max(1, config.get("rounds", 1)))):
        coefficients.append(coefficients[-1] * (2 * j - 1) / (2 * j))
    return {"noise_multiplier": noise_multiplier, "bands": None, "coefficients": coefficients}

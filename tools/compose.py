"""Checks deploy/docker/compose.yaml against its schema, as `docker compose config` does first.

    python tools/compose.py

No container engine is needed: the schema is inside a Python package, fetched once to build/wheels.
"""

from __future__ import annotations

import json

import yaml
from environments import ROOT, from_wheel
from jsonschema import Draft7Validator

PIN = "docker-compose==1.29.2"
COMPOSE = ROOT / "deploy" / "docker" / "compose.yaml"


def main() -> int:
    schema = json.loads(from_wheel(PIN, "compose/config/compose_spec.json").read_text())
    wrong = list(Draft7Validator(schema).iter_errors(yaml.safe_load(COMPOSE.read_text())))
    for error in wrong:
        print(f"{COMPOSE.relative_to(ROOT)}: {'.'.join(map(str, error.path))}: {error.message}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What a fine-tuned language model writes at this silo, kept in its state folder: nothing of it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from roundtable.client.durable_files import replace_synced
from roundtable.core.foundation.generated_texts import GeneratedText

FOLDER = "generations"


def keep_generations(state: Path, job: str, round: int, found: Iterable[GeneratedText]) -> Path:
    """Writes the texts of a round as lines of JSON, in the place of those of the job's rounds before.

    ResourceError where they cannot be written.
    """
    path = state / FOLDER / f"{job}.jsonl"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [json.dumps({"round": round, **each._asdict()}, ensure_ascii=False) + "\n" for each in found]
    replace_synced(path, ["".join(lines).encode()])
    return path

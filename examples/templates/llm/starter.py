"""Fine-tunes a language model on notes that stay at their silos: only the adapters travel.

A silo names its own file as `starter` in the [data] table of its agent.toml: a .txt file with a note in each
paragraph, or a .jsonl or .parquet file (docs/foundation-models.md). Without a file the notes are made up.
"""

import random
from pathlib import Path

import roundtable as rt
from roundtable.core.foundation.text_files import read_texts

BASE = Path(__file__).with_name("base")

WARDS = ("north", "south", "east", "west")
STATES = ("asleep", "better", "stable", "worse")


class Starter(rt.HuggingFaceTask):
    """LoRA over `base`, which every silo has already. A job may set these parameters in its [task] table."""

    def __init__(
        self, base: str = str(BASE), length: int = 48, rank: int = 8, objective: str = "sft"
    ) -> None:
        super().__init__(
            base, length=length, rank=rank, alpha=2.0 * rank, targets="all-linear", objective=objective
        )

    def texts(self, site: rt.Site):
        if "starter" in site.options:
            notes = read_texts(Path(site.options["starter"]))
        else:
            notes = made_up_preferences() if self.objective == "dpo" else made_up()
        # In a simulation the job's partition shares the notes out; made-up ones go by their ward.
        rows = site.shard([ward_of(note) for note in notes])
        own = [notes[row] for row in rows]
        kept = max(1, len(own) // 5)
        return own[kept:], own[:kept]


def ward_of(note) -> int:
    """The number of the ward that a note, or a preference's prompt, begins with."""
    text = note if isinstance(note, str) else str(note.get("prompt", ""))
    first = text.split(" ", 1)[0]
    return WARDS.index(first) if first in WARDS else 0


def made_up_preferences() -> list[dict[str, str]]:
    """What the made-up notes say is preferred to an answer that says nothing."""
    parts = (note.split(": ") for note in made_up())
    return [{"prompt": f"{bed}: ", "chosen": state, "rejected": "no idea."} for bed, state in parts]


def made_up(notes: int = 200) -> list[str]:
    """Notes of nobody, the same each time."""
    chance = random.Random(1)
    return [
        f"{chance.choice(WARDS)} ward, bed {chance.randrange(8)}: {chance.choice(STATES)}."
        for _ in range(notes)
    ]

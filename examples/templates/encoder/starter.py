"""Fine-tunes a BERT that tells notes apart, which stay at their silos: adapters and the head travel.

A silo names its own file as `starter` in the [data] table of its agent.toml: a .jsonl or .parquet file, each
row with a "text" and a "label" (docs/foundation-models.md). Without a file the notes are made up.
"""

import random
from pathlib import Path

import roundtable as rt
from roundtable.core.foundation.labelled_rows import read_labelled

BASE = Path(__file__).with_name("base")

# In the order that all silos have. Put your own here.
LABELS = ["better", "stable", "worse"]

# What notes are made up of: words that tell a label.
TELLING = {
    "better": ("eats again", "walks", "smiles"),
    "stable": ("sleeps", "as before", "no change"),
    "worse": ("in pain", "fever", "cannot breathe"),
}


class Starter(rt.HuggingFaceClassifier):
    """LoRA over `base`, which every silo has already. A job may set these parameters in its [task] table."""

    def __init__(self, base: str = str(BASE), length: int = 32, rank: int = 8) -> None:
        super().__init__(base, LABELS, length=length, rank=rank, alpha=2.0 * rank, targets="all-linear")

    def rows(self, site: rt.Site):
        if "starter" in site.options:
            notes = read_labelled(Path(site.options["starter"]), LABELS, "text", "label")
        else:
            notes = made_up()
        # In a simulation the job's partition shares the notes out by their labels.
        own = [notes[row] for row in site.shard([LABELS.index(label) for _, label in notes])]
        kept = len(own) // 5
        return own[kept:], own[:kept]


def made_up(notes: int = 240) -> list[tuple[str, str]]:
    """Notes of nobody with their labels, the same each time."""
    chance = random.Random(1)
    labels = [chance.choice(LABELS) for _ in range(notes)]
    return [(f"bed {chance.randrange(8)}: {chance.choice(TELLING[label])}.", label) for label in labels]

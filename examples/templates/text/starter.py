"""Is a note urgent? A bag of words: the mean of the words' vectors, and a linear layer.

A silo names its own file as `starter` in the [data] table of its agent.toml. A note is a line: the label
(0 or 1), a tabulator, then the text. Without a file the notes are made up.
"""

import random
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import roundtable as rt

Tensors = tuple[Tensor, Tensor]

# Words are numbered by a hash, so that all silos agree without sharing a list of their words. 0 is no word.
VOCABULARY, LENGTH, CLASSES = 2048, 24, 2

# What notes are made up of: words that tell nothing, and words that tell 0 or 1.
PLAIN = "patient ward nurse visitor family today again since noon room four before please note bed visit"
TELLING = (
    "tea sleeps home thanks blanket music flowers walk soup garden",
    "pain breathe bleeding fell awake fever faint choking swollen numb",
)


class Starter(rt.Task):
    """Tells CLASSES kinds of notes apart. `width` may be set in the job's [task] table."""

    def __init__(self, width: int = 32) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return BagOfWords(self.width)

    def data(self, site: rt.Site) -> tuple[Tensors, Tensors]:
        notes = read(site.options["starter"]) if "starter" in site.options else made_up()
        labels = torch.tensor([label for label, _ in notes])
        words = torch.tensor([numbered(text) for _, text in notes])
        rows = torch.as_tensor(site.shard(labels))
        words, labels = words[rows], labels[rows]
        # Every fifth note is kept for the test, at every silo.
        test = torch.arange(len(labels)) % 5 == 0
        return (words[~test], labels[~test]), (words[test], labels[test])

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        words, labels = batch
        return cross_entropy(model(words), labels)

    def metrics(self, model: nn.Module, batch: Tensors) -> Mapping[str, tuple[Tensor, int]]:
        words, labels = batch
        return {"accuracy": ((model(words).argmax(1) == labels).sum(), len(labels))}


class BagOfWords(nn.Module):
    """Words [batch, LENGTH] → scores [batch, CLASSES]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        known = (words > 0).sum(1, keepdim=True).clamp(min=1)
        return self.head(self.embed(words).sum(1) / known)


def numbered(text: str) -> list[int]:
    """The first LENGTH words as numbers 1 to VOCABULARY − 1, then zeros."""
    words = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in text.lower().split()[:LENGTH]]
    return words + [0] * (LENGTH - len(words))


def read(path: str | Path) -> list[tuple[int, str]]:
    """A silo's own notes with their labels."""
    notes = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        label, _, text = line.partition("\t")
        if label not in {str(known) for known in range(CLASSES)} or not text:
            raise ValueError(f"{path}, line {number}: a label, a tabulator and the text are needed")
        notes.append((int(label), text))
    return notes


def made_up(notes: int = 1200) -> list[tuple[int, str]]:
    """Notes of nobody, the same each time: three words of nine tell, and not always the right way."""
    chance = random.Random(1)
    made = []
    for index in range(notes):
        label = index % CLASSES
        words = chance.choices(PLAIN.split(), k=6)
        words += [
            chance.choice(TELLING[label if chance.random() < 0.85 else 1 - label].split()) for _ in range(3)
        ]
        chance.shuffle(words)
        made.append((label, " ".join(words)))
    return made

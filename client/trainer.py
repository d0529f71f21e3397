"""The protocol of whoever does an agent's work: a training process, a script, or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from roundtable.client.durable_files import write_file
from roundtable.client.encoding_trials import try_encodings
from roundtable.client.step_key import StepKey
from roundtable.client.training.metrics import Metrics
from roundtable.core.config import JobConfig
from roundtable.core.encodings import NO_KEY, StreamKey, get_encoding
from roundtable.core.encodings.composed.common_rank import CommonRank
from roundtable.core.encodings.encoding import HeldBytes
from roundtable.core.encodings.feedback import Feedback, Sending
from roundtable.core.encodings.journey import EncodingWatch, norm, norm_lost
from roundtable.core.job_tables.transfer_table import TransferTable
from roundtable.core.layout import Layout
from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.observability.transfer_figures import Writing

Figures = Mapping[str, float]
"""A training step's figures, by the names of the wire's StepFigures; unknown ones are left out."""


class ProgressListener(Protocol):
    """Called with the progress of the work."""

    def __call__(self, done: int, total: int, loss: float, figures: Figures | None = None, /) -> None:
        """`done` and `total` in examples; `loss` is NaN where it is not known."""


class Ahead(NamedTuple):
    """Of the round behind a step: whether it may be trained `now`, and `still`, once it is; `no_more` is set
    while the silo takes no rounds."""

    now: Callable[[], Awaitable[bool]]
    still: Callable[[], bool]
    no_more: asyncio.Event


@dataclass(frozen=True)
class StepWork:
    """One step, with everything that it needs on this machine.

    `config` is the job as it came, canonical JSON, and `job` the same, checked; `task` is the silo's own
    reference for it; `model` a verified artifact; `layout` the fingerprint that the update must have;
    `output` the file for the encoded update; `counted` the newest of the silo's training steps whose update
    is in the model or in one before it; `steps` those to take, where the coordinator gives them, and
    `encoding` the chain for the update, "" for the job's. `trouble` hears of an incident that does not end
    the work: its kind (one of FAILURE_KINDS), a sentence that may leave the silo, and what is done about it.
    `set_up` hears what the step is trained on, once that is known.
    `in_line` hears that the step stands in line behind others (True), and that its turn has come (False).
    `ahead` says whether, once the step is done, the round behind it may be trained before its order is here.
    """

    step: StepKey
    client: str
    config: str
    job: JobConfig
    task: str
    model: Path
    layout: str
    output: Path
    counted: StepKey | None = None
    steps: int | None = None
    encoding: str = ""
    trouble: Callable[[str, str, str], None] = field(default=lambda kind, detail, action: None, compare=False)
    set_up: Callable[[TrainingSetup], None] = field(default=lambda setup: None, compare=False)
    in_line: Callable[[bool], None] = field(default=lambda waits: None, compare=False)
    ahead: Ahead | None = field(default=None, compare=False)

    @property
    def kept(self) -> tuple[int, int] | None:
        """(round, attempt) of `counted`: under it lies what the silo goes on from."""
        return (self.counted.round, self.counted.attempt) if self.counted is not None else None


@dataclass(frozen=True)
class TrainedUpdate:
    """A finished update: `digest` and `size` are those of the bytes in `StepWork.output`, `writing` how they
    came there; None where nobody says."""

    digest: str
    size: int
    examples: int
    metrics: Metrics
    writing: Writing | None = None


@asynccontextmanager
async def its_turn(turn: asyncio.Lock, work: StepWork) -> AsyncIterator[None]:
    """One step after the other works in this block; whoever waits for its turn says so."""
    waits = turn.locked()
    if waits:
        work.in_line(True)
    async with turn:
        if waits:
            work.in_line(False)
        yield


class Trainer(Protocol):
    """Cancelling the call withdraws the step; the trainer is then free for the next one."""

    async def start(self) -> None:
        """Prepares for work; called once, before any."""

    async def check(self, work: StepWork) -> None:
        """Makes the silo's own model; WorkFailed where what is frozen in it is not as in the job's."""

    async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
        """Trains and writes the update; WorkFailed where that cannot be done."""

    async def evaluate(self, work: StepWork, progress: ProgressListener) -> Metrics:
        """Named (sum, count) of the model on the silo's test data; WorkFailed where it cannot."""

    def release(self, job: str, *, met: bool) -> None:
        """Releases what is held for a job that is over; `met`: it was not before this process began."""

    async def close(self) -> None:
        """Stops; work that runs is lost."""


def write_update(path: Path, delta: Tensor, encoding: str, key: StreamKey = NO_KEY) -> tuple[str, int]:
    """Encodes a float32 delta into a file; returns (BLAKE3, bytes)."""
    blocks: Iterator[memoryview] = get_encoding(encoding).encode(delta, key)
    return write_file(path, blocks)


class EncodedUpdate(NamedTuple):
    """An update in a file: BLAKE3 and bytes, how it was written, and what the silo is to remember."""

    digest: str
    size: int
    writing: Writing
    memory: dict[str, Tensor]


def write_remembering(
    path: Path,
    delta: Tensor,
    transfer: TransferTable,
    layout: Layout,
    key: StreamKey,
    kept: Mapping[str, Tensor] | None,
    chain: str = "",
    basis: Tensor | None = None,
) -> EncodedUpdate:
    """Encodes a delta of a layout under `[transfer]`, as `chain` where that is chosen.

    `basis` is what came behind the model, for an encoding that goes by it.
    `kept` is what the silo's newest update that counts left. With error feedback the delta is changed in
    place. Where encodings are chosen, what an earlier one dropped is sent with the next, whatever that is.
    """
    chain = chain or transfer.up
    encoding, watch = get_encoding(chain).over(layout), EncodingWatch()
    if isinstance(encoding, CommonRank) and basis is not None:
        encoding = encoding.at(basis, key.round)
    memory = Feedback("error") if transfer.automatic else transfer.memory
    exact = encoding.traits.error == "exact" and memory.way == "off"
    length = 0.0 if exact else norm(delta)
    sending = Sending(delta, encoding, key, kept, memory)
    trials = try_encodings(sending.vector, transfer.chains, key) if transfer.automatic else ()
    digest, size = write_file(path, watch.around(sending.blocks()))
    if exact:
        return EncodedUpdate(digest, size, Writing(watch.seconds, 0.0, trials), sending.remembered)
    written = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    if memory.way != "off":
        sending.received(HeldBytes(written.data))
    if memory.way == "error":
        lost = norm(sending.vector)
    else:
        lost = norm_lost(sending.vector, encoding, HeldBytes(written.data), key)
    writing = Writing(watch.seconds, lost / length if length else None, trials)
    return EncodedUpdate(digest, size, writing, transfer.kept_of(chain, sending.remembered))

"""The updates of simulated clients: made by a backend, each in a row of one matrix."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from roundtable.aggregation import ClientRow, TensorMatrix
from roundtable.aggregation.validation import judge
from roundtable.aggregation.weighting import capped
from roundtable.client.encoding_trials import try_encodings
from roundtable.client.training.metrics import Metrics, left_out_or_cut, summable
from roundtable.client.training.private_training import CANNOT_SAMPLE
from roundtable.core.encodings import Encoding, StreamKey, get_encoding
from roundtable.core.encodings.composed.common_rank import CommonRank
from roundtable.core.encodings.feedback import Feedback, Sending, without_memory
from roundtable.core.encodings.journey import norm, travelled
from roundtable.core.errors import AggregationError, PrivacyError, TaskError
from roundtable.core.observability.transfer_figures import TransferFigures
from roundtable.core.privacy_table import ExampleLevel
from roundtable.engine import Mean, Received, Rows
from roundtable.engine.messages import Aggregate, Step, Update
from roundtable.engine.validation.transfer_composition import as_counted
from roundtable.simulation.backend import Backend, Failed, Measured, Summing, Trained, Work, World
from roundtable.simulation.checkpoint import LocalState
from roundtable.simulation.ledger import SimulatedLedger
from roundtable.simulation.secure_sums import SecureAggregation
from roundtable.simulation.world.attackers import Attackers

Starts = Callable[[Tensor, Sequence[int]], Iterable[tuple[Tensor, Sequence[int]]]]
"""Of the global model [d] and clients by number: the models that they train from, each with those who do."""


class ClientUpdates:
    """Runs clients through a backend and keeps their updates until a round has used them.

    `starts` says from which model each trains, where not all do from the global one.
    `steps` are those that clients were given by their speed, for whom the job does not say them.
    `local` are the clients' own tensors (rule `local`) as of the last committed round, `pending`
    those of clients whose update is in no committed round yet.
    """

    def __init__(self, world: World, backend: Backend, ledger: SimulatedLedger) -> None:
        self.world = world
        self.backend = backend
        self._ledger = ledger
        self.local: dict[int, LocalState] = {}
        self.pending: dict[int, LocalState] = {}
        self.steps: dict[int, int] = {}
        self._attackers = Attackers.of(world.job)
        self.chain_of: Callable[[str], str] = lambda client: world.job.writes.up
        self.starts: Starts = lambda vector, indices: [(vector, indices)]
        self._travelled: dict[str, TransferFigures] = {}
        self._ways: dict[tuple[str, int], tuple[Encoding, TransferFigures]] = {}
        self._secure = SecureAggregation.of(world.job, world.layout.sent)
        self._before: dict[str, Metrics] = {}
        self._warned: set[str] = set()
        self._rows: Tensor | None = None
        self._capacity = 0

    def begin(self, capacity: int) -> None:
        """Forgets all updates, and makes room for so many at a time."""
        self.pending, self._before = {}, {}
        self._rows, self._capacity = None, capacity

    def free_rows(self, count: int, held: Container[int]) -> list[int]:
        """The first rows that are not `held`: with no failures the order of names, so that none is copied."""
        free = (row for row in range(self._capacity) if row not in held)
        return [next(free) for _ in range(count)]

    def examples(self, indices: Sequence[int]) -> list[int]:
        """Training examples that clients have; 0 where only iterating would tell."""
        return [count or 0 for count in self.backend.examples(list(self.work(indices)))]

    def train(
        self,
        step: Step,
        vector: Tensor,
        indices: Sequence[int],
        places: Sequence[int],
        *,
        paid: bool = False,
    ) -> Iterator[tuple[int, Trained | Failed]]:
        """Trains clients, the update of `indices[i]` into row `places[i]`; gives each one's row and answer.

        What an earlier update had left with a client and no round has used is forgotten. `paid` is what a
        resumed run makes again: no account is charged.
        """
        round = step.round
        if self._rows is None:
            self._rows = self.backend.rows(self._capacity)
        for index in indices:
            self.pending.pop(index, None)
        place_of = {self.world.names[index]: place for index, place in zip(indices, places, strict=True)}
        if self._ledger.keeps_own and not paid:
            refused = self._refused(round, indices)
            yield from ((place_of[answer.client], answer) for answer in refused.values())
            indices = [index for index in indices if index not in refused]
        failed = self._measure(round, vector, indices)
        yield from ((place_of[client], answer) for client, answer in failed.items())
        indices = [index for index in indices if self.world.names[index] not in failed]
        for start, together in self.starts(vector, indices):
            rows = [self._rows[place_of[self.world.names[index]]] for index in together]
            for answer in self.backend.train(round, start, list(self.work(together)), rows):
                place = place_of[answer.client]
                if isinstance(answer, Trained):
                    self._received(answer, self._rows[place], step, start[self.world.layout.basis])
                yield place, answer

    def evaluate(
        self, round: int, vector: Tensor, indices: Sequence[int], used: Container[int] = ()
    ) -> Iterator[Measured | Failed]:
        """Evaluates a round's model on clients' test data, with their own tensors: as training left them with
        those whose update is `used` in the model, with all others as before it."""
        return self.backend.evaluate(round, vector, list(self.work(indices, used)))

    @property
    def unmasks(self) -> bool:
        """Whether the round's updates come out of secure aggregation, as a sum that has to be unmasked."""
        return self._secure is not None

    def collect(self, action: Aggregate, defence: Callable[[Rows], Tensor]) -> Received:
        """What the coordinator would receive, once the hostile clients have had their way.

        `defence` is what the job's rule makes of such rows. Raises AggregationError where an attack cannot be
        made, or where too few clients are left for a secure sum.
        """
        updates = action.updates
        if isinstance(self.backend, Summing) and self.backend.sums_updates and updates:
            return self._total(self.backend, updates)
        matrix = self._rows if self._rows is not None else self.backend.rows(0)
        places = [update.row for update in updates]
        clients = [self.world.names.index_of(update.client) for update in updates]

        def received() -> Rows:
            if places == list(range(len(places))):
                return Rows(TensorMatrix(matrix[: len(places)]), updates)
            return Rows(TensorMatrix(matrix).select(places), updates)

        self._attackers.corrupt(action.step.round, clients, matrix, places, lambda: defence(received()))
        if self._secure is not None and updates:
            rows = [matrix[place] for place in places]
            mean = self._secure.received(action.step, action.cohort, updates, rows, self._before)
            return mean.of_age(updates[0].staleness(action.step.round)) if isinstance(mean, Mean) else mean
        return received()

    def _measure(self, round: int, vector: Tensor, indices: Sequence[int]) -> dict[str, Failed]:
        """Has clients evaluate the model that the round begins with, where its sum is to hold the metrics.

        Returns those that could not, and so do not train either.
        """
        bounds = self.world.job.evaluation.before(round)
        failed: dict[str, Failed] = {}
        if not bounds:
            return failed
        for answer in self.backend.evaluate(round, vector, list(self.work(indices))):
            try:
                if isinstance(answer, Failed):
                    failed[answer.client] = answer
                else:
                    metrics = dict(answer.metrics)
                    self._before[answer.client] = summable(metrics, bounds)
                    self._warn(answer.client, left_out_or_cut(metrics, bounds))
            except TaskError as error:
                failed[answer.client] = Failed(answer.client, "task_error", str(error))
        return failed

    def _warn(self, client: str, told: dict[str, str]) -> None:
        """Says it of a metric's first client: the sum shows nothing of what it does not hold."""
        for name in told.keys() - self._warned:
            warnings.warn(f"{client}: {told[name]} (said once for this metric)", stacklevel=2)
        self._warned |= told.keys()

    def _samples(self) -> bool:
        """Whether the level draws records, of which somebody has to know how many there are."""
        job = self.world.job
        return isinstance(job.privacy, ExampleLevel) and not job.releases_sums

    def _refused(self, round: int, indices: Sequence[int]) -> dict[int, Failed]:
        """The clients whose own accounts do not hold a round; the others have paid for it."""
        refused = {}
        counts = self.backend.examples(list(self.work(indices)))
        for index, examples in zip(indices, counts, strict=True):
            client = self.world.names[index]
            try:
                if examples is None and self._samples():
                    raise PrivacyError(CANNOT_SAMPLE)
                self._ledger.pay(client, round, examples or 0)
            except PrivacyError as error:
                refused[index] = Failed(client, "refused", str(error))
        return refused

    def _total(self, backend: Summing, updates: Sequence[Update]) -> Mean:
        """The mean, taken where the updates are, of those that the job's validation lets pass."""
        table = self.world.job.aggregation
        checks, index_of = table.validation, self.world.names.index_of
        ratio = None if checks.norm_ratio == "off" else checks.norm_ratio
        norms = np.array(backend.norms([index_of(update.client) for update in updates]))
        clients = [ClientRow(update.client, update.examples, update.loss) for update in updates]
        screening = judge(norms, clients, checks.policy, None, norm_ratio=ratio)
        excluded = {exclusion.client: exclusion.message for exclusion in screening.excluded}
        if not screening.kept:
            reasons = "; ".join(f"{client}: {reason}" for client, reason in excluded.items())
            raise AggregationError(f"no client has a usable update in this round: {reasons}")
        updates = [updates[place] for place in screening.kept]
        amounts = np.array([1 if table.weighting == "uniform" else update.examples for update in updates])
        if checks.weight_ratio != "off":
            amounts = capped(amounts, checks.weight_ratio)
        shares = (amounts / amounts.sum() * screening.factors).tolist()
        weights = {update.client: share for update, share in zip(updates, shares, strict=True)}
        total = backend.total({index_of(client): share for client, share in weights.items()})
        return Mean(
            total,
            weights,
            excluded=excluded,
            examples={update.client: update.examples for update in updates},
            steps={update.client: update.steps for update in updates if update.steps is not None},
        )

    def keep(self, used: Iterable[int], waiting: Iterable[int]) -> None:
        """A round is committed: clients whose update it has `used` keep what training left with them.

        Of all others but those `waiting` to be combined it is forgotten.
        """
        self.local.update({index: self.pending[index] for index in used if index in self.pending})
        self.pending = {index: self.pending[index] for index in waiting if index in self.pending}

    def transfer_of(self, client: str) -> TransferFigures | None:
        """What the way of the client's newest update would have been; None under masks.

        Models count as if the client had the one before: the change from it, where that is sent.
        """
        figures = self._travelled.pop(client)
        return None if self._secure is not None else figures

    def down_size(self, round: int) -> int:
        """Bytes of the model that a round begins with on its way to a client that has the one before."""
        layout, down = self.world.layout, self.world.job.transfer.down
        whole = 4 * layout.size
        if down == "float32" or round == 1:
            return whole
        encoding = get_encoding(down, self.world.folder).over(layout).in_round(round - 1)
        return min(whole, encoding.encoded_size(layout.size) or encoding.size_bound(layout.size))

    def _received(self, answer: Trained, row: Tensor, step: Step, basis: Tensor) -> None:
        """What the encoding makes of the update, as if it had travelled; and what stays at the client.

        Factors by the round's `basis` are added up as they are: the row begins with them.
        """
        index, kept = self.world.names.index_of(answer.client), dict(answer.local)
        transfer = self.world.job.transfer
        encoding, figures = self._way_of(self.chain_of(answer.client), step.round)
        if isinstance(encoding, CommonRank):
            encoding = encoding.at(basis, step.round)
        if row.numel() and (transfer.automatic or encoding.dense_dtype != torch.float32):
            key = StreamKey(self.world.job.seed, answer.client, step.round, step.attempt)
            figures, memory = self._journey(encoding, key, self.local.get(index), row, figures)
            kept |= memory
        self._travelled[answer.client] = figures
        if kept or transfer.automatic:
            # Where encodings are chosen, what was remembered may be gone with this update.
            self.pending[index] = kept

    def _way_of(self, chain: str, round: int) -> tuple[Encoding, TransferFigures]:
        """The encoding that updates of a round come in, and what is known of their way beforehand."""
        if (chain, round) not in self._ways:
            layout, automatic = self.world.layout, self.world.job.transfer.automatic
            encoding = as_counted(self.world.job, chain, self.world.folder).over(layout.sent).in_round(round)
            figures = TransferFigures(
                encoding.encoded_size(layout.sent.size) or 0,
                4 * layout.sent.size,
                self.down_size(round),
                4 * layout.size,
                error=0.0 if encoding.dense_dtype == torch.float32 and not automatic else None,
                encoding=encoding.chain if automatic else "",
            )
            self._ways = {(chain, round): (encoding, figures)}
        return self._ways[chain, round]

    def _journey(
        self,
        encoding: Encoding,
        key: StreamKey,
        before: LocalState | None,
        row: Tensor,
        figures: TransferFigures,
    ) -> tuple[TransferFigures, dict[str, Tensor]]:
        """Makes of an update what arrives, with the figures of its way and what the client remembers.

        Of a plain array no error is given: some backends round such rows where they are made.
        """
        transfer, dense = self.world.job.transfer, encoding.dense_dtype is not None
        if dense and not transfer.remembers and not transfer.automatic:
            return replace(figures, up=travelled(encoding, row, key)), {}
        vector = row.to("cpu", copy=True)
        length = norm(vector)
        memory = Feedback("error") if transfer.automatic else transfer.memory
        sending = Sending(vector, encoding, key, before, memory)
        # Virtual time has no speed of encoding.
        trials = try_encodings(vector, transfer.chains, key, lambda: 0.0) if transfer.automatic else ()
        data, decoded = b"".join(sending.blocks()), torch.empty(row.numel())
        encoding.decode(data, decoded, key)
        if memory.way != "off":
            sending.decoded(0, decoded)
        lost = vector if memory.way == "error" else vector - decoded
        if isinstance(encoding, CommonRank):
            decoded.zero_()[: len(data) // 4] = torch.frombuffer(bytearray(data), dtype=torch.float32)
        row.copy_(decoded)
        error = norm(lost) / length if length and not dense else None
        kept = transfer.kept_of(encoding.chain, sending.remembered)
        return replace(figures, up=len(data), error=error, trials=trials), kept

    def work(self, indices: Iterable[int], used: Container[int] = ()) -> Iterator[Work]:
        for index in indices:
            before = self.local.get(index)
            local = without_memory(self.pending.get(index, before) if index in used else before)
            yield Work(self.world.names[index], index, local, self.steps.get(index))

"""What the engine keeps of committed rounds: as much after a million rounds as after one.

Whoever makes the rounds' records durable keeps those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roundtable.core.config import JobConfig
from roundtable.core.observability.metric_sums import mean
from roundtable.engine.best_model import Best, best_after
from roundtable.engine.messages import RoundRecord
from roundtable.engine.metrics import of_model
from roundtable.engine.stopping import Trend


@dataclass
class RoundSummary:
    """`done` rounds are over, `closed` of them without a model, the last `on_end` one after the other.

    `recent` holds the contributors of the last `separation` − 1 rounds, in which a client has to rest. The
    trends are of the metric that the job may stop by; `best` is the model that `[keep] best` asks for.
    """

    done: int = 0
    closed: int = 0
    on_end: int = 0
    recent: list[tuple[str, ...]] = field(default_factory=list)
    evaluated: Trend = field(default_factory=Trend)
    trained: Trend = field(default_factory=Trend)
    best: Best | None = None

    @property
    def trend(self) -> Trend:
        """Over the evaluated models, of a round or before it; over training where none has the metric."""
        return self.evaluated if self.evaluated.last is not None else self.trained

    def add(self, record: RoundRecord, job: JobConfig, separation: int) -> None:
        """Adds a committed round; `separation` is the least number of rounds between two contributions."""
        self.closed += record.round - self.done if record.closed else 0
        self.done = record.round
        self.on_end = self.on_end + 1 if record.closed else 0
        if separation > 1:
            # Published records name those who were left out among the contributors: they rest as well.
            self.recent = [*self.recent, (*record.contributors, *record.excluded)][1 - separation :]
        stop = job.stop
        if record.round != job.regions.goes_up(record.round - 1, job.rounds):
            # Only a simulation measures what is between: no client has that model, and no job can give it.
            return
        if job.keep.best:
            self.best = best_after(self.best, record, stop)
        if stop.metric is not None:
            tested = of_model(record, stop.metric)
            if tested is None and not record.evaluation:
                tested = mean(record.before, stop.metric)
            trained = mean(record.training, stop.metric)
            for trend, value in ((self.evaluated, tested), (self.trained, trained)):
                if value is not None:
                    trend.add(value, stop)

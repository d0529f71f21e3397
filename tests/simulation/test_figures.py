"""What a job works out from sums: the same over clients as over all of their data together."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm_tasks import Plain
from torch import Tensor, nn

import roundtable as rt
from roundtable.core import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.simulation import Result, simulate


class Judged(Plain):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        chances = model(batch[0]).softmax(1)
        assert len(batch[1]) <= 3, "evaluation.batch_size"
        truth, guess, size = batch[1] == 0, chances[:, 0] > 0.4, len(batch[1])
        return {
            "tp": (float((guess & truth).sum()), size),
            "fp": (float((guess & ~truth).sum()), size),
            "fn": (float((~guess & truth).sum()), size),
            **rt.metrics.confusion("kind", chances.argmax(1), batch[1], 3),
            **rt.metrics.auroc("first", chances[:, 0], truth, bins=40),
        }


FIGURES = {"f1": "2*tp/(2*tp+fp+fn)", "odd": "tp/(tp-tp)"}


def run(task: type[Plain] = Judged, told: list[str] | None = None, **tables: Any) -> Result:
    document = {
        "task": "t",
        "rounds": 2,
        "seed": 3,
        "algorithm": {"steps": 4, "batch_size": 8},
        "evaluation": {"batch_size": 3},
        "metrics": FIGURES,
        "simulation": {"clients": 3, "backend": "sequential", "workers": 1},
    }
    notes = [] if told is None else told
    run_dir = tables.pop("run_dir", None)
    return simulate(
        JobConfig.model_validate(document | tables),
        task,
        run_dir=run_dir,
        progress=lambda progress: notes.append(progress.note.message) if progress.note else None,
    )


def pooled(result: Result) -> tuple[Tensor, Tensor]:
    """(chances, labels) of the last model over all clients' test data."""
    model = Judged().model()
    model.load_state_dict(result.model.state_dict())
    parts = [Judged().data(rt.Site("c", index, 3))[1] for index in range(3)]
    x, y = (torch.cat([part[place] for part in parts]) for place in (0, 1))
    with torch.no_grad():
        return model.eval()(x).softmax(1), y


def test_figures_over_clients_are_those_of_all_their_data(tmp_path: Path) -> None:
    told: list[str] = []
    result = run(told=told, run_dir=tmp_path)
    row = result.history[-1]
    chances, labels = pooled(result)
    guess, truth = chances[:, 0] > 0.4, labels == 0
    hits = float((guess & truth).sum())
    assert row["f1"] == pytest.approx(2 * hits / float(guess.sum() + truth.sum()))
    assert row["kind_accuracy"] == pytest.approx(float((chances.argmax(1) == labels).float().mean()))
    positive, negative = chances[truth, 0], chances[~truth, 0]
    assert row["first_auroc"] == pytest.approx(float((positive[:, None] > negative).float().mean()), abs=0.03)
    assert "odd" not in row
    assert not any(".." in name for name in row)
    assert any("odd is not defined: tp/(tp-tp) divides by zero" in line for line in told)

    table = result.clients
    assert list(table.rows) == ["client-0", "client-1", "client-2"]
    assert table.round == 2
    values = [each["f1"] for each in table.rows.values() if "f1" in each]
    fair = table.fairness["f1"]
    assert (fair.worst_tenth, fair.mean) == (min(values), pytest.approx(sum(values) / len(values)))
    assert table.fairness["loss"].worst_tenth == max(each["loss"] for each in table.rows.values())
    with (tmp_path / "clients.csv").open() as file:
        assert [line["client"] for line in csv.DictReader(file)] == list(table.rows)
    assert table.lines()[-1].split()[:2] == ["worst", "tenth"]


def test_the_worst_clients_follow_the_direction_that_a_job_states() -> None:
    table = run(stop={"metric": "loss", "larger_is_better": True}).clients
    values = [each["loss"] for each in table.rows.values()]
    assert min(values) < max(values)
    fair = table.fairness["loss"]
    assert (fair.worst_tenth, fair.larger_is_better) == (min(values), True)
    assert table.fairness["kind_accuracy"].larger_is_better


def test_a_figure_can_end_a_job() -> None:
    result = run(rounds=9, stop={"metric": "first_auroc", "target": 0.01})
    assert len(result.history) == 1
    assert "first_auroc reached" in result.reason


def test_figures_come_out_of_a_secure_sum_or_are_refused() -> None:
    masks = {"level": "none", "secure_aggregation": True, "clip_norm": 10.0}
    bounds = {"tp": 1.0, "fp": 1.0, "fn": 1.0, "first..ranking_40": 1.0}
    secure = run(privacy=masks, evaluation={"bounds": bounds, "batch_size": 3})
    plain = run()
    for name in ("f1", "first_auroc", "first_average_precision"):
        assert secure.history[-1][f"before_{name}"] == pytest.approx(plain.history[0][name], abs=2e-3)
    with pytest.raises(ConfigError, match=r"metrics\.f1 = .* needs fn, fp, and evaluation.bounds sums tp"):
        run(privacy=masks, evaluation={"bounds": {"tp": 1.0}})
    with pytest.raises(PrivacyError, match="'kind_accuracy' is not among"):
        run(privacy=masks, evaluation={"bounds": bounds}, stop={"metric": "kind_accuracy", "target": 1.0})


class Averaged(Judged):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        right = model(batch[0]).argmax(1) == batch[1]
        return {"hits": (float(right.float().mean()), 1)}


def test_a_mean_in_the_place_of_a_sum_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(Averaged, metrics={})
    assert [r.getMessage() for r in caplog.records if "'hits' counts 1 for each batch" in r.getMessage()]

"""Every algorithm against reference cases computed by others: real local training, the real server's step.

The cases say which rows are in which batch; nothing else is put in the place of what silos and coordinator
run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundtable.aggregation import TensorMatrix
from roundtable.client.training import local_training, stream_batches, tuning
from roundtable.client.training.algorithm_round import preparation
from roundtable.client.training.batches import Batch
from roundtable.client.training.local_work import Execution, LocalWork
from roundtable.client.training.module_state import borrowed
from roundtable.core import JobConfig, Task
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.initial_model import initial_vector, job_layout
from roundtable.engine import Rows, combine, initial_server_state, make_plan
from roundtable.engine import messages as m

FILE = Path(os.environ.get("ROUNDTABLE_SHARED", "")) / "reference" / "algorithm_cases.json"
ELSEWHERE = {"fedadam", "fedyogi", "fedadagrad", "fedavgm"}
"""Server optimizers have their own cases in tests/aggregation."""
NAMES = {"finetune": "finetuning"}
KEYS = {
    "lr": "learning_rate",
    "lambda": "pull",
    "tau": "temperature",
    "tau_eff": "tau",
    "inner": "inner_steps",
    "theta_decay": "personal_weight_decay",
    "theta_start": "inner_start",
    "personal_lr": "personal_learning_rate",
    "head_lr": "head_learning_rate",
    "finetune_steps": "tuning_steps",
    "finetune_lr": "tuning_learning_rate",
    "alpha_lr": "share_learning_rate",
}
LEFT_OUT = {"weights", "server_lr", "server_momentum", "local", "beta"}
OWN_MODELS = {"moon": "algorithm/last", **dict.fromkeys(("ditto", "pfedme", "apfl"), "algorithm/own")}
UNSUPPORTED = {
    "pfedme_3": "exact inner solves: no job offers them",
    **dict.fromkeys(
        ("scaffold_1", "scaffold_2", "scaffold_6", "scaffold_8"),
        "weights by examples are refused: 1/N is the weight of each c_i (the formulas: "
        "tests/core/test_scaffold.py)",
    ),
}


class Linear(nn.Module):
    """Least squares or logistic regression without a bias."""

    def __init__(self, w0: Tensor, l2: float, logistic: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(w0.clone())
        self.l2, self.logistic = l2, logistic

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, decay = x @ self.w, self.l2 / 2 * self.w.square().sum()
        if self.logistic:
            return functional.binary_cross_entropy_with_logits(out, y) + decay
        return (out - y).square().mean() / 2 + decay


class Base(nn.Module):
    def __init__(self, w0: Tensor, hidden: int, normalised: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(w0[: 3 * hidden].reshape(hidden, 3).clone())
        self.norm: nn.Module = nn.Identity()
        if normalised:
            self.norm = nn.BatchNorm1d(hidden, dtype=torch.float64)
            with torch.no_grad():
                self.norm.weight.copy_(w0[3 * hidden : 4 * hidden])
                self.norm.bias.copy_(w0[4 * hidden : 5 * hidden])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x @ self.w.T))


class Head(nn.Module):
    def __init__(self, w0: Tensor, hidden: int) -> None:
        super().__init__()
        self.a = nn.Parameter(w0[-hidden - 1 : -1].clone())
        self.c = nn.Parameter(w0[-1:].clone())


class TwoLayers(nn.Module):
    """½ (a · tanh(Bx) + c − y)², with batch normalisation before tanh where the problem says so."""

    def __init__(self, w0: Tensor, hidden: int, normalised: bool) -> None:
        super().__init__()
        self.base, self.head = Base(w0, hidden, normalised), Head(w0, hidden)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.base(x) @ self.head.a + self.head.c - y).square().mean() / 2


class Problem(Task):
    """The reference problem as a task; data are the case's."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case

    def model(self) -> nn.Module:
        case, w0 = self.case, torch.tensor(self.case["w0"], dtype=torch.float64)
        if "hidden" in case:
            return TwoLayers(w0, case["hidden"], case["kind"] == "batch_norm")
        return Linear(w0, case["l2"], case["kind"] == "logistic")

    def loss(self, model: Any, batch: Any) -> Tensor:
        return model.loss(*batch)  # type: ignore[no-any-return]

    def features(self, model: Any, batch: Any) -> Tensor:
        return model.base(batch[0])  # type: ignore[no-any-return]


def cases() -> list[Any]:
    if not FILE.is_file():
        return [pytest.param({}, marks=pytest.mark.skip(reason="ROUNDTABLE_SHARED names no reference cases"))]
    document = json.loads(FILE.read_text(encoding="utf-8"))
    made = []
    for case in document["cases"]:
        if case["method"] in ELSEWHERE or case["name"] in UNSUPPORTED:
            continue
        problem = document["problems"][case["problem"]]
        turns = document["schedules"][case["schedule"]]
        made.append(pytest.param({**case, **problem, "turns": turns}, id=case["name"]))
    return made


def job_of(case: Mapping[str, Any]) -> JobConfig:
    values, method = dict(case["params"]), case["method"]
    table: dict[str, Any] = {"name": NAMES.get(method, method)}
    table |= {KEYS.get(key, key): value for key, value in values.items() if key not in LEFT_OUT}
    if method == "apfl":
        table["share"] = table.pop("alpha")
    if method == "perfedavg":
        table |= {"learning_rate": values["beta"], "inner_learning_rate": values["lr"]}
    if table.get("inner_start") == "w":
        table["inner_start"] = "local"
    if "local" in values and method != "fedbn":
        table["head"] = ("head.*",)
    server = {"name": "fedavg", "learning_rate": values.get("server_lr", 1.0)}
    if method == "pfedme":
        server["learning_rate"] = values["beta"]
    if "server_momentum" in values:
        server = {"name": "fedavgm", "momentum": values["server_momentum"]}
    plain = method in ("scaffold", "feddyn", "qfedavg") or values.get("weights") == "uniform"
    document: dict[str, Any] = {
        "task": "t",
        "rounds": 5,
        "algorithm": table,
        "evaluation": {"every": 0},
        "aggregation": {"weighting": "uniform" if plain else "examples", "server_optimizer": server},
    }
    if method == "cyclic":
        document["cohort"] = {"size": 1, "strategy": "round_robin"}
    return JobConfig.model_validate(document)


class Silos:
    """All clients of a case, one after the other in one module, as a simulation has them."""

    def __init__(self, case: Mapping[str, Any], patch: pytest.MonkeyPatch) -> None:
        self.task, self.job = Problem(case), job_of(case)
        self.algorithm = make_algorithm(self.job.algorithm)
        self.module = self.task.model()
        self.layout = job_layout(self.job, self.algorithm, self.module)
        self.vector = initial_vector(self.layout, self.module)
        self.data = [
            (torch.tensor(c["x"], dtype=torch.float64), torch.tensor(c["y"], dtype=torch.float64))
            for c in case["clients"]
        ]
        self.kept: dict[int, Any] = {}
        if (own := OWN_MODELS.get(case["method"])) is not None:
            # The cases begin at the initial model whenever a client first comes, we at the one
            # that it is sent.
            self.kept = {n: {own: self.vector.clone()} for n in range(len(case["clients"]))}
        self.plan = make_plan(self.job, len(self.data))
        self.state = initial_server_state(self.plan, self.layout.size)
        self._rows: list[list[int]] = []
        patch.setattr(stream_batches, "training_batches", self._batches)
        patch.setattr(tuning, "training_batches", self._whole)

    def _batches(self, data: Any, **how: Any) -> Iterator[Batch]:
        x, y = data
        for rows in self._rows:
            yield Batch(1, len(rows), (x[rows], y[rows]))

    def _whole(self, data: Any, *, steps: int, **how: Any) -> Iterator[Batch]:
        for _ in range(steps):
            yield Batch(1, len(data[1]), data)

    def _work(self, number: int, round: int) -> LocalWork:
        name = f"client-{number}"
        return LocalWork(
            self.job, self.layout, self.vector, round, name, self.kept.get(number), self.algorithm
        )

    def round(self, number: int, turn: Mapping[str, list[list[int]]]) -> None:
        """Trains those present, and makes the next model of their updates."""
        updates, rows, kept = [], [], {}
        for place, (name, batches) in enumerate(turn.items()):
            client, self._rows = int(name), batches
            found = local_training.train(
                self.task, self.module, self.data[client], self._work(client, number), Execution()
            )
            updates.append(m.Update(f"client-{client}", m.RowReference(place), found.examples))
            rows.append(found.delta.clone())
            kept[client] = found.local
        self._assigned(list(map(len, turn.values())))
        made = combine(
            self.plan,
            Rows(TensorMatrix(torch.stack(rows)), updates),
            self.vector,
            self.state,
            round=number,
            seed=1,
            population=len(self.data),
        )
        self.vector, self.state = made.vector, made.state
        self.kept |= kept

    def _assigned(self, steps: list[int]) -> None:
        """FedNova's server works the steps out of the job; the cases' are another number for each client."""
        if self.algorithm.table.name != "fednova":
            return
        server: Any = self.plan.server.algorithm if self.plan.server else None
        turns = iter(steps)

        def assigned(examples: int, round: int) -> float:
            count, table = next(turns), self.job.algorithm
            if table.tau == "steps":  # type: ignore[attr-defined]
                return count
            return self.algorithm.step().effective_steps(count, table.rate(round))

        server._steps = assigned

    def flat(self, local: Any = None) -> Tensor:
        """The model in the order of the cases: every parameter, those at home as they are there."""
        with borrowed(self.module, self.layout.model, self.vector[: self.layout.model.size], local):
            return torch.cat([p.detach().flatten() for p in self.module.parameters()])

    def personal(self, client: int, round: int) -> Tensor:
        """What a client evaluates."""
        work, device = self._work(client, round), torch.device("cpu")
        prepare = preparation(work, device, tuning.tuner(self.task, self.data[client], work, device))
        with borrowed(
            self.module, self.layout.model, self.vector[: self.layout.model.size], self.kept.get(client)
        ):
            if prepare is not None:
                prepare(self.module)
            return torch.cat([p.detach().flatten() for p in self.module.parameters()])


def close(found: Tensor, expected: Any, what: str) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    error = float((found.double() - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
    assert error < 2e-5, f"{what}: {error:.1e} off"


@pytest.mark.parametrize("case", cases())
def test_it_gives_the_reference(case: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    silos = Silos(case, monkeypatch)
    at_home = set(case["params"].get("local", ()))
    shared = [place for place in range(len(case["w0"])) if place not in at_home]
    for number, turn in enumerate(case["turns"], start=1):
        hops = [{name: turn[name]} for name in turn] if case["method"] == "cyclic" else [turn]
        for hop in hops:
            silos.round(number, hop)
        expected = torch.tensor(case["global"][number - 1], dtype=torch.float64)
        close(silos.flat()[shared], expected[shared].tolist(), f"round {number}")
        for client, wanted in enumerate(case.get("personal", [[]] * number)[number - 1]):
            if client in silos.kept:
                close(silos.personal(client, number), wanted, f"client {client} after round {number}")

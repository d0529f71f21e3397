"""Local training against loops written out independently."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from roundtable.client import evaluate, split_data, train
from roundtable.client.training.local_work import Execution, LocalWork
from roundtable.core import (
    ArrayTask,
    JobConfig,
    Layout,
    LayoutRules,
    Site,
    Task,
    initial_state,
    load_task,
    torch_generator,
)
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import ConfigError, InvalidUpdate, LayoutError, NoExamples, TaskError
from roundtable.engine.validation.algorithm_composition import check_algorithm


class Linear(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def data(self, site: Site) -> object:
        return toy_data(10), toy_data(7, seed=1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
        x, y = batch
        return {"accuracy": ((model(x).argmax(1) == y).sum(), len(y))}


class Normed(Linear):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def toy_data(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 4, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def job_of(**algorithm: object) -> JobConfig:
    return JobConfig.model_validate({"task": "toy", "seed": 5, "algorithm": {"batch_size": 4, **algorithm}})


def setting(task: Task, rules: LayoutRules | None = None) -> tuple[nn.Module, Layout, Tensor]:
    model = initial_state(task, 5)
    assert isinstance(model, nn.Module)
    layout = Layout.of(model, rules)
    return model, layout, layout.flatten(model).clone()


def plain_loop(task: Task, job: JobConfig, data: tuple[Tensor, Tensor], round: int, client: str) -> nn.Module:
    """Algorithm 1 of McMahan et al. with torch's own optimizer and a term for FedProx."""
    table = job.algorithm
    model = initial_state(task, job.seed)
    assert isinstance(model, nn.Module)
    anchor = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=table.learning_rate * table.learning_rate_decay ** (round - 1),
        momentum=table.momentum,
        weight_decay=table.weight_decay,
    )
    steps = table.passes * -(-len(data[0]) // table.batch_size)
    whole = table.schedule_over == "job"
    schedule = torchs_schedule(optimizer, table, steps * job.rounds if whole else steps)
    for _ in range((round - 1) * steps if whole else 0):
        optimizer.step()
        schedule.step()
    order = torch_generator(job.seed, round, client, "batches")
    for _ in range(table.passes):
        permutation = torch.randperm(len(data[0]), generator=order)
        for start in range(0, len(permutation), table.batch_size):
            rows = permutation[start : start + table.batch_size]
            optimizer.zero_grad()
            loss = task.loss(model, (data[0][rows], data[1][rows]))
            for weight, origin in zip(model.parameters(), anchor, strict=True):
                loss = loss + getattr(table, "mu", 0.0) / 2 * ((weight - origin) ** 2).sum()
            loss.backward()
            if table.max_gradient_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), table.max_gradient_norm)
            optimizer.step()
            schedule.step()
    return model


def torchs_schedule(optimizer: Any, table: AlgorithmTable, steps: int) -> Any:
    """The same learning rates by torch's schedulers."""
    schedulers, rate = torch.optim.lr_scheduler, optimizer.param_groups[0]["lr"]
    warm_up, left = table.schedule_warm_up, steps - table.schedule_warm_up
    behind: Any = schedulers.LambdaLR(optimizer, lambda step: 1.0)
    if table.schedule == "cosine":
        behind = schedulers.CosineAnnealingLR(optimizer, left, rate * table.schedule_floor)
    elif table.schedule == "linear":
        behind = schedulers.LinearLR(optimizer, 1.0, table.schedule_floor, left)
    if not warm_up:
        return behind
    rising = schedulers.LinearLR(optimizer, 1 / warm_up, 1.0, max(warm_up - 1, 1))
    return schedulers.SequentialLR(optimizer, [rising, behind], [warm_up])


def test_a_rounds_number_seeds_its_training() -> None:
    """Attempts at a round give the same bits. From the same model, another number trains in another order:
    which makes no difference, but of rounding, where a round is one step over all examples."""
    task = Linear()

    def trained(round: int, batch_size: int) -> Tensor:
        model, layout, vector = setting(task)
        job = job_of(batch_size=batch_size, learning_rate=0.5)
        return train(task, model, toy_data(12), LocalWork(job, layout, vector, round, "a")).delta.clone()

    assert torch.equal(trained(1, 4), trained(1, 4))
    assert (trained(1, 4) - trained(2, 4)).norm() > 0.01 * trained(1, 4).norm()
    assert torch.allclose(trained(1, 12), trained(2, 12), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"epochs": 3, "momentum": 0.9},
        {"epochs": 2, "weight_decay": 0.1, "momentum": 0.5},
        {"learning_rate_decay": 0.5},
        {"epochs": 2, "max_gradient_norm": 0.1},
        {"epochs": 3, "schedule": "cosine", "schedule_floor": 0.1, "momentum": 0.9},
        {"epochs": 3, "schedule": "linear", "learning_rate_decay": 0.5},
        {"epochs": 3, "schedule": "cosine", "schedule_warm_up": 4},
        {"epochs": 2, "schedule_warm_up": 3, "schedule": "linear", "schedule_floor": 0.25},
        {"epochs": 2, "schedule_warm_up": 2},
        {"epochs": 3, "schedule_warm_up": 11, "schedule": "cosine", "schedule_over": "job"},
        {"name": "fedprox", "mu": 0.7, "epochs": 3, "learning_rate": 0.3},
    ],
)
def test_equals_a_plain_loop(algorithm: dict[str, object]) -> None:
    task, job = Linear(), job_of(**algorithm)
    model, layout, vector = setting(task)
    update = train(task, model, toy_data(10), LocalWork(job, layout, vector, 3, "a"))
    expected = layout.flatten(plain_loop(task, job, toy_data(10), 3, "a")) - vector
    if "mu" in algorithm or job.algorithm.scheduled:
        torch.testing.assert_close(update.delta, expected)
    else:
        assert torch.equal(update.delta, expected)
    assert update.examples == 10
    assert update.steps == 3 * job.algorithm.passes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 4, "schedule_warm_up": 4}, "would never have its full value"),
        ({"schedule_over": "job"}, 'schedule_over = "job" would be ignored'),
        ({"schedule_floor": 0.1}, "would be ignored: set schedule to linear or cosine"),
    ],
)
def test_a_schedule_that_nobody_can_mean_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job_of(**wrong)


@pytest.mark.parametrize(
    ("name", "more"),
    [("scaffold", {}), ("fednova", {}), ("feddyn", {"alpha": 0.1}), ("ditto", {"pull": 1.0})],
)
def test_an_algorithm_that_counts_on_one_rate_refuses_a_schedule(name: str, more: dict[str, float]) -> None:
    table = {"name": name, "schedule": "cosine", **more}
    job = JobConfig.model_validate(
        {"task": "toy", "algorithm": table, "aggregation": {"weighting": "uniform"}}
    )
    with pytest.raises(
        ConfigError, match=f"algorithm {name!r}: what it computes counts on one learning rate"
    ):
        check_algorithm(job, make_algorithm(job.algorithm))


def test_an_optimizer_of_ones_own_follows_the_schedule_too() -> None:
    class Own(Linear):
        def optimizer(self, parameters: Any) -> Any:
            rates.append(torch.optim.SGD(parameters, lr=0.4))
            return rates[-1]

    rates: list[Any] = []
    own, job = Own(), job_of(epochs=3, schedule="cosine", schedule_floor=0.1, learning_rate=0.4)
    model, layout, vector = setting(own)
    update = train(own, model, toy_data(10), LocalWork(job, layout, vector, 1, "a"))
    expected = layout.flatten(plain_loop(Linear(), job, toy_data(10), 1, "a")) - vector
    torch.testing.assert_close(update.delta, expected)
    assert rates[0].param_groups[0]["lr"] == pytest.approx(0.4 * job.algorithm.rate_share(9, 9))


def test_the_proximal_term_has_its_closed_form() -> None:
    """On the loss c·w a step of FedProx is w ← w − η(c + μ(w − w₀)), a geometric series."""

    class Slope(Task):
        def model(self) -> nn.Module:
            return nn.Linear(1, 1, bias=False)

        def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
            return 2.0 * model(batch[0]).mean()

    rate, mu, steps = 0.1, 0.5, 7
    model, layout, vector = setting(Slope())
    job = job_of(name="fedprox", mu=mu, learning_rate=rate, steps=steps)
    update = train(Slope(), model, (torch.ones(4, 1),), LocalWork(job, layout, vector, 1, "a"))
    expected = -2.0 / mu * (1 - (1 - rate * mu) ** steps)
    assert update.delta.item() == pytest.approx(expected, rel=1e-5)


def test_same_call_same_bits_and_no_trace_in_global_generators() -> None:
    task, job = Normed(), job_of(epochs=2)
    model, layout, vector = setting(task)
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    first = train(task, model, toy_data(10), LocalWork(job, layout, vector, 1, "a"))
    other = train(task, model, toy_data(10), LocalWork(job, layout, vector, 1, "b"))
    again = train(task, model, toy_data(10), LocalWork(job, layout, vector, 1, "a"))
    assert torch.equal(first.delta, again.delta)
    assert first.loss == again.loss
    assert not torch.equal(first.delta, other.delta)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()


def test_batch_statistics_are_averaged_and_the_counter_stays() -> None:
    task = Normed()
    model, layout, vector = setting(task)
    update = train(task, model, toy_data(12), LocalWork(job_of(), layout, vector, 1, "a"))
    state = layout.unflatten(update.delta)
    assert state["1.running_mean"].abs().sum() > 0
    assert update.local == {"1.num_batches_tracked": torch.tensor(3)}
    assert model.state_dict()["1.num_batches_tracked"] == 0
    later = train(task, model, toy_data(12), LocalWork(job_of(), layout, vector, 2, "a", update.local))
    assert later.local["1.num_batches_tracked"] == 6


def test_local_tensors_go_in_and_come_out() -> None:
    task = Linear()
    model, layout, vector = setting(task, LayoutRules(local=("2.*",)))
    mine = {"2.weight": torch.full((3, 8), 0.25), "2.bias": torch.ones(3)}
    job = job_of(learning_rate=0.1)
    update = train(task, model, toy_data(10), LocalWork(job, layout, vector, 1, "a", mine))
    assert layout.size == 4 * 8 + 8
    assert set(update.local) == set(mine)
    assert not torch.equal(update.local["2.bias"], mine["2.bias"])
    assert torch.equal(mine["2.bias"], torch.ones(3))
    untouched = initial_state(task, 5)
    assert isinstance(untouched, nn.Module)
    assert torch.equal(model.state_dict()["2.bias"], untouched.state_dict()["2.bias"])
    with_mine = evaluate(task, model, toy_data(7), layout, vector, local=mine)
    assert with_mine != evaluate(task, model, toy_data(7), layout, vector)


def test_low_precision_weights_do_not_pull_the_global_vector_to_their_grid() -> None:
    class Half(Linear):
        def model(self) -> nn.Module:
            return super().model().to(torch.bfloat16)

        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0].bfloat16()), batch[1])

    model, layout, vector = setting(Half())
    vector = vector + 1e-5
    job = job_of(learning_rate=1e-30)
    update = train(Half(), model, toy_data(4), LocalWork(job, layout, vector, 1, "a"))
    assert torch.equal(update.delta, torch.zeros(layout.size))


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[0][index], self.data[1][index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(zip(*self.data, strict=True))


def test_every_kind_of_data_set_gives_the_same_bits() -> None:
    task, data = Linear(), toy_data(10)
    model, layout, vector = setting(task)
    forms = [data, TensorDataset(*data), Rows(data), tuple(part.numpy() for part in data)]
    updates = [
        train(task, model, form, LocalWork(job_of(epochs=2), layout, vector, 1, "a")) for form in forms
    ]
    tests = [evaluate(task, model, form, layout, vector, batch_size=3) for form in forms]
    assert all(torch.equal(update.delta, updates[0].delta) for update in updates)
    assert all(test == tests[0] for test in tests)


def test_large_tensors_are_gathered_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Linear()
    model, layout, vector = setting(task)
    usual = train(task, model, toy_data(10), LocalWork(job_of(), layout, vector, 1, "a"))
    monkeypatch.setattr("roundtable.client.training.batches._COPY_LIMIT_BYTES", 0)
    sparing = train(task, model, toy_data(10), LocalWork(job_of(), layout, vector, 1, "a"))
    assert torch.equal(usual.delta, sparing.delta)


@pytest.mark.parametrize("form", ["tuple", "stream"])
def test_steps_count_batches_over_epochs(form: str) -> None:
    task, data = Linear(), toy_data(10)
    model, layout, vector = setting(task)
    seen: list[tuple[int, int]] = []
    dataset = data if form == "tuple" else Stream(data)
    job = job_of(steps=7)
    update = train(
        task,
        model,
        dataset,
        LocalWork(job, layout, vector, 1, "a"),
        Execution(progress=lambda done, total, loss: seen.append((done, total))),
    )
    assert update.steps == 7
    # Batches of a stream are full across the ends of epochs.
    assert seen[-1] == (28 if form == "stream" else 4 + 4 + 2 + 4 + 4 + 2 + 4, 28)


def test_a_stream_without_steps_is_refused() -> None:
    model, layout, vector = setting(Linear())
    with pytest.raises(TaskError, match=r"\[algorithm\] steps"):
        train(Linear(), model, Stream(toy_data(3)), LocalWork(job_of(), layout, vector, 1, "a"))


@pytest.mark.parametrize("empty", [toy_data(0), Rows(toy_data(0)), None])
def test_zero_examples_are_refused(empty: object) -> None:
    model, layout, vector = setting(Linear())
    with pytest.raises(NoExamples, match="zero examples"):
        train(Linear(), model, empty, LocalWork(job_of(), layout, vector, 1, "a"))
    assert evaluate(Linear(), model, empty, layout, vector) == {}


@pytest.mark.parametrize(
    "wrong", [(toy_data(3), toy_data(3)), ("a", "b"), toy_data(3)[:1] + toy_data(4)[1:], 5]
)
def test_what_is_no_data_set_is_named(wrong: object) -> None:
    model, layout, vector = setting(Linear())
    with pytest.raises(TaskError, match=r"must return|data set|equal lengths"):
        train(Linear(), model, wrong, LocalWork(job_of(), layout, vector, 1, "a"))


def test_a_loss_that_is_not_finite_names_step_and_epoch() -> None:
    model, layout, vector = setting(Linear())
    data = toy_data(10)
    data[0][5, 0] = float("nan")
    with pytest.raises(InvalidUpdate, match=r"loss is nan at step \d+, epoch 1 of round 4") as caught:
        train(Linear(), model, data, LocalWork(job_of(epochs=30), layout, vector, 4, "a"))
    assert caught.value.reason == "non_finite"
    healthy = train(Linear(), model, toy_data(10), LocalWork(job_of(), layout, vector, 4, "a"))
    assert torch.isfinite(healthy.delta).all()


def test_weights_that_overflow_in_the_last_step_are_caught() -> None:
    class Steep(Linear):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return 1e3 * super().loss(model, batch)

    model, layout, vector = setting(Steep())
    job = job_of(learning_rate=1e38, steps=1)
    with pytest.raises(InvalidUpdate, match="weights that are not finite"):
        train(Steep(), model, toy_data(4), LocalWork(job, layout, vector, 1, "a"))


def test_a_loss_that_is_no_scalar_is_named() -> None:
    class Vectorial(Linear):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    model, layout, vector = setting(Vectorial())
    with pytest.raises(TaskError, match=r"scalar tensor, not \[4\]"):
        train(Vectorial(), model, toy_data(4), LocalWork(job_of(), layout, vector, 1, "a"))


def test_evaluation_sums_over_batches_in_evaluation_mode() -> None:
    task = Normed()
    model, layout, vector = setting(task)
    data = toy_data(7)
    found = evaluate(task, model, data, layout, vector, batch_size=3)
    reference = initial_state(task, 5)
    assert isinstance(reference, nn.Module)
    reference.eval()
    with torch.no_grad():
        logits = reference(data[0])
    assert found["accuracy"] == (float((logits.argmax(1) == data[1]).sum()), 7)
    assert found["loss"][0] / 7 == pytest.approx(F.cross_entropy(logits, data[1]).item(), rel=1e-5)
    assert found["loss"][1] == 7


def test_a_model_of_another_layout_is_refused() -> None:
    _, layout, vector = setting(Linear())
    with pytest.raises(LayoutError, match="differ from the layout"):
        train(Linear(), nn.Linear(4, 3), toy_data(4), LocalWork(job_of(), layout, vector, 1, "a"))


def test_the_tasks_own_optimizer_is_used_and_decays() -> None:
    class Adam(Linear):
        def optimizer(self, parameters):  # type: ignore[no-untyped-def]
            return torch.optim.Adam(parameters, lr=0.01)

    model, layout, vector = setting(Adam())
    job = job_of(learning_rate_decay=0.5, epochs=1, batch_size=10)
    update = train(Adam(), model, toy_data(10), LocalWork(job, layout, vector, 2, "a"))
    assert update.delta.abs().max().item() == pytest.approx(0.005, rel=1e-3)


def test_gradients_of_parameters_that_the_optimizer_leaves_out_do_not_add_up() -> None:
    """They count when gradients are clipped, each step's own."""

    class Last(Linear):
        def optimizer(self, parameters):  # type: ignore[no-untyped-def]
            return torch.optim.SGD(list(parameters)[2:], lr=0.1)

    task, data = Last(), toy_data(12)
    model, layout, vector = setting(task)
    job = job_of(steps=3, batch_size=12, max_gradient_norm=0.05)
    update = train(task, model, data, LocalWork(job, layout, vector, 1, "a"))
    layout.load(model, vector)
    for _ in range(3):
        model.zero_grad()
        task.loss(model, data).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        torch.optim.SGD(list(model.parameters())[2:], lr=0.1).step()
    assert torch.allclose(update.delta, layout.flatten(model) - vector, atol=1e-7)


class Mean(ArrayTask):
    """The weighted mean of the data: one step to the optimum."""

    def weights(self) -> dict[str, np.ndarray]:
        return {"mean": np.zeros(2), "seen": np.zeros((), dtype=np.int64)}

    def data(self, site: Site) -> np.ndarray:
        return np.array([[1.0, 2.0], [3.0, 4.0]])

    def fit(self, weights, data, options):  # type: ignore[no-untyped-def]
        assert options["learning_rate"] == 0.01
        weights["mean"][:] = data.mean(0)
        return {**weights, "seen": weights["seen"] + len(data)}, len(data), {"loss": 0.5}

    def evaluate(self, weights, data):  # type: ignore[no-untyped-def]
        return {"distance": (float(np.abs(data - weights["mean"]).sum()), len(data))}


def test_array_tasks_go_through_the_same_two_functions() -> None:
    task = Mean()
    state = initial_state(task, 5)
    layout = Layout.of(state)
    vector = layout.flatten(state)
    data, test = split_data(task, Site("a"))
    update = train(task, state, data, LocalWork(job_of(), layout, vector, 1, "a"))
    assert torch.equal(update.delta, torch.tensor([2.0, 3.0]))
    assert (update.examples, update.loss, update.metrics) == (2, 0.5, {"loss": (1.0, 2)})
    assert update.local == {"seen": torch.tensor(2)}
    again = train(task, state, data, LocalWork(job_of(), layout, vector, 2, "a", update.local))
    assert again.local == {"seen": torch.tensor(4)}
    assert evaluate(task, state, test, layout, vector + update.delta) == {"distance": (4.0, 2)}


def test_an_array_task_that_reports_nothing_is_refused() -> None:
    class Idle(Mean):
        def fit(self, weights, data, options):  # type: ignore[no-untyped-def]
            return weights, 0, {}

    state = initial_state(Idle(), 5)
    layout = Layout.of(state)
    with pytest.raises(NoExamples, match="zero examples"):
        train(Idle(), state, None, LocalWork(job_of(), layout, layout.flatten(state), 1, "a"))


def test_methods_that_ask_are_told_where_and_when_they_run() -> None:
    heard: list[Context] = []

    class Curious(Linear):
        def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], context: Context) -> Tensor:  # type: ignore[override]
            heard.append(context)
            return super().loss(model, batch)

    task, job = Curious(), job_of(epochs=2)
    model = initial_state(task, job.seed)
    layout = Layout.of(model)
    work = LocalWork(job, layout, layout.flatten(model).clone(), 3, "a")
    update = train(task, model, toy_data(10), work)
    assert {(c.job, c.round, c.site, c.steps, c.device.type) for c in heard} == {
        (job.title, 3, "a", update.steps, "cpu")
    }
    one, other = heard[0].generator("noise"), heard[0].generator("order")
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=heard[1].generator("noise")))
    assert not torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))
    plain = train(Linear(), model, toy_data(10), work)
    assert torch.equal(plain.delta, update.delta)
    heard.clear()
    evaluate(
        task, model, toy_data(7, seed=1), layout, work.vector, context=work.context(None, torch.device("cpu"))
    )
    assert {c.site for c in heard} == {"a"}


def test_what_is_the_same_in_all_rounds_cannot_ask(tmp_path: Path) -> None:
    (tmp_path / "curious.py").write_text(
        "from roundtable import Task\nclass Curious(Task):\n    def model(self, context): ...\n"
        "    def data(self, site): ...\n    def loss(self, model, batch): ...\n"
    )
    with pytest.raises(TaskError, match=r"Curious\.model\(\) asks for a context"):
        load_task("curious.py", tmp_path)

"""One batch of one client tells what is odd about a task, in words that name the remedy."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from roundtable.client.first_batch.oddities import oddities
from roundtable.client.first_batch.trial import try_batch
from roundtable.core import Site, Task, parse_job

ROWS, CLASSES = 33, 4


class Sound(Task):
    """Points whose classes are sorted, as files often are."""

    scale, frozen, shift = 1.0, False, 0

    def model(self) -> nn.Module:
        body = nn.Linear(6, 8).requires_grad_(not self.frozen)
        return nn.Sequential(body, nn.Tanh(), nn.Linear(8, CLASSES))

    def data(self, site: Site) -> Any:
        labels = torch.arange(ROWS) * CLASSES // ROWS + self.shift
        points = self.scale * torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3))
        mine = site.shard(labels)
        return (points[mine], labels[mine]), (points[mine], labels[mine])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


class ByItsName(Sound):
    """Splits by what the site is called, and asks no partition."""

    def data(self, site: Site) -> Any:
        return super().data(Site(site.name))


class OfBatches(Sound):
    """The same examples as dictionaries of a map-style data set, by a DataLoader."""

    def data(self, site: Site) -> Any:
        (points, labels), _ = super().data(site)

        class Rows(Dataset[Any]):
            def __len__(self) -> int:
                return len(labels)

            def __getitem__(self, row: int) -> Any:
                return {"x": points[row], "y": labels[row]}

        return DataLoader(Rows(), num_workers=2), None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch["x"]), batch["y"])


class Summed(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="sum")


class DividedTwice(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) / len(batch[1])


class Unscaled(Sound):
    scale = 255.0

    def model(self) -> nn.Module:
        return nn.Linear(6, CLASSES)


class FromOne(Sound):
    shift = 1


class Everyones(Sound):
    def data(self, site: Site) -> Any:
        return super().data(Site("all"))


class Normed(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


class NormedDropping(Normed):
    def data(self, site: Site) -> Any:
        training, test = super().data(site)
        return DataLoader(TensorDataset(*training), batch_size=16, drop_last=True), test


class Frozen(Sound):
    frozen = True


class AllFrozen(Sound):
    def model(self) -> nn.Module:
        return super().model().requires_grad_(False)


class Means(Sound):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": (0.93, 1), "other": (float("nan"), len(batch[1]))}


class Broadcast(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0])[:, :1], batch[1].float())


class Unreduced(Sound):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="none")


class Unused(Sound):
    def model(self) -> nn.Module:
        model = super().model()
        model.spare = nn.Parameter(torch.zeros(3))
        return model


class BrokenMetric(Sound):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        raise KeyError("accuracy")


class NoData(Sound):
    def data(self, site: Site) -> Any:
        return (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64)), None


class Cooling(Sound):
    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) / self.calls


class Once(Sound):
    asked = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.asked:
            raise RuntimeError("the cache is full")
        self.asked = True
        return super().loss(model, batch)


class Steep(Sound):
    """A penalty on the gradient with respect to the inputs."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points = batch[0].clone().requires_grad_()
        loss = cross_entropy(model(points), batch[1])
        (slope,) = torch.autograd.grad(loss, points, create_graph=True)
        return loss + slope.square().sum() / len(points)


class SteepInTraining(Steep):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) if torch.is_grad_enabled() else Sound.loss(self, model, batch)


class Remembering(Sound):
    """Keeps what changes nothing: calls, rows that are read once, a client's shape."""

    calls = 0

    def data(self, site: Site) -> Any:
        self.rows = super().data(site)
        return self.rows

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        self.last = model(batch[0]).detach()
        return super().loss(model, batch)


class Clamping(NormedDropping):
    """Changes weights and buffers in its forward pass."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

        def clamp(layer: Any, _: Any) -> None:
            layer.weight.data.clamp_(-0.2, 0.2)

        model[0].register_forward_pre_hook(clamp)
        return model


class Averaging(Sound):
    """Follows the weights with a copy that is no part of the model."""

    def model(self) -> nn.Module:
        model = super().model()
        model.teacher = [super().model()]  # type: ignore[assignment]
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        teacher = model.teacher[0]  # type: ignore[index,union-attr]
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)
            aim = teacher(batch[0])
        return super().loss(model, batch) + (model(batch[0]) - aim).square().mean()


class Centred(Sound):
    def model(self) -> nn.Module:
        self.centre = torch.zeros(CLASSES)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        self.centre = 0.9 * self.centre + 0.1 * scores.detach().mean(0)
        return cross_entropy(scores - self.centre, batch[1])


class Drawing(Sound):
    def model(self) -> nn.Module:
        self.numbers = np.random.default_rng(3)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * self.numbers.uniform(0.5, 2.0)


class Everywhere(Sound):
    heat: ClassVar[list[float]] = [1.0]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.heat[0] *= 0.9
        return super().loss(model, batch) * self.heat[0]


class WeighsLast(Sound):
    """Weighs by the client whose data were opened last."""

    def data(self, site: Site) -> Any:
        self.weight = 1.0 + site.index
        return super().data(site)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * self.weight


class Unseen(Sound):
    """A layer with a buffer that is not saved."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        model.seen += 1.0  # type: ignore[operator]
        return super().loss(model, batch) / model.seen


def told(task: Task, job: str = "", clients: int = 2, rate: float = 0.1) -> dict[str, str]:
    read = parse_job(f'task = "t"\n[algorithm]\nbatch_size = 16\nlearning_rate = {rate}\n{job}')
    site, beside = (
        Site(f"client-{index}", index, clients, {}, lambda labels, index, count: torch.arange(ROWS).numpy())
        for index in range(2)
    )
    before = torch.get_rng_state()
    trial = try_batch(task, read, site, beside=beside)
    assert torch.equal(torch.get_rng_state(), before)
    return {odd.about: odd.says for odd in oddities(trial, read)}


@pytest.mark.parametrize("kind", [Sound, OfBatches, NormedDropping, SteepInTraining, Remembering, Clamping])
def test_a_sound_task_is_not_odd(kind: type[Task]) -> None:
    assert told(kind()) == {}


@pytest.mark.parametrize(
    ("task", "about", "says"),
    [
        (Summed(), "summed_loss", "twice as large.* seems to be a sum"),
        (DividedTwice(), "summed_loss", "half as large"),
        (Unscaled(), "loss", r"knows nothing of 4 classes would have about 1\.39"),
        (FromOne(), "loss", "labels of this batch run from 1 to 4, .* gives 4 scores: .* subtract 1"),
        (Everyones(), "shard", r"2 clients have the same data\. `mine = site\.shard"),
        (Normed(), "batch_norm", "33 examples of client-0 leave one for the last batch of 16"),
        (AllFrozen(), "gradient", "every weight of the model is frozen"),
        (Means(), "mean_metric", "'accuracy' counts 1 for a batch of 33"),
        (Means(), "metric", "'other' is nan"),
        (Broadcast(), "warning", "target size"),
        (Unreduced(), "loss", r"shape \[16\], not one value: take its mean"),
        (Unused(), "gradient", "1 tensors that are trained had no part in the loss: 'spare'"),
        (
            BrokenMetric(),
            "metrics",
            r"metrics\(\) does not take a batch: KeyError: 'accuracy' \(test_first_b",
        ),
        (Cooling(), "state", r"gives 1\.\d+ and then 0\.\d+ of the same weights"),
        (
            Once(),
            "second loss",
            r"fails when it is asked again: RuntimeError: the cache is full \(test_first_b",
        ),
        (Steep(), "measured loss", "gradients are off .* does not require grad"),
        (NoData(), "data", "client-0 has no training examples"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Task) else "",
)
def test_what_is_odd_is_said_with_its_remedy(task: Task, about: str, says: str) -> None:
    assert re.search(says, told(task)[about])


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Averaging(), "model.teacher"),
        (Centred(), "self.centre"),
        (Cooling(), "self.calls"),
        (Drawing(), "self.numbers"),
        (Everywhere(), "Everywhere.heat"),
        (Unseen(), "model.seen"),
        (WeighsLast(), "self.weight"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Task) else "",
)
def test_what_goes_on_from_client_to_client_is_named(task: Task, name: str) -> None:
    assert f"(what moved: {name})" in told(task)["state"]


def test_settings_of_the_job_that_are_odd_for_the_task() -> None:
    assert "frozen and travel each round" in told(Frozen(), '[model]\ntravel = "all"')["frozen"]
    assert told(Frozen()) == {}
    assert "lower algorithm.learning_rate" in told(Sound(), rate=1e4)["learning_rate"]
    assert told(Sound(), "max_gradient_norm = 1e-3", rate=100.0) == {}
    assert told(Everyones(), clients=1) == {}
    split = '[simulation.partition]\nname = "dirichlet"\nalpha = 0.5'
    assert "partition splits nothing" in told(ByItsName(), split)["partition"]
    assert told(Sound(), split) == told(ByItsName()) == {}

"""Convolutions and pooling on compiled kernels: against torch's own, and what is left to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autograd_twin import Anything, classified, stepped
from torch import Tensor, nn

from roundtable.core import Layout
from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised.compiled_step import CompiledProgram
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.recorded_steps import Steps
from roundtable.simulation.backends.vectorised.recorded_work import Manner
from roundtable.simulation.backends.vectorised.recording import Unrecordable
from roundtable.simulation.backends.vectorised.row_forward import ROWS, RowForward

pytestmark = pytest.mark.skipif(load() is None, reason="there is no C++ compiler here")
FORMS: dict[str, tuple[Any, ...]] = {
    "1 x 1": (1, 1, 0),
    "1 x 1, stride 2": (1, 2, 0),
    "3 x 3": (3, 1, 0),
    "3 x 3 padded": (3, 1, 1),
    "5 x 5 padded, stride 2": (5, 2, 2),
    "as large as the image": ((11, 18), 1, 0),
    "larger than the image": (13, 3, (2, 1)),
    "2 x 7, strides 3 and 1": ((2, 7), (3, 1), (1, 3)),
    "same": (3, 1, "same"),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def images(count: int, channels: int = 1, height: int = 11, width: int = 18) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, channels, height, width, generator=generator)
    return x, torch.randint(0, 5, (count,), generator=generator)


def network(*layers: nn.Module, like: Tensor) -> nn.Module:
    """Layers and a head that fits."""
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        return nn.Sequential(*body, nn.Linear(body(like).shape[1], 5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("count", "channels", "kernels"), [(1, 3, 16), (10, 1, 6), (64, 7, 3), (10, 16, 17)])
def test_convolutions_of_any_form(form: str, count: int, channels: int, kernels: int) -> None:
    """The second one gives a gradient to what it looks at."""
    size, stride, padding = FORMS[form]
    if kernels == 17 and form == "larger than the image":
        kernels = 1
    x, y = images(count)
    first = nn.Conv2d(1, channels, (3, 1), padding=(1, 0))
    second = nn.Conv2d(channels, kernels, size, stride, padding, bias=channels != 7)
    program = stepped(network(first, nn.Tanh(), second, nn.Sigmoid(), like=x), (x, y))
    assert (program.compiled == 1.0) == (second.weight.numel() <= 4096)


@pytest.mark.parametrize(
    "pooling",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 2, padding=1),
        nn.MaxPool2d((1, 2), (2, 1)),
        nn.MaxPool2d((3, 4), (3, 5)),
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, 1),
        nn.AvgPool2d((2, 5), (3, 4)),
        nn.AdaptiveAvgPool2d(1),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [9, 40])
def test_pooling(pooling: nn.Module, width: int) -> None:
    x, y = images(10, width=width)
    program = stepped(network(nn.Conv2d(1, 4, 3), nn.Tanh(), pooling, like=x), (x, y))
    assert program.compiled == 1.0 or isinstance(pooling, nn.AdaptiveAvgPool2d)


@pytest.mark.parametrize(
    "update", [LocalStep(pull=0.5), LocalStep(0.8, 0.1, 0.5, 0.1), LocalStep(weight_decay=0.1)], ids=str
)
def test_updates_around_images(update: LocalStep) -> None:
    x, y = images(10)
    layers = [
        nn.Conv2d(1, 6, 5),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 3),
        nn.GELU(),
    ]
    assert stepped(network(*layers, like=x), (x, y), update=update).compiled == 1.0


def test_a_line_is_an_image_of_one_row() -> None:
    model = nn.Sequential(
        *(nn.Conv1d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(6, 8, 3, 2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(64, 5)),
    )
    x, y = images(9, 3, height=1, width=34)
    assert stepped(model, (x[:, :, 0], y)).compiled == 1.0


class _Pooled(nn.Module):
    """Its gradient shows where the largest values are."""

    def __init__(self, pooling: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(shape))
        self.pooling = pooling

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.pooling(x + self.shift)
        return found * torch.linspace(1.0, 2.0, found.numel()).view(found.shape)


@pytest.mark.parametrize(
    "pooling", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, 1)], ids=str
)
@pytest.mark.parametrize("values", ["ties", "no number", "nothing but minus infinity"])
def test_the_largest_value_is_torchs(pooling: nn.Module, values: str) -> None:
    generator = torch.Generator().manual_seed(9)
    x = torch.randint(0, 3, (2, 3, 12, 37), generator=generator).float()
    if values == "no number":
        x[torch.rand(x.shape, generator=generator) < 0.2] = float("nan")
    if values == "nothing but minus infinity":
        x[:, :, :7, :20] = -torch.inf
    model = _Pooled(pooling, (1, *x.shape[1:]))
    expected = model(x).sum()
    (gradient,) = torch.autograd.grad(expected, [model.shift])
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(lambda m, batch: m(batch[0]).sum()), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    steps.begin(layout.flatten(model.state_dict()), LocalStep())
    program = steps.prepare((x,), Manner(LocalStep()))
    assert isinstance(program, CompiledProgram)
    assert "max_pool" not in program.source
    loss = steps.take((x,), Manner(LocalStep()), 1.0)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(steps.weights.view(gradient.shape), -gradient, rtol=1e-6, atol=0)


class _Unpooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found, places = nn.functional.max_pool2d(x, 2, return_indices=True)
        return found + (places % 3).float()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Conv2d(4, 128, 3),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.MaxPool2d(3, dilation=2),
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(2, divisor_override=3),
        _Unpooled(),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    ],
    ids=str,
)
def test_what_is_left_to_torch(layer: nn.Module) -> None:
    if isinstance(layer, nn.modules.conv._ConvNd):
        layer.reset_parameters()  # Drawn from this test's seed, and not when the file was read.
    x, y = images(7)
    program = stepped(network(nn.Conv2d(1, 4, 3), layer, nn.ReLU(), like=x), (x, y))
    assert 0.4 < program.compiled < 1.0


def test_images_whose_channels_lie_last_are_left_to_torch() -> None:
    x, y = images(7, 3)
    last = x.contiguous(memory_format=torch.channels_last)
    assert stepped(network(nn.Conv2d(3, 4, 3), nn.ReLU(), like=x), (last, y)).compiled < 1.0


def test_dropout_between_convolutions_draws_as_torch_does() -> None:
    x, y = images(10)
    model = network(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.Conv2d(4, 4, 3), nn.Dropout(0.5), like=x)
    layout = Layout.of(model.state_dict())
    steps = Steps(Anything(classified), model, layout, torch.device("cpu"))  # type: ignore[arg-type]
    steps.begin(layout.flatten(model.state_dict()), LocalStep())
    assert isinstance(steps.prepare((x, y), Manner(LocalStep())), CompiledProgram)
    torch.manual_seed(3)
    expected = classified(model, (x, y))
    torch.manual_seed(3)
    torch.testing.assert_close(steps.take((x, y), Manner(LocalStep()), 0.1), expected.detach())


def test_memory_beside_the_values_does_not_grow_with_the_batch() -> None:
    found = []
    for count in (16, 64):
        x, y = images(count, height=28, width=28)
        layers = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5, padding=2)]
        found.append(stepped(network(*layers, like=x), (x, y))._scratch.numel())
    assert found[0] == found[1] < 1 << 18


def test_an_evaluation_of_images_is_the_kernels_alone() -> None:
    library = load()
    assert library is not None
    x, _ = images(2 * ROWS + 3)
    layers = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.AvgPool2d(2)]
    model = network(*layers, like=x).eval()
    with torch.no_grad():
        torch.testing.assert_close(RowForward(library, model, [x])([x]), model(x), rtol=1e-5, atol=1e-5)
        with pytest.raises(Unrecordable, match="torch has a part"):
            RowForward(library, network(nn.Conv2d(1, 4, 3, dilation=2), like=x), [x])

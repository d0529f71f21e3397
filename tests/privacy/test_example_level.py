"""DP-SGD at a silo: right gradients, right batches, noise once, nothing past the noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundtable.core.errors import BudgetExceeded, PrivacyError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.seeds import torch_generator
from roundtable.privacy import Budget, NoiseSource, SeededNoise, compose, solve_steps
from roundtable.privacy.example_level import (
    MODES,
    BookKeeping,
    PrivateTraining,
    SiloAccount,
    check_model,
    make_private,
)
from roundtable.privacy.example_level.checks import sums_one_by_one
from roundtable.privacy.example_level.per_example_clipping import LossFunction


class Attention(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=padding)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.norm, self.head = norm(16), nn.Linear(16, 3)
        self.dropout = 0.1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).view(*tokens.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        mixed = F.dropout(x + self.out(mixed), self.dropout, self.training)
        return self.head(mixed.mean(1))  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, stride=2),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding="same", bias=False),
        nn.Conv2d(8, 4, 1, stride=2, padding_mode="reflect"),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, stride=2, dilation=1),
        nn.GroupNorm(2, 6),
        nn.Conv1d(6, 4, 2, dilation=2),
        nn.Flatten(),
        nn.LayerNorm(12),
        nn.Linear(12, 3),
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return model


VECTORS, IMAGES, SERIES = (30, 12), (30, 2, 12, 12), (30, 2, 12)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, VECTORS),
    "frozen": (frozen, VECTORS),
    "cnn": (cnn, IMAGES),
    "sequence": (sequence, SERIES),
    "attention": (Attention, (30, 5)),
    "rms": (lambda: Attention(nn.RMSNorm, padding=0), (30, 5)),
}


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def each_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Data:
    def __init__(self, shape: tuple[int, ...], tokens: bool = False, seed: int = 1) -> None:
        generator = torch_generator(seed)
        self.x = (
            torch.randint(0, 20, shape, generator=generator)
            if tokens
            else torch.randn(shape, generator=generator)
        )
        self.y = torch.randint(0, 3, shape[:1], generator=generator)

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def config(**changes: object) -> ExampleLevel:
    fields = {"level": "example", "noise_multiplier": 1.0, "delta": 1e-5, "clip_norm": 1.0, "batch_size": 10}
    return ExampleLevel.model_validate(fields | changes)


def private(
    model: nn.Module, data: Data, mode: str = "bookkeeping", lr: float = 1.0, **changes: object
) -> PrivateTraining:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
    return make_private(model, optimizer, mean_loss, data, len(data.y), config(**changes), mode=mode)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("clip_norm", [0.05, 100.0])
def test_bookkeeping_agrees_with_one_backward_pass_for_each_example(name: str, clip_norm: float) -> None:
    make, shape = MODELS[name]
    model, data = make().double(), Data(shape, tokens=name in ("attention", "rms"))
    data.x = data.x.double() if data.x.is_floating_point() else data.x
    model.eval()
    indices = list(range(7))
    expected = sums_one_by_one(model, mean_loss, data, indices, clip_norm)
    for loss in (mean_loss, each_loss):
        found = {p: torch.zeros_like(p) for p in expected}
        book = BookKeeping(model, loss, clip_norm)
        book.accumulate(data(torch.tensor(indices)), 7, found)
        book.close()
        for parameter in expected:
            torch.testing.assert_close(found[parameter], expected[parameter], rtol=1e-10, atol=1e-10)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_every_mode_passes_the_check_and_takes_the_same_step(name: str, mode: str) -> None:
    """`make_private` itself compares each mode's sums with single examples; here are their steps too."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, data = make(), Data(shape, tokens=name == "attention")
    if isinstance(model, Attention):
        model.dropout = 0.0
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    expected = sums_one_by_one(model, mean_loss, data, range(9), 0.3)
    settings = config(clip_norm=0.3, noise_multiplier=1e-6)
    with make_private(model, optimizer, each_loss, data, 30, settings, mode=mode) as training:
        assert training.mode == mode
        training.step(torch.arange(9))
    moved = (before - flat(model)) * 10
    torch.testing.assert_close(
        moved, torch.cat([t.flatten() for t in expected.values()]), rtol=1e-3, atol=1e-5
    )


def test_what_opacus_gets_wrong_is_not_used() -> None:
    """Its embedding counts the row of padding, which has no gradient: the check sees it."""
    model, data = Attention(padding=0), Data((30, 5), tokens=True)
    with pytest.raises(PrivacyError, match="by hooks the clipped gradients"):
        private(model, data, mode="hooks")
    with private(model, data, mode="auto") as training:
        assert training.mode in ("bookkeeping", "expanded_weights")


def test_the_probe_chooses_a_mode_that_works() -> None:
    """In-place activations break Opacus's hooks; a layer without a rule breaks book-keeping."""

    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 3) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    with private(mlp(), Data(VECTORS), mode="auto") as training:
        assert training.mode in ("bookkeeping", "expanded_weights")
    with private(Bilinear(), Data(VECTORS), mode="auto") as training:
        assert training.mode in ("hooks", "functorch")
    with pytest.raises(PrivacyError, match="no way to per-example gradients"):
        private(Bilinear(), Data(VECTORS), mode="bookkeeping")
    with pytest.raises(PrivacyError, match="choose auto, first or one of"):
        private(mlp(), Data(VECTORS), mode="magic")


def test_a_module_that_shows_what_the_one_within_it_has_is_let_go_again() -> None:
    """As peft's around a module that trains whole: it shows Opacus's notes on the other one as its own."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 3)

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    model = Around()
    with private(model, Data(VECTORS), mode="hooks") as training:
        assert training.mode == "hooks"
    assert not hasattr(model, "activations")


def test_the_noise_has_the_claimed_size_and_the_divisor_is_the_expected_batch() -> None:
    model, data = nn.Linear(12, 3000), Data(VECTORS)
    data.y = torch.zeros(30, dtype=torch.long)
    for size in (0, 3, 30):
        before = flat(model)
        with private(model, data, clip_norm=0.01, noise_multiplier=4.0) as training:
            training.step(torch.arange(size))
        moved = flat(model) - before
        assert float(moved.double().std()) == pytest.approx(4.0 * 0.01 / 10, rel=0.02)


def test_an_empty_batch_is_stepped_with_pure_noise() -> None:
    model = mlp()
    before = flat(model)
    with private(model, Data(VECTORS)) as training:
        training.step(torch.empty(0, dtype=torch.long))
    assert not torch.equal(flat(model), before)


def test_batch_sizes_are_binomial_and_may_be_empty() -> None:
    data = Data((200, 12))
    with private(mlp(), data, batch_size=2) as training:
        sizes = torch.tensor([float(len(batch)) for batch in training.batches(4000)])
        assert training.sampling_rate == 0.01
    assert float(sizes.mean()) == pytest.approx(2.0, abs=0.12)
    assert float(sizes.var()) == pytest.approx(200 * 0.01 * 0.99, rel=0.12)
    assert float((sizes == 0).double().mean()) == pytest.approx(0.99**200, abs=0.025)
    counts = torch.zeros(200)
    with private(mlp(), data, batch_size=20) as training:
        for batch in training.batches(1500):
            counts[batch] += 1
    assert float((counts / 1500 - 0.1).abs().max()) < 6 * math.sqrt(0.1 * 0.9 / 1500)


def test_one_example_moves_the_sum_by_at_most_the_clip_norm() -> None:
    """An example whose gradient is not finite leaves no trace; a huge one is clipped."""
    model, data = mlp(), Data(VECTORS)
    data.x[3] *= 1e6
    data.x[5] = float("nan")

    def total(indices: list[int]) -> Tensor:
        sums = {p: torch.zeros_like(p) for p in model.parameters()}
        book = BookKeeping(model, mean_loss, 0.2)
        book.accumulate(data(torch.tensor(indices)), len(indices), sums)
        book.close()
        return torch.cat([t.flatten() for t in sums.values()])

    whole = total([0, 1, 2, 3, 5])
    assert bool(torch.isfinite(whole).all())
    assert float((whole - total([0, 1, 2, 5])).norm()) <= 0.2
    torch.testing.assert_close(whole, total([0, 1, 2, 3]))


def test_a_large_batch_is_cut_into_small_ones_with_the_same_result() -> None:
    torch.manual_seed(0)
    model, data = mlp(), Data(VECTORS)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = []
    for physical in (4, 30):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with make_private(
            model, optimizer, mean_loss, data, 30, config(noise_multiplier=1e-6), mode="bookkeeping",
            physical_batch=physical,
        ) as training:  # fmt: skip
            training.step(torch.arange(30))
        results.append(flat(model))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_term_of_the_weights_alone_is_added_after_the_noise_and_not_clipped() -> None:
    """In the loss it would be dropped by hooks, or clipped with the examples."""
    model, data = mlp(), Data(VECTORS)
    reference = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(10.0)
    before = flat(model)

    def proximal() -> None:
        for parameter, anchor in zip(model.parameters(), reference, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() - anchor, alpha=0.5)

    with private(model, data, lr=1.0, noise_multiplier=1e-6, clip_norm=1e-3) as training:
        training.step(torch.arange(5), correct=proximal)
    torch.testing.assert_close(before - flat(model), torch.full_like(before, 5.0), atol=1e-2, rtol=1e-3)


def test_the_inner_optimizer_alone_does_nothing() -> None:
    model, data = mlp(), Data(VECTORS)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with make_private(model, optimizer, mean_loss, data, 30, config(), mode="bookkeeping") as training:
        training.step(torch.arange(5))
        before = flat(model)
        optimizer.step()
        assert torch.equal(flat(model), before)


def test_noise_differs_from_run_to_run_unless_it_is_a_simulation_that_says_so() -> None:
    data = Data(VECTORS)

    def run(sources: Callable[[str], NoiseSource] | None) -> tuple[Tensor, bool]:
        torch.manual_seed(3)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        more = {"sources": sources} if sources else {}
        with make_private(
            model, optimizer, mean_loss, data, 30, config(), mode="bookkeeping", **more
        ) as training:  # type: ignore[arg-type]
            training.step(torch.arange(4))
            return flat(model), training.guarantee

    (first, sure), (second, _) = run(None), run(None)
    assert sure
    assert not torch.equal(first, second)
    (first, sure), (second, _) = (run(lambda purpose: SeededNoise(1, purpose)) for _ in range(2))
    assert not sure
    assert torch.equal(first, second)


def test_closing_gives_back_an_ordinary_model() -> None:
    model, data = cnn(), Data(IMAGES)
    for mode in ("bookkeeping", "hooks", "ghost", "hooks"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with make_private(model, optimizer, each_loss, data, 30, config(), mode=mode) as training:
            training.step(torch.arange(5))
    mean_loss(model, data(torch.arange(4))).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and not hasattr(p, "grad_sample") for p in model.parameters())


@pytest.mark.parametrize(
    ("layer", "advice"),
    [
        (nn.BatchNorm1d(12), "GroupNorm"),
        (nn.LSTM(12, 12), "DPLSTM"),
        (nn.RNN(12, 12), "DPRNN"),
        (nn.MultiheadAttention(12, 2, add_zero_attn=True), "DPMultiheadAttention"),
        (nn.EmbeddingBag(5, 12), "nn.Embedding"),
        (nn.InstanceNorm1d(12, affine=True, track_running_stats=True), "track_running_stats=False"),
    ],
)
def test_a_layer_that_cannot_be_private_comes_with_what_to_use_instead(layer: nn.Module, advice: str) -> None:
    with pytest.raises(PrivacyError, match=advice) as caught:
        check_model(nn.Sequential(nn.Linear(12, 12), layer))
    assert f"1 is {type(layer).__name__}" in str(caught.value)


def test_statistics_of_the_batch_never_leave_unnoised() -> None:
    """Frozen or not, BatchNorm's buffers follow the data."""
    norm = nn.BatchNorm1d(12)
    norm.requires_grad_(False)
    with pytest.raises(PrivacyError, match="running statistics"):
        check_model(nn.Sequential(norm, nn.Linear(12, 3)))


class Centred(nn.Module):
    """Takes off what it remembers of earlier batches: no example of a batch is mixed with another of it."""

    def __init__(self, memory: float) -> None:
        super().__init__()
        self.memory = memory
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.mul_(1 - self.memory).add_(self.memory * x.mean(0))
        return out


@pytest.mark.parametrize("memory", [0.5, 0.0])
def test_what_a_model_remembers_of_earlier_batches_is_refused(memory: float) -> None:
    """One example in it moves the gradients of all in later steps: a sum by 7 C, where the noise hides C."""
    model = nn.Sequential(Centred(memory), mlp())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loss = nn.functional.cross_entropy
    data = Data(VECTORS)
    with make_private(
        model, optimizer, lambda m, b: loss(m(b[0]), b[1]), data, 30, config(), total_steps=2, mode="first"
    ) as training:
        model.train()
        if not memory:
            training.step(torch.arange(4))
            return
        with pytest.raises(PrivacyError, match=r"training changes the buffer '0\.mean'"):
            training.step(torch.arange(4))


def test_a_hook_on_a_gradient_is_refused() -> None:
    """It would take what was clipped for another norm."""
    model = nn.Linear(12, 3)
    model.weight.register_hook(lambda gradient: 10 * gradient)
    with pytest.raises(PrivacyError, match="weight has a hook on its gradient"):
        check_model(model)


def test_losses_that_mix_examples_are_refused() -> None:
    data = Data(VECTORS)

    def centred(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out - 0.5 * out.mean(0), batch[1])

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(PrivacyError, match="no mean over the examples"):
        make_private(model, optimizer, centred, data, 30, config(), mode="auto")
    with pytest.raises(PrivacyError, match="the loss has shape"):
        make_private(model, optimizer, lambda m, b: m(b[0]), data, 30, config(), mode="bookkeeping")


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], torch.tensor([1.0, 20.0, 400.0]))


def over_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A language model's mean over the tokens of a batch that count: -100 marks padding."""
    scores = model(batch[0]).unsqueeze(1).expand(-1, batch[1].shape[1], -1)
    return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


@pytest.mark.parametrize("mode", ["auto", "first", "bookkeeping"])
@pytest.mark.parametrize("loss", [weighted, over_tokens])
def test_means_over_something_else_than_examples_are_refused_however_the_data_are_sorted(
    loss: LossFunction, mode: str
) -> None:
    """Among examples of one class, or of one length, such a loss looks like a mean: each batch is checked."""
    data = Data((300, 12))
    data.y = torch.arange(300) // 290
    if loss is over_tokens:
        data.y = torch.where(torch.arange(6) < 6 - data.y[:, None], 1, -100)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)

    def train(examples: int) -> None:
        """The last ten are of another kind, of which a probe of a few examples sees nothing."""
        with make_private(model, optimizer, loss, data, examples, config(), mode=mode) as training:
            training.step(torch.arange(250, 270))
            training.step(torch.arange(285, 299))

    with pytest.raises(PrivacyError, match=r"is no mean over the examples.*return one loss for each"):
        train(290)
    with pytest.raises(PrivacyError, match="is no mean over the examples"):
        train(300)


def test_an_example_without_a_finite_loss_does_not_hide_what_the_others_make() -> None:
    data, model = Data((60, 12)), mlp()
    data.y = torch.arange(60) // 30
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for loss, refused in ((mean_loss, False), (weighted, True)):
        data.x[0] = 0.0
        with make_private(model, optimizer, loss, data, 30, config(), mode="bookkeeping") as training:
            data.x[0] = math.nan
            training.step(torch.arange(20))
            if refused:
                with pytest.raises(PrivacyError, match="is no mean over the examples"):
                    training.step(torch.tensor([0, 1, 2, 40, 41]))
            else:
                training.step(torch.tensor([0, 1, 2, 40, 41]))


def test_one_loss_for_each_example_is_compared_one_by_one() -> None:
    def normalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses / losses.detach().sum() * len(losses)

    def own(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], torch.tensor([1.0, 20.0, 400.0]), reduction="none")

    model, data = mlp(), Data(VECTORS)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(PrivacyError, match="is no mean over the examples"):
        make_private(model, optimizer, normalised, data, 30, config(), mode="bookkeeping")
    with make_private(model, optimizer, own, data, 30, config(), mode="bookkeeping") as training:
        training.step(torch.arange(30))


def test_a_batch_without_a_dimension_of_its_own_is_refused() -> None:
    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(-1, 3)).view(len(x), 4, 3).sum(1)  # type: ignore[no-any-return]

    with pytest.raises(PrivacyError, match="first dimension is not the batch"):
        private(Flattened(), Data(VECTORS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": None}, "batch_size is missing"),
        ({"batch_size": 31}, "the data has fewer examples"),
        ({"delta": 0.05}, "not below 1 over the number"),
        ({"noise_multiplier": None, "epsilon": 1.0}, "total_steps"),
    ],
)
def test_settings_that_promise_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        private(mlp(), Data(VECTORS), **changes)


def test_the_noise_is_solved_for_the_budget_of_the_whole_job() -> None:
    data = Data(VECTORS)
    optimizer = torch.optim.SGD((model := mlp()).parameters(), 1.0)
    settings = config(noise_multiplier=None, epsilon=3.0, accountant="rdp")
    with make_private(
        model, optimizer, mean_loss, data, 30, settings, total_steps=50, mode="bookkeeping"
    ) as training:
        assert 2.9 < compose([training.charge(50)], 1e-5, "rdp") <= 3.0


def test_the_silos_account_outlives_rounds_and_restarts() -> None:
    account = SiloAccount(Budget("ward 3", 2.0, 1e-5, accountant="rdp"))
    with private(mlp(), Data(VECTORS), noise_multiplier=3.0) as training:
        charge = training.charge(5)
    once = account.charged("job", 1, 1, charge)
    assert once.charged("job", 1, 1, charge) == once
    assert once.spent().epsilon == compose([charge], 1e-5, "rdp")
    again = SiloAccount.from_json(once.to_json())
    assert again == once
    with pytest.raises(PrivacyError, match="another charge"):
        again.charged("job", 1, 1, charge.repeated(6))
    for round_ in range(2, 1 + solve_steps(charge.repeated(1), 2.0, 1e-5, "rdp") // 5):
        again = again.charged("job" if round_ % 2 else "other", round_, 1, charge)
    assert once.spent().epsilon < again.spent().epsilon <= 2.0
    with pytest.raises(BudgetExceeded, match="ward 3"):
        again.charged("third", 1, 1, charge.repeated(10))
    for text in ("", "{}", '{"version": 2}', '{"version": 1, "budget": {}, "entries": []}'):
        with pytest.raises(PrivacyError):
            SiloAccount.from_json(text)

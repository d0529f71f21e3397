"""Norms without gradients: attention, low-rank adapters and shared weights, each against single examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.seeds import torch_generator
from roundtable.privacy.example_level import (
    BookKeeping,
    UnsupportedModel,
    check_model,
    make_private,
    parameter_gradients,
)
from roundtable.privacy.example_level.checks import sums_one_by_one
from roundtable.privacy.example_level.parameter_gradients import Product
from roundtable.privacy.example_level.probe import choose

WIDTH, WORDS, EMPTY = 8, 11, 2


class Sentences:
    """Sequences of 1 to 6 words, padded with 0 to the longest of a batch; one of them is empty."""

    def __init__(self) -> None:
        generator = torch_generator(5)
        lengths = torch.tensor([3, 6, 0, 1, 6, 4, 2])
        self.tokens = torch.randint(1, WORDS, (7, 6), generator=generator)
        self.tokens[torch.arange(6) >= lengths[:, None]] = 0
        self.lengths, self.labels = lengths, torch.randint(0, 3, (7,), generator=generator)

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        longest = max(1, int(self.lengths[indices].max()))
        return self.tokens[indices, :longest], self.labels[indices]


class Reader(nn.Module):
    """Words to vectors, `middle(vectors, padding)`, the mean over the words, three scores."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(WORDS, WIDTH, padding_idx=0), middle
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.middle(self.embed(tokens), padding).masked_fill(padding.unsqueeze(2), 0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True).clamp_min(1))  # type: ignore[no-any-return]


class Own(nn.Module):
    """A layer and how it is called."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self._call = layer, call

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self._call(self.layer, x, padding)


def causal(x: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)


def attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True} | options)


def with_padding(layer: Any, x: Tensor, padding: Tensor) -> Tensor:
    return x + layer(x, x, x, key_padding_mask=padding)[0]  # type: ignore[no-any-return]


def positions_first(layer: Any, x: Tensor, padding: Tensor) -> Tensor:
    y = x.transpose(0, 1)
    mixed = layer(y, y, y, attn_mask=causal(x), is_causal=True, need_weights=False)[0]
    return x + mixed.transpose(0, 1)  # type: ignore[no-any-return]


def a_mask_for_each(layer: Any, x: Tensor, padding: Tensor) -> Tensor:
    allowed = causal(x) + torch.zeros(2 * len(x), 1, 1).masked_fill(
        padding[:, :1].repeat_interleave(2, 0)[..., None], -1.0
    )
    far = padding.to(x.dtype) * -3.0
    mixed, weights = layer(x, x, x, far, attn_mask=allowed.to(x.dtype), average_attn_weights=False)
    return mixed + weights.sum((1, 3)).unsqueeze(2)  # type: ignore[no-any-return]


def of_others(layer: Any, x: Tensor, padding: Tensor) -> Tensor:
    wide = torch.cat([x, x.square()], 2)
    return layer(x, wide, wide[..., :5].sin(), padding, need_weights=False)[0]  # type: ignore[no-any-return]


def crossed(layer: Any, x: Tensor, padding: Tensor) -> Tensor:
    memory = x.cos()
    once = layer(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]
    return once + layer(memory, x, x, padding)[0]  # type: ignore[no-any-return]


def turned(layer: Any, x: Tensor, padding: Tensor) -> Tensor:
    """Positions first, as `nn.TransformerEncoder` is by default."""
    return layer(x.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1)  # type: ignore[no-any-return]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, **options)
    nested = bool(options.get("batch_first")) and not options.get("norm_first")
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=nested)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layer(x, x.roll(1, 2), tgt_mask=causal(x), memory_key_padding_mask=padding)  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """Hu et al. 2022, equation 3."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))  # type: ignore[no-any-return]


def adapted() -> nn.Module:
    """An encoder of which only adapters of the feed-forward layers and the head learn."""
    model = Reader(Own(encoder(batch_first=True), lambda e, x, p: e(x, src_key_padding_mask=p)))
    for module in (model.embed, model.middle):
        module.requires_grad_(False)
    for layer in model.middle.layer.layers:  # type: ignore[union-attr]
        layer.linear1, layer.linear2 = Adapted(layer.linear1), Adapted(layer.linear2)
    return model


class Tied(nn.Module):
    """A language model whose table is its output head; a Linear used twice, another with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.twice, self.like = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.like.weight = self.twice.weight
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.twice(self.norm(torch.tanh(self.twice(x)))) + self.like(x.cumsum(1)))
        return self.head(x).masked_fill(tokens.unsqueeze(2) == 0, 0).sum(1)[:, :3]  # type: ignore[no-any-return]


class Encoders(nn.Module):
    """One table looked up twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens) * self.second(3 * tokens % WORDS)
        return self.head(x.masked_fill(tokens.unsqueeze(2) == 0, 0).sum(1))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "padding": lambda: Reader(Own(attention(), with_padding)),
    "positions first": lambda: Reader(Own(attention(batch_first=False, bias=False), positions_first)),
    "a mask for each": lambda: Reader(Own(attention(), a_mask_for_each)),
    "of others": lambda: Reader(Own(attention(kdim=2 * WIDTH, vdim=5), of_others)),
    "crossed twice": lambda: Reader(Own(attention(), crossed)),
    "encoder": lambda: Reader(
        Own(encoder(batch_first=True, norm_first=True), lambda e, x, p: e(x, src_key_padding_mask=p))
    ),
    "encoder, positions first": lambda: Reader(Own(encoder(), turned)),
    "decoder": lambda: Reader(Decoder()),
    "adapters": adapted,
    "tied": Tied,
    "one table": Encoders,
}


def each_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """An empty sentence has nothing to say, and no gradient."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return torch.where((batch[0] != 0).any(1), losses, 0.0)


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return each_loss(model, batch).mean()


def made(name: str) -> nn.Module:
    torch.manual_seed(4)
    model = MODELS[name]().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def sums(model: nn.Module, examples: list[int], clip_norm: float, book: BookKeeping | None = None) -> Tensor:
    own = book or BookKeeping(model, mean_loss, clip_norm)
    found = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
    own.accumulate(Sentences()(torch.tensor(examples)), len(examples), found)
    if book is None:
        own.close()
    return torch.cat([total.flatten() for total in found.values()])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_sums_are_those_of_one_backward_pass_for_each_example(name: str, training: bool) -> None:
    """Lengths differ, one sentence is empty, and in evaluation mode nothing goes round the hooks."""
    model = made(name).train(training)
    before = {place: tensor.clone() for place, tensor in model.state_dict().items()}
    for examples in (list(range(7)), [EMPTY], [1], [0, 5, 3]):
        for clip_norm in (0.02, 1e3):
            expected = sums_one_by_one(model, mean_loss, Sentences(), examples, clip_norm)
            whole = torch.cat([total.flatten() for total in expected.values()])
            assert bool(whole.any()) == (examples != [EMPTY])
            torch.testing.assert_close(
                sums(model, examples, clip_norm), whole, rtol=1e-10, atol=1e-10 * float(whole.abs().max())
            )
    assert all(torch.equal(tensor, before[place]) for place, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", list(MODELS))
def test_private_training_takes_these_models_with_empty_batches_and_gives_them_back(name: str) -> None:
    model, data = made(name), Sentences()
    plain = mean_loss(model, data(torch.arange(7)))
    settings = ExampleLevel(level="example", noise_multiplier=1.0, delta=1e-5, clip_norm=1.0, batch_size=3)
    check_model(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-9)
    with make_private(model, optimizer, each_loss, data, 7, settings, mode="bookkeeping") as training:
        for batch in ([], [EMPTY], [1, 4, 5]):
            training.step(torch.tensor(batch, dtype=torch.long))
    after = mean_loss(model, data(torch.arange(7)))
    torch.testing.assert_close(after, plain, rtol=1e-6, atol=1e-6)
    after.backward()  # type: ignore[no-untyped-call]
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("limit", ["INSTANTIATE_LIMIT", "_KEEP_LIMIT"])
@pytest.mark.parametrize("name", ["encoder", "adapters", "tied"])
def test_large_matrices_go_another_way_to_the_same_sums(
    name: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients of single examples at all, or with them for the norm alone."""
    model, examples = made(name), list(range(7))
    expected = sums(model, examples, 0.02)
    monkeypatch.setattr(parameter_gradients, limit, 0)
    monkeypatch.setattr(parameter_gradients, "_MEMORY_COST", -6)
    torch.testing.assert_close(sums(model, examples, 0.02), expected, rtol=1e-10, atol=1e-12)


def test_what_is_frozen_has_no_hook_no_norm_and_no_gradient() -> None:
    model = adapted()
    book = BookKeeping(model, mean_loss, 1.0)
    watched = {name for name, module in model.named_modules() if module._forward_hooks}
    book.close()
    assert watched == {"head"} | {
        f"middle.layer.layers.{layer}.linear{which}.{part}"
        for layer in (0, 1) for which in (1, 2) for part in ("down", "up")
    }  # fmt: skip
    attention_alone = Reader(Own(attention().requires_grad_(False), with_padding))
    book = BookKeeping(attention_alone, mean_loss, 1.0)
    assert "forward" not in vars(attention_alone.middle.layer)
    book.close()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (attention(add_bias_kv=True), "add_bias_kv or add_zero_attn"),
        (attention(add_zero_attn=True), "add_bias_kv or add_zero_attn"),
        (nn.Bilinear(4, 4, 3), "knows no rule"),
    ],
)
def test_a_layer_without_a_rule_is_refused_by_name(layer: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"0 \({type(layer).__name__}\) .*{reason}"):
        BookKeeping(nn.Sequential(layer), mean_loss, 1.0)
    if isinstance(layer, nn.MultiheadAttention):
        with pytest.raises(PrivacyError, match=f"{reason}.*DPMultiheadAttention"):
            check_model(nn.Sequential(layer))


def test_packed_weights_used_in_parts_that_overlap_are_refused() -> None:
    """Rows of queries alone, and of all three: neither norm nor cross term is that of the other."""

    def both(layer: Any, x: Tensor, padding: Tensor) -> Tensor:
        return layer(x, x, x)[0] + layer(x, x.sin(), x.cos())[0]  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedModel, match="parts that overlap"):
        sums(Reader(Own(attention(), both)).double(), [0, 1], 1.0)


def test_a_table_used_outside_its_layer_is_found_by_the_check() -> None:
    """No hook sees it: the gradient of the head is missing, which single examples show."""

    class Functional(Tied):
        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.embed(tokens).sum(1), self.embed.weight)[:, :3]

    model = Functional()
    settings = ExampleLevel(level="example", noise_multiplier=1.0, delta=1e-5, clip_norm=1.0, batch_size=3)
    with pytest.raises(PrivacyError, match="used outside the layer"):
        make_private(
            model, torch.optim.SGD(model.parameters(), 0.1), mean_loss, Sentences(), 7, settings,
            mode="bookkeeping",
        )  # fmt: skip


def test_a_batch_as_large_as_a_sequence_is_long_keeps_the_dimension_it_was_found_in() -> None:
    """Were the axis guessed anew, six sentences of six words would be clipped by position."""
    model = made("encoder, positions first").eval()
    book = BookKeeping(model, mean_loss, 0.02)
    sums(model, list(range(7)), 0.02, book)
    square = [0, 1, 3, 4, 5, 6]
    found = sums(model, square, 0.02, book)
    book.close()
    expected = sums_one_by_one(model, mean_loss, Sentences(), square, 0.02)
    torch.testing.assert_close(found, torch.cat([total.flatten() for total in expected.values()]))


class Turned(nn.Module):
    """Positions first inside: with as many examples as positions, no shape tells which is which."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).sum((0, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("positions", [8, 7])
def test_norms_are_checked_where_the_checked_examples_need_no_clipping(positions: int) -> None:
    """Eight examples of eight positions, clipped by position: the sum is right while nothing is long."""
    x = torch.randn(20, positions, 3, generator=torch_generator(3))
    model = Turned()

    def one_long_example() -> Tensor:
        book = choose(model, lambda m, b: m(b), lambda i: x[i], 20, 8, 50.0, "bookkeeping")
        sums = {p: torch.zeros_like(p) for p in model.parameters()}
        book.accumulate(x[:8] + 1e3 * (torch.arange(8) == 3)[:, None, None], 8, sums)
        book.close()
        return torch.cat([total.flatten() for total in sums.values()])

    if positions == 8:
        with pytest.raises(PrivacyError, match="differ from those of each alone"):
            one_long_example()
    else:
        others = sums_one_by_one(model, lambda m, b: m(b), lambda i: x[i], [0, 1, 2, 4, 5, 6, 7], 50.0)
        rest = torch.cat([total.flatten() for total in others.values()])
        assert float((one_long_example() - rest).norm()) <= 50.0


class Halved(nn.Module):
    """Autocast inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.first(x)).squeeze(1)  # type: ignore[no-any-return]


def test_mixed_precision_is_refused_with_what_to_do() -> None:
    book, x = BookKeeping(model := Halved(), lambda m, b: m(b), 1.0), torch.randn(4, 3)
    with pytest.raises(UnsupportedModel, match="autocast"):
        book.accumulate(x, 4, {p: torch.zeros_like(p) for p in model.parameters()})
    book.close()


def test_attention_across_the_examples_of_a_batch_is_refused() -> None:
    """`batch_first` forgotten: PyTorch then attends from one example to another, and says nothing."""
    model = Reader(Own(attention(batch_first=False), lambda layer, x, padding: layer(x, x, x)[0]))
    settings = ExampleLevel(level="example", noise_multiplier=1.0, delta=1e-5, clip_norm=1.0, batch_size=3)
    with pytest.raises(PrivacyError, match=r"not the batch|mixes the examples"):
        make_private(
            model, torch.optim.SGD(model.parameters(), 0.1), mean_loss, Sentences(), 7, settings,
            mode="bookkeeping",
        )  # fmt: skip


def test_terms_that_cancel_do_not_slip_past_the_clip() -> None:
    """Of two opposite terms of length a million a Gram matrix in float32 keeps nothing but rounding."""
    generator = torch_generator(2)
    u, v, small = (torch.randn(300, 64, generator=generator) for _ in range(3))
    u, v, small = (scale * F.normalize(x) for scale, x in ((1e3, u), (1e3, v), (1e-1, small)))
    product = Product(torch.stack([u, u + small], 1), torch.stack([v, -v], 1))
    squares = product.squared_norms()
    exact = (
        torch.bmm(product.outputs.double().transpose(1, 2), product.inputs.double()).flatten(1).norm(dim=1)
    )
    assert bool((squares.sqrt() >= exact).all())
    gram = torch.bmm(product.inputs, product.inputs.transpose(1, 2))
    gram = gram * torch.bmm(product.outputs, product.outputs.transpose(1, 2))
    assert float((gram.sum((1, 2)).double().clamp_min(1e-9).sqrt() / exact).min()) < 0.5

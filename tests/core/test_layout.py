"""The flat vector: what goes in comes out, under every dtype, and hostile descriptions are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from roundtable.core import Layout, LayoutRules, tensor_spec
from roundtable.core.errors import LayoutError
from roundtable.core.tensor_spec import DTYPES

NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ALL_TRAVEL = LayoutRules(buffers="average", integers="average")


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype and shape; integers small enough for float32 to hold them exactly."""
    dtype = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    shape = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, shape, generator=generator).to(dtype)


STATES = st.dictionaries(NAMES, tensors(), max_size=6)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Scaled(nn.Module):
    """A scalar parameter, a scalar buffer, an empty buffer, and one tensor that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


@given(STATES)
def test_every_dtype_survives_the_journey(state: dict[str, Tensor]) -> None:
    layout = Layout.of(state, ALL_TRAVEL)
    back = layout.unflatten(layout.flatten(state))
    assert list(back) == list(state)
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        expected = tensor if tensor.dtype != torch.float64 else tensor.float().double()
        assert torch.equal(back[name], expected)


@given(STATES)
def test_offsets_are_consecutive_and_add_up(state: dict[str, Tensor]) -> None:
    layout = Layout.of(state, ALL_TRAVEL)
    end = 0
    for _, place in layout.slices():
        assert place.start == end
        end = place.stop
    assert end == layout.size == sum(tensor.numel() for tensor in state.values())


@given(STATES)
def test_json_round_trip_and_fingerprint(state: dict[str, Tensor]) -> None:
    layout = Layout.of(state)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.fingerprint == layout.fingerprint


@given(STATES)
def test_out_is_filled_in_place(state: dict[str, Tensor]) -> None:
    layout = Layout.of(state, ALL_TRAVEL)
    out = torch.full((layout.size,), torch.nan)
    assert layout.flatten(state, out) is out
    assert torch.equal(out, layout.flatten(state))


def test_unflatten_gives_views_and_flatten_gives_them_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layout = Layout.of(model)
    vector = layout.flatten(model)
    state = layout.unflatten(vector)
    state["0.bias"].fill_(9.0)
    assert (vector[12:16] == 9.0).all()
    assert layout.flatten(state).data_ptr() == vector.data_ptr()


@pytest.mark.parametrize("form", ["module", "state dict"])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_vector_never_follows_a_model_that_trains_on(form: str, trainable: bool) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3), requires_grad=trainable)
    layout = Layout.of(model, LayoutRules(travel="all"))
    before = layout.flatten(model if form == "module" else model.state_dict())
    with torch.no_grad():
        model.weight.add_(1.0)
    assert before.tolist() == [0.0, 0.0, 0.0]


def test_views_of_a_piece_of_a_larger_vector_are_copied() -> None:
    layout = Layout.of({"a": torch.zeros(2), "b": torch.zeros(2)})
    larger = torch.arange(8.0)
    state = layout.unflatten(larger[2:6])
    assert layout.flatten(state).tolist() == [2.0, 3.0, 4.0, 5.0]


def test_scalars_keep_their_shape() -> None:
    model = Scaled()
    layout = Layout.of(model, ALL_TRAVEL)
    assert "scratch" not in {spec.name for spec in layout.tensors}
    state = layout.unflatten(layout.flatten(model))
    assert state["scale"].shape == state["steps"].shape == ()
    assert state["steps"].dtype == torch.int64
    assert state["nothing"].shape == (0, 4)
    other = Scaled()
    layout.load(other, torch.tensor([5.0, 8.0]))
    assert (other.scale.item(), other.steps.item()) == (5.0, 8)


def test_tied_weights_are_in_the_vector_once() -> None:
    model = Tied()
    layout = Layout.of(model)
    assert layout.size == 15
    assert layout.tensors[1].alias_of == "embed.weight"
    layout.load(model, torch.arange(15.0))
    assert model.head.weight is model.embed.weight
    assert model.head.weight[4, 2] == 14.0
    state = layout.unflatten(torch.arange(15.0))
    assert state["head.weight"] is state["embed.weight"]


def test_tied_weights_with_two_rules_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"'embed.weight' and 'head.weight' share their memory"):
        Layout.of(Tied(), LayoutRules(local=("head.*",)))
    assert Layout.of(Tied(), LayoutRules(local=("embed.*", "head.*"))).size == 0


@pytest.mark.parametrize(
    ("rules", "travels"),
    [
        (LayoutRules(), {"weight", "bias", "running_mean", "running_var"}),
        (LayoutRules(buffers="local"), {"weight", "bias"}),
        (LayoutRules(buffers="drop", integers="drop"), {"weight", "bias"}),
        (
            LayoutRules(integers="average"),
            {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"},
        ),
        (LayoutRules(local=("weight", "running_*")), {"bias"}),
        (LayoutRules(local=("bias",), drop=("bia?",)), {"weight", "running_mean", "running_var"}),
    ],
)
def test_batch_norm_rules(rules: LayoutRules, travels: set[str]) -> None:
    layout = Layout.of(nn.BatchNorm1d(3), rules)
    assert {spec.name for spec in layout.averaged} == travels


def test_the_counter_of_batch_norm_stays_and_is_not_touched_by_load() -> None:
    model = nn.BatchNorm1d(2)
    layout = Layout.of(model)
    model.num_batches_tracked.fill_(41)
    layout.load(model, torch.arange(8.0))
    assert model.num_batches_tracked.item() == 41
    assert model.running_var.tolist() == [6.0, 7.0]


def test_integers_round_and_saturate() -> None:
    state = {name: torch.zeros(3, dtype=DTYPES[name]) for name in ("uint8", "int8", "int64", "bool")}
    layout = Layout.of(state, ALL_TRAVEL)
    back = layout.unflatten(torch.tensor([-3.0, 1.6, 400.0] * 2 + [-1e30, 1.6, 1e30] + [0.49, 0.5, 3.0]))
    assert back["uint8"].tolist() == [0, 2, 255]
    assert back["int8"].tolist() == [-3, 2, 127]
    assert back["int64"].tolist() == [-(2**63), 2, 2**63 - 1024]
    assert back["bool"].tolist() == [False, True, True]


def test_the_fingerprint_never_changes_silently() -> None:
    layout = Layout.of({"w": torch.zeros(2, 3), "n": torch.tensor(1), "v": torch.zeros(1).half()})
    assert layout.to_json() == (
        '{"format":1,"tensors":[["w",[2,3],"float32","parameter","average",0,null],'
        '["n",[],"int64","parameter","local",-1,null],["v",[1],"float16","parameter","average",6,null]]}'
    )
    assert layout.fingerprint == "a254326f9677ae15d4cd996e227de248a2581cd14a6185ebbadf0381a61e3e12"


@pytest.mark.parametrize(
    "other",
    [nn.Linear(2, 4), nn.Linear(2, 3).double(), nn.Linear(2, 3, bias=False)],
    ids=["shape", "dtype", "names"],
)
def test_the_fingerprint_tells_models_apart(other: nn.Module) -> None:
    assert Layout.of(other).fingerprint != Layout.of(nn.Linear(2, 3)).fingerprint


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.zeros(2)}, r"missing \['b'\]"),
        ({"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1)}, r"unexpected \['c'\]"),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, r"'a' has shape \[3\], the layout says \[2\]"),
        ({"a": [0.0, 0.0], "b": torch.zeros(1)}, "'a' of the state dict is a list"),
    ],
)
def test_another_model_is_named_by_its_first_difference(state: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.of({"a": torch.zeros(2), "b": torch.zeros(1)}).flatten(state)


def test_what_cannot_be_carried() -> None:
    with pytest.raises(LayoutError, match="complex64, which cannot be carried"):
        Layout.of({"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(LayoutError, match="cannot be the name"):
        Layout.of({"__metadata__": torch.zeros(2)})


@pytest.mark.parametrize("vector", [torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(2, 3)])
def test_vectors_of_another_size_or_dtype(vector: Tensor) -> None:
    layout = Layout.of({"w": torch.zeros(2, 3)})
    with pytest.raises(LayoutError, match=r"float32 of shape \[6\]"):
        layout.unflatten(vector)
    with pytest.raises(LayoutError, match=r"float32 of shape \[6\]"):
        layout.flatten({"w": torch.zeros(2, 3)}, out=vector)


ROW = ["w", [2, 3], "float32", "parameter", "average", 0, None]
HOSTILE_ROWS = {
    "negative size": [[*ROW[:1], [-1], *ROW[2:]]],
    "boolean size": [[*ROW[:1], [True], *ROW[2:]]],
    "huge size": [[*ROW[:1], [1 << 60], *ROW[2:]]],
    "many dimensions": [[*ROW[:1], [1] * 65, *ROW[2:]]],
    "unknown dtype": [[*ROW[:2], "complex64", *ROW[3:]]],
    "unhashable dtype": [[*ROW[:2], [], *ROW[3:]]],
    "unknown rule": [[*ROW[:4], "steal", *ROW[5:]]],
    "gap": [[*ROW[:5], 1, None]],
    "overlap": [ROW, ["v", *ROW[1:]]],
    "twice": [ROW, [*ROW[:5], 6, None]],
    "place without travel": [[*ROW[:4], "local", 0, None]],
    "alias of nothing": [[*ROW[:5], -1, "v"]],
    "alias of another shape": [ROW, ["v", [3, 2], *ROW[2:5], -1, "w"]],
    "alias of another dtype": [ROW, ["v", [2, 3], "int64", *ROW[3:5], -1, "w"]],
    "alias of another rule": [ROW, ["v", [2, 3], "float32", "parameter", "local", -1, "w"]],
    "half a surrogate": [["\ud800", *ROW[1:]]],
    "reserved name": [["__metadata__", *ROW[1:]]],
    "name is no text": [[7, *ROW[1:]]],
    "name too long": [["w" * 513, *ROW[1:]]],
    "no elements of impossible strides": [[*ROW[:1], [0, 1 << 40, 1 << 40], *ROW[2:]]],
    "row too short": [ROW[:5]],
    "row is text": ["abcdefg"],
    "sum too large": [[f"w{n}", [1 << 47], *ROW[2:5], n << 47, None] for n in range(3)],
}


def written(rows: Any) -> str:
    return json.dumps({"format": 1, "tensors": rows}, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("rows", HOSTILE_ROWS.values(), ids=HOSTILE_ROWS.keys())
def test_hostile_rows(rows: list[Any]) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(written(rows))
    good = Layout.of({"w": torch.zeros(2, 3)})
    assert Layout.from_json(written([ROW])) == good


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"format":2,"tensors":[]}',
        '{"format":1}',
        '{"format":1,"tensors":[]} ',
        '{"format":1,"tensors":[,]}',
        '{"format":1,"tensors":[["w",[02],"float32","parameter","average",0,null]]}',
        '{"format":1,"tensors":[["\\q",[2],"float32","parameter","average",0,null]]}',
        '{"format":1,"tensors":[["w",[],"float32","parameter","average",0,null]'
        '["v",[],"float32","parameter","average",1,null]]}',
        "[" * 100_000,
        "9" * 5000,
    ],
)
def test_hostile_documents(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_a_layout_of_too_many_tensors_is_refused_before_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_spec, "MAX_TENSORS", 3)
    three = Layout.of({name: torch.zeros(()) for name in "abc"})
    assert Layout.from_json(three.to_json()) == three
    with pytest.raises(LayoutError, match="4 tensors is beyond the limit of 3"):
        Layout.from_json(three.to_json()[:-2] + ",what is this?]}")
    with pytest.raises(LayoutError, match="4 tensors is beyond the limit of 3"):
        Layout.of({name: torch.zeros(()) for name in "abcd"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
NEAR_ROWS = st.tuples(
    st.sampled_from(["w", "v"]) | JSON,
    st.lists(st.integers(-1, 3), max_size=2) | JSON,
    st.sampled_from(list(DTYPES)) | JSON,
    st.sampled_from(["parameter", "buffer"]) | JSON,
    st.sampled_from(["average", "local", "drop"]) | JSON,
    st.integers(-1, 9) | JSON,
    st.none() | st.sampled_from(["w", "v"]) | JSON,
)


@given(st.lists(NEAR_ROWS, max_size=3) | JSON)
def test_arbitrary_json_is_a_layout_or_a_layout_error(rows: Any) -> None:
    text = written(rows)
    try:
        layout = Layout.from_json(text)
    except LayoutError:
        return
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.unflatten(torch.zeros(layout.size)).keys() <= {spec.name for spec in layout.tensors}


def test_a_frozen_tensor_is_told_by_its_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    layout = Layout.of(model)
    (spec,) = layout.frozen
    assert (spec.name, layout.size) == ("0.weight", 5)
    assert Layout.from_json(layout.to_json()) == layout
    layout.check_frozen(model.state_dict())
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    assert Layout.of(model).fingerprint != layout.fingerprint
    with pytest.raises(LayoutError, match=r"'0\.weight' is frozen and has other values"):
        layout.check_frozen(model.state_dict())
    rules = [each.rule for each in Layout.of(model, LayoutRules(only=("1.*",))).tensors]
    assert rules == ["frozen", "local", "average", "average"]
    assert Layout.of(model, LayoutRules(travel="all", drop=("0.b*",))).size == 7
    for text in (f',"{spec.digest}"]', ',"frozen"'):
        assert text in layout.to_json()
        with pytest.raises(LayoutError):
            Layout.from_json(layout.to_json().replace(text, "]" if text[-1] == "]" else ',"drop"'))

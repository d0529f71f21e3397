"""Model artifacts: anyone can open ours; nothing of anyone else's is opened by mistake."""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roundtable.core import Layout, LayoutRules, Model, model_digest, open_model, save_model
from roundtable.core.errors import EncodingError
from roundtable.core.models import MAX_HEADER, MAX_NOTES
from roundtable.core.tensor_spec import DTYPES

PER_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def model_of(module: nn.Module | dict[str, Tensor], rules: LayoutRules | None = None) -> Model:
    layout = Layout.of(module, rules)
    state = module.state_dict() if isinstance(module, nn.Module) else module
    local = {spec.name: state[spec.name] for spec in layout.tensors if spec.rule == "local"}
    return Model(layout, layout.flatten(state), local, {"job": "digits", "round": "3"})


def digits() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def saved(folder: Path, model: Model) -> Path:
    path = folder / "model.safetensors"
    save_model(path, model)
    return path


def rewrite(path: Path, header: Any) -> None:
    """Replaces the header and keeps the body."""
    data = path.read_bytes()
    body = data[8 + struct.unpack("<Q", data[:8])[0] :]
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return header


def test_round_trip_gives_the_same_model_and_bytes(tmp_path: Path) -> None:
    model = model_of(digits())
    path = saved(tmp_path, model)
    back = open_model(path)
    assert back.layout == model.layout
    assert torch.equal(back.vector, model.vector)
    assert back.metadata == {"job": "digits", "round": "3"}
    assert model_digest(back) == model_digest(model)
    fresh = digits()
    fresh.load_state_dict(back.state_dict())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    module = digits()
    path = saved(tmp_path, model_of(module))
    read = load_file(path)
    assert read.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(read[name], tensor)
        assert read[name].shape == tensor.shape
    with safe_open(path, "pt") as file:
        assert file.metadata()["job"] == "digits"


@given(
    st.lists(st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 3), st.booleans()), max_size=6),
    st.integers(0, 3),
)
@PER_EXAMPLE
def test_mixed_dtypes_and_alignments(tmp_path: Path, kinds: list[tuple[str, int, bool]], odd: int) -> None:
    state = {"head": torch.arange(float(odd))}
    for number, (dtype, size, travels) in enumerate(kinds):
        prefix = "t" if travels else "stays"
        state[f"{prefix}{number}"] = torch.arange(size * 2).reshape(2, size).to(DTYPES[dtype])
    model = model_of(state, LayoutRules(integers="average", local=("stays*",)))
    path = saved(tmp_path, model)
    back, read = open_model(path).state_dict(), load_file(path)
    assert back.keys() == read.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
        assert torch.equal(read[name].to(tensor.dtype), tensor)


def test_tied_weights_are_stored_once_and_come_back_under_every_name(tmp_path: Path) -> None:
    module = nn.Module()
    module.embed = nn.Embedding(4, 2)
    module.head = nn.Linear(2, 4, bias=False)
    module.head.weight = module.embed.weight
    path = saved(tmp_path, model_of(module))
    assert set(load_file(path)) == {"embed.weight"}
    assert set(open_model(path).state_dict()) == {"embed.weight", "head.weight"}


def test_the_mapped_vector_can_be_written_without_touching_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(digits()))
    before = path.read_bytes()
    open_model(path).vector.zero_()
    assert path.read_bytes() == before


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(digits()))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(EncodingError, match=r"model\.safetensors"):
            open_model(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(EncodingError, match="too long"):
        open_model(path)


@given(st.data())
@PER_EXAMPLE
def test_a_corrupted_header_is_refused_or_means_the_same(tmp_path: Path, data: st.DataObject) -> None:
    path = saved(tmp_path, model_of(digits()))
    raw = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    place = data.draw(st.integers(0, end - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        model = open_model(path)
    except EncodingError:
        return
    # What still opens says the same places as the safetensors library reads.
    read = load_file(path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[name], tensor)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.data())
@PER_EXAMPLE
def test_hostile_headers(tmp_path: Path, data: st.DataObject) -> None:
    path = saved(tmp_path, model_of(digits()))
    header = header_of(path)
    entry = data.draw(st.sampled_from(sorted(header)))
    if data.draw(st.booleans()):
        header[entry] = data.draw(JSON)
    else:
        key = data.draw(st.sampled_from(sorted(header[entry])))
        old = header[entry][key]
        # Any text is a good note.
        header[entry][key] = data.draw(JSON.filter(lambda new: new != old and type(new) is not str))
    rewrite(path, header)
    with pytest.raises(EncodingError, match=r"model\.safetensors"):
        open_model(path)


@pytest.mark.parametrize("text", [b"[]", b"null", b"{}", b'{"__metadata__": {}}', b"[" * 100_000, b"\xff{}"])
def test_headers_that_are_no_header(tmp_path: Path, text: bytes) -> None:
    path = saved(tmp_path, model_of(digits()))
    rewrite(path, text)
    with pytest.raises(EncodingError, match=r"model\.safetensors"):
        open_model(path)


def claiming(path: Path, length: int) -> Path:
    """A file whose header is said to be so long; nothing of it is on the disk."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(8 + length)
    return path


def peak(work: Callable[[], object]) -> int:
    """The most bytes that the work held at once; the work is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(EncodingError, match=r"model\.safetensors"):
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_header_longer_than_any_models_is_not_read(tmp_path: Path) -> None:
    path = claiming(tmp_path / "model.safetensors", MAX_HEADER + 1)
    assert peak(lambda: open_model(path)) < 1 << 16


def test_a_header_longer_than_the_expected_models_is_not_read(tmp_path: Path) -> None:
    path = claiming(tmp_path / "model.safetensors", 2 << 20)
    assert peak(lambda: open_model(path, model_of(digits()).layout)) < 1 << 16
    other = model_of({f"tensor{number}": torch.zeros(1) for number in range(1000)})
    # Another model of a usual size opens: the caller says in which tensor it differs.
    assert open_model(saved(tmp_path, other), model_of(digits()).layout).layout == other.layout


@pytest.mark.parametrize("at", ["notes", "layout", "entries"])
def test_a_header_of_many_small_values_is_refused_at_the_first(tmp_path: Path, at: str) -> None:
    path, bomb = saved(tmp_path, model_of(digits())), b"[],{}," * 500_000
    text = path.read_bytes()[8:]
    text = text[: text.rindex(b"}") + 1]
    cut = {"notes": b'{"__metadata__":{', "layout": b'\\"tensors\\":[', "entries": b'"shape":['}[at]
    before, after = text.split(cut, 1)
    rewrite(path, before + cut + bomb + after)
    # The bytes and their text, the layout's description; parsed, they would be fifty times as large.
    assert peak(lambda: open_model(path)) < 4 * len(bomb)


def test_notes_that_no_header_holds(tmp_path: Path) -> None:
    path, header = saved(tmp_path, model_of(digits())), header_of(tmp_path / "model.safetensors")
    twice = path.read_bytes().replace(b'"round":"3"', b'"job":"9"  ', 1)[8:]
    rewrite(path, twice[: twice.rindex(b"}") + 1].replace(b'"9"  ', b'"9"'))
    with pytest.raises(EncodingError, match="cannot be read at 'job'"):
        open_model(path)
    header["__metadata__"] = {f"note{number}": "" for number in range(MAX_NOTES)} | header["__metadata__"]
    rewrite(path, header)
    with pytest.raises(EncodingError, match=f"behind {MAX_NOTES} notes"):
        open_model(path)
    many = replace(model_of(digits()), metadata={f"note{number}": "" for number in range(MAX_NOTES)})
    with pytest.raises(EncodingError, match=f"{MAX_NOTES} notes"):
        save_model(path, many)


def test_an_entry_that_points_elsewhere_than_the_layout(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of({"a": torch.zeros(2), "b": torch.ones(2)}))
    header = header_of(path)
    header["a"]["data_offsets"], header["b"]["data_offsets"] = [8, 16], [0, 8]
    rewrite(path, header)
    assert load_file(path)["a"].tolist() == [1.0, 1.0]
    with pytest.raises(EncodingError, match="otherwise than its layout"):
        open_model(path)


def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file({"w": torch.zeros(3)}, path)
    with pytest.raises(EncodingError, match=r"theirs\.safetensors is not a model of this framework"):
        open_model(path)
    with pytest.raises(EncodingError, match=r"absent\.safetensors cannot be read: No such file"):
        open_model(tmp_path / "absent.safetensors")


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(digits()))
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    larger = model_of({"w": torch.zeros(100_000)})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limit[1]))
        with pytest.raises(OSError, match="File too large"):
            save_model(path, larger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


SPARSE = """
import resource, sys
from pathlib import Path
from roundtable.core import open_model

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = open_model(Path(sys.argv[1]))
assert model.vector.shape == (3 << 28,)
assert model.vector[-1] == 0.0
assert model.state_dict()["last"].tolist() == [0.0, 0.0]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_three_gibibytes_open_in_little_memory(tmp_path: Path) -> None:
    elements = 3 << 28
    # Memory that is never touched: the header is all that is written, the body is a hole in the file.
    state = {"large": torch.empty(elements - 2, device="meta"), "last": torch.empty(2, device="meta")}
    layout = Layout.of(state)
    path = saved(tmp_path, model_of({"w": torch.zeros(2)}))
    header: dict[str, Any] = {"__metadata__": {"roundtable.layout": layout.to_json()}}
    for spec in layout.averaged:
        place = [4 * spec.offset, 4 * (spec.offset + spec.size)]
        header[spec.name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": place}
    rewrite(path, header)
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        file.truncate(8 + length)
        file.truncate(8 + length + 4 * elements)
    assert path.stat().st_blocks * 512 < 1 << 20
    done = subprocess.run([sys.executable, "-c", SPARSE, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 << 10, "kibibytes more than before opening"

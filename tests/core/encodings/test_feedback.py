"""Error feedback: the reference's rounds, and exactly once over rounds that are not committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from roundtable.client.trainer import write_remembering
from roundtable.core.config import parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.feedback import ESTIMATE, MEMORY, VELOCITY, Feedback, Sending, without_memory
from roundtable.core.errors import ConfigError
from roundtable.core.layout import Layout

FLAT = Layout.of({"x": torch.empty(9000)})


def test_the_reference_rounds_with_one_that_is_not_committed(reference_dir: Path, tmp_path: Path) -> None:
    cases = json.loads((reference_dir / "compression_cases.json").read_text())["cases"]
    case = next(case for case in cases if case["name"] == "ef_classic_round_3_not_committed")
    job = parse_job('task = "a:B"\n[transfer]\nup = "topk(ratio=0.25)"\nfeedback = "on"')
    encoding, kept, path = get_encoding(job.transfer.up), None, tmp_path / "update"
    rounds = zip(case["input"], case["encoding"]["committed"], case["expected"]["rounds"], strict=True)
    for number, (delta, committed, expected) in enumerate(rounds):
        key = StreamKey(0, "a", number, 0)
        memory = write_remembering(path, torch.tensor(delta), job.transfer, FLAT, key, kept).memory
        sent = torch.empty(len(delta))
        encoding.decode(path.read_bytes(), sent, key)
        if committed:
            kept = memory
            torch.testing.assert_close(sent, torch.tensor(expected["sent"]), rtol=1e-5, atol=1e-6)
        held = torch.zeros(len(delta)) if kept is None else kept[MEMORY]
        torch.testing.assert_close(held, torch.tensor(expected["memory"]), rtol=1e-5, atol=1e-6)


def test_all_that_was_trained_is_sent_in_the_end(tmp_path: Path) -> None:
    """Σ sent + e = Σ Δ: nothing is lost, and nothing is sent twice."""
    job = parse_job('task = "a:B"\n[transfer]\nup = "sign"')
    assert job.transfer.remembers
    encoding, path = get_encoding("sign"), tmp_path / "update"
    trained, sent, out = torch.zeros(9000), torch.zeros(9000), torch.empty(9000)
    kept: dict[str, torch.Tensor] = {}
    for number in range(20):
        delta = torch.randn(9000, generator=torch.Generator().manual_seed(number))
        trained += delta
        kept = write_remembering(path, delta, job.transfer, FLAT, StreamKey(0, "a", number), kept).memory
        encoding.decode(path.read_bytes(), out)
        sent += out
    torch.testing.assert_close(sent + kept[MEMORY], trained, rtol=1e-4, atol=1e-4)


def test_the_reference_rounds_of_ef21(reference_dir: Path, tmp_path: Path) -> None:
    """The silo's g is the sum of what it has sent; an attempt that does not count leaves no trace."""
    cases = json.loads((reference_dir / "compression_cases.json").read_text())["cases"]
    case = next(case for case in cases if case["name"] == "ef21")
    job = parse_job('task = "a:B"\n[transfer]\nup = "topk(ratio=0.25)"\nfeedback = "ef21"')
    encoding, kept, path = get_encoding(job.transfer.up), None, tmp_path / "update"
    for number, (delta, expected) in enumerate(zip(case["input"], case["expected"]["rounds"], strict=True)):
        for attempt in range(2):
            key = StreamKey(0, "a", number, attempt)
            written = write_remembering(path, torch.tensor(delta), job.transfer, FLAT, key, kept)
        kept, sent = written.memory, torch.empty(len(delta))
        encoding.decode(path.read_bytes(), sent, key)
        torch.testing.assert_close(sent, torch.tensor(expected["sent"]), rtol=1e-5, atol=1e-6)
        assert set(kept) == {ESTIMATE}
        torch.testing.assert_close(kept[ESTIMATE], torch.tensor(expected["estimate"]), rtol=1e-5, atol=1e-6)


def test_momentum_correction_is_that_of_deep_gradient_compression() -> None:
    """u ← m·u + Δ, v ← v + u, the largest of v are sent, and both are zero there (Lin et al. 2018)."""
    chance, m, k = torch.Generator().manual_seed(4), 0.9, 20
    u, v = torch.zeros(200), torch.zeros(200)
    kept: dict[str, torch.Tensor] = {}
    encoding = get_encoding(f"topk(ratio={k / 200})")
    for number in range(6):
        delta = torch.randn(200, generator=chance)
        u = m * u + delta
        v = v + u
        largest = v.abs().topk(k).indices
        expected = torch.zeros(200)
        expected[largest] = v[largest]
        u[largest] = v[largest] = 0.0
        sending = Sending(delta, encoding, StreamKey(0, "a", number), kept, Feedback("error", m))
        data, sent = b"".join(sending.blocks()), torch.empty(200)
        encoding.decode(data, sent)
        sending.decoded(0, sent)
        kept = sending.remembered
        torch.testing.assert_close(sent, expected)
        torch.testing.assert_close(kept[VELOCITY], u)
        torch.testing.assert_close(kept[MEMORY], v)


def test_a_memory_of_another_layout_is_dropped_aloud() -> None:
    delta = torch.ones(3)
    with pytest.warns(UserWarning, match="has 2 values, and updates have 3"):
        Sending(delta, get_encoding("sign"), StreamKey(), {MEMORY: torch.ones(2)}, Feedback("error"))
    assert delta.tolist() == [1, 1, 1]
    assert without_memory({MEMORY: torch.ones(2)}) is None


@pytest.mark.parametrize(
    ("up", "more", "said"),
    [
        ("randomk(ratio=0.1)", 'feedback = "on"', "may be longer than what it encodes"),
        ("topk(ratio=0.1, rescale=true)", 'feedback = "on"', "would be taken off twice"),
        ("lowrank", 'feedback = "ef21"', "comes nearer to what it encodes"),
        ("float32", 'feedback = "ef21"', "loses something"),
        ("float32", 'feedback = "on"', "it loses nothing that could be remembered"),
        ("int4(rounding=stochastic)", 'feedback = "ef21"', "comes nearer to what it encodes"),
        ("int4", "momentum = 0.9", "forgotten where values were sent"),
        ("topk(ratio=0.1)", 'momentum = 0.9\nfeedback = "off"', "forgotten where values were sent"),
    ],
)
def test_feedback_that_would_not_converge_is_refused(up: str, more: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_job(f'task = "a:B"\n[transfer]\nup = "{up}"\n{more}')

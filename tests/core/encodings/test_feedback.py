"""Error feedback: the reference's rounds, and exactly once over rounds that are not committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from roundtable.client.trainer import write_remembering
from roundtable.core.config import parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.feedback import MEMORY, add_memory, without_memory
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
        _, _, memory = write_remembering(path, torch.tensor(delta), job.transfer, FLAT, key, kept)
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
        _, _, kept = write_remembering(path, delta, job.transfer, FLAT, StreamKey(0, "a", number), kept)
        encoding.decode(path.read_bytes(), out)
        sent += out
    torch.testing.assert_close(sent + kept[MEMORY], trained, rtol=1e-4, atol=1e-4)


def test_a_memory_of_another_layout_is_dropped_aloud() -> None:
    delta = torch.ones(3)
    with pytest.warns(UserWarning, match="has 2 values, and updates have 3"):
        add_memory(delta, {MEMORY: torch.ones(2)})
    assert delta.tolist() == [1, 1, 1]
    assert without_memory({MEMORY: torch.ones(2)}) is None


@pytest.mark.parametrize(
    ("up", "said"),
    [
        ("randomk(ratio=0.1)", "may be longer than what it encodes"),
        ("topk(ratio=0.1, rescale=true)", "would be taken off twice"),
    ],
)
def test_feedback_on_what_lengthens_is_refused(up: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_job(f'task = "a:B"\n[transfer]\nup = "{up}"\nfeedback = "on"')

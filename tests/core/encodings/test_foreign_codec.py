"""Codecs of others: what is refused before round 1, and what of others' bytes does not pass."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from roundtable.client.policy.gradient_reduction import parse_reduction
from roundtable.core import parse_job
from roundtable.core.encodings import StreamKey, get_encoding
from roundtable.core.encodings.foreign.approval import not_approved
from roundtable.core.errors import ConfigError, EncodingError
from roundtable.engine.validation.transfer_composition import check_transfer
from roundtable.privacy import why_not_masked

EXAMPLE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
CODE = (
    "import numpy as np\nimport torch\nimport roundtable as rt\n"
    + next(block for block in re.findall(r"```python\n(.*?)```", EXAMPLE, re.DOTALL) if "Steps" in block)
    + """
class Odd(Steps):
    unit = 60

class NoTraits(rt.Codec):
    unit = 64
    def size(self, count): return count
    def encode(self, values, first, key): ...
    def decode(self, data, out): ...

class Draws(Steps):
    def encode(self, values, first, key):
        self.count = getattr(self, "count", 0) + 1
        return super().encode(values + self.count * values.abs().max() / 50, first, key)

class Linked(Steps):
    def encode(self, values, first, key):
        data = super().encode(values, first, key).copy()
        if len(values) > self.unit:
            data[68] ^= 1
        return data

class Boasts(Steps):
    def __init__(self):
        super().__init__(levels=3)
        self.traits = rt.Traits("bounded", worst=lambda d: 0.01, lengthens=lambda d: 2.0)

class Longer(Steps):
    def __init__(self):
        super().__init__()
        self.traits = rt.Traits("bounded", worst=lambda d: 1.0, lengthens=lambda d: 0.5)

class Short(Steps):
    def encode(self, values, first, key): return super().encode(values, first, key)[:-1]

class InPlace(Steps):
    def encode(self, values, first, key): return super().encode(values.mul_(2.0), first, key)

class Fails(Steps):
    def encode(self, values, first, key): return {}["a secret of the silo"]

class Huge(Steps):
    def size(self, count): return count << 20

class Careless(Steps):
    def decode(self, data, out):
        if bytes(data[-1:]) == b"k":
            raise KeyError("what another silo has sent")
        if bytes(data[-1:]) != b"l":
            super().decode(data, out)

def function(): ...
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("Nothing", "has no 'Nothing'"),
        ("function", "is not a subclass of roundtable.Codec"),
        ("Steps(step=3)", "has no parameter 'step'; it takes: levels"),
        ("Steps(levels=many)", "levels must be of type int, not 'many'"),
        ("Odd", "its unit is 60, which does not divide 8192"),
        ("NoTraits", r"\(.*mine.py, line \d+\) has no traits"),
        ("Draws", "other bytes for the same values"),
        ("Linked", "64 values at a time, its unit, are not the bytes of the whole"),
        ("Boasts", r"its traits say ‖C\(x\) − x‖ ≤ 0.01"),
        ("Longer", r"its traits say ‖C\(x\)‖ ≤ 0.5"),
        ("Short", r"encode returned uint8 \[4\], not uint8 \[5\]"),
        ("InPlace", "encode changes its argument"),
        ("Fails", r"encode raised KeyError \(mine.py, line \d+, in encode\) \("),
        ("Huge", "its size is 1048576, not from 0 to"),
    ],
)
def test_what_would_spoil_a_job_is_refused_before_it(folder: Path, stage: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_encoding(f"mine.py:{stage}", folder)


@pytest.mark.parametrize("chain", ["mine.py:Steps(levels=100)", "topk(ratio=0.1) | mine.py:Steps | zstd"])
def test_it_goes_the_way_of_the_built_in_ones_and_errs_as_it_says(folder: Path, chain: str) -> None:
    encoding = get_encoding(chain, folder)
    vector = torch.randn((1 << 20) + 777, generator=torch.Generator().manual_seed(1))
    data, out = b"".join(encoding.encode(vector, StreamKey(1))), torch.empty_like(vector)
    encoding.decode(data, out, StreamKey(1))
    assert (out - vector).norm() <= encoding.traits.worst(len(vector)) * vector.norm()


def test_bytes_of_others_are_counted_and_what_they_decode_to_is_finite(folder: Path) -> None:
    encoding, chance = get_encoding("mine.py:Careless", folder), np.random.default_rng(0)
    size, out, refused = encoding.size_bound(100), torch.empty(100), 0
    for data in (chance.bytes(size - 1), chance.bytes(size + 1)):
        with pytest.raises(EncodingError, match="bytes, got"):
            encoding.decode(data, out)
    for _ in range(300):
        data = chance.bytes(size - 1) + b"x"
        try:
            encoding.decode(data, out)
            assert bool(torch.isfinite(out).all())
        except EncodingError:
            refused += 1
    assert refused > 100
    out.fill_(7.0)  # what another silo's update has left there
    with pytest.raises(EncodingError, match="a decoded value is left out"):
        encoding.decode(bytes(size - 1) + b"l", out)
    with pytest.raises(EncodingError, match=r"decode raised KeyError \(mine.py, line \d+, in decode\)$"):
        encoding.decode(bytes(size - 1) + b"k", out)


UP = 'task = "t"\n[cohort]\nsize = 3\nminimum = 3\n[aggregation]\nweighting = "uniform"\n' + (
    '[aggregation.validation]\nnorm_ratio = "off"\n[transfer]\nup = '
)


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ('"mine.py:Unsaid"\nfeedback = "on"', r"may be longer than what it encodes \(`lengthens`\)"),
        ('"topk(ratio=0.1) | mine.py:Unsaid"', "may be longer than what it encodes"),
        ('"mine.py:Unsaid"\nfeedback = "ef21"', "it converges where each encoding comes nearer"),
        ('"mine.py:Steps"\nmomentum = 0.5\nfeedback = "on"', "needs values that are not"),
        ('"mine.py:Asks"', "its traits ask for error feedback, and of an encoding of others the job says it"),
        ('"lowrank(rank=4) | mine.py:Steps(levels=3)"', "both factors would be rounded"),
    ],
)
def test_feedback_is_asked_of_its_traits_once_it_may_run(folder: Path, transfer: str, message: str) -> None:
    (folder / "mine.py").write_text(
        CODE + "\nclass Unsaid(Steps):\n    def __init__(self):\n        super().__init__()\n"
        "        self.traits = rt.Traits('unbiased', worst=lambda d: 1.0)\n"
        "\nclass Asks(Steps):\n    def __init__(self):\n        super().__init__()\n"
        "        self.traits = rt.Traits('bounded', lambda d: 0.1, lambda d: 1.1, feedback=True)\n"
    )
    job = parse_job(UP + transfer)
    with pytest.raises(ConfigError, match=message) as refused:
        check_transfer(job, folder)
    assert refused.value.key[0] == "transfer"
    for goes in ('"mine.py:Steps"\nfeedback = "ef21"', '"mine.py:Asks"\nfeedback = "on"'):
        check_transfer(parse_job(UP + goes), folder)


def test_it_is_no_candidate_no_form_of_gradients_and_not_masked() -> None:
    masked = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1\n[transfer]\nup = '
    for up in ("mine.py:Steps", "randomk(ratio=0.5, indices=cohort) | mine.py:Steps"):
        assert "'mine.py:Steps', which is code" in why_not_masked(parse_job(f'task = "t"\n{masked}"{up}"'))
    with pytest.raises(ConfigError, match=r"choice.candidates: 'mine.py:Steps' is code of others"):
        parse_job(UP + '"auto"\n[transfer.choice]\ncandidates = ["int8", "mine.py:Steps | zstd"]')
    with pytest.raises(ValueError, match=r"'mine.py:Steps' is code of others"):
        parse_reduction("topk(ratio=0.1) | mine.py:Steps")


def test_a_job_that_was_sent_brings_no_code() -> None:
    transfer = parse_job('task = "t"\n[transfer]\nup = "topk(ratio=0.1) | mine.py:Steps"').transfer
    (reason,) = not_approved(transfer.foreign, {}, "this silo", "agent.toml")
    assert "is a file beside the job" in reason
    with pytest.raises(ConfigError, match="a job that was sent brings no code"):
        get_encoding("mine.py:Steps")

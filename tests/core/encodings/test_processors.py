"""The same bits on other processors, and with any number of threads."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from encoded_vectors import CHAINS, KEY, encoding_over, values

from roundtable.core.encodings import Encoding, compiled

SOURCE = Path(compiled.__file__).with_name("kernels.cpp")
OTHERS = {
    # An x86-64 of 2003 has neither AVX2 nor a fused multiply-add; one of 2013 has both.
    "without vectors and fused products": ("-O2",),
    "with fused products": ("-O3", "-mavx2", "-mfma"),
}


@pytest.fixture(scope="module", params=OTHERS)
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> compiled.EncodingKernels:
    """The kernels as another processor gets them."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs a C++ compiler on x86-64")
    out = tmp_path_factory.mktemp("kernels") / "other.so"
    plain = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-std=c++17", "-shared", "-fPIC")
    subprocess.run([compiler, *OTHERS[request.param], *plain, "-o", str(out), str(SOURCE)], check=True)
    return compiled.EncodingKernels(ctypes.CDLL(str(out)))


@pytest.mark.parametrize("chain", CHAINS)
def test_kernels_for_another_processor_write_and_read_the_same_bits(
    chain: str, kernels: compiled.EncodingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, vector = encoding_over(chain, 9001), values(9001, 4)
    here = both_ways(encoding, vector)
    monkeypatch.setattr(compiled, "load", lambda: kernels)
    there = both_ways(encoding, vector)
    assert there[0] == here[0]
    assert torch.equal(there[1], here[1])


@pytest.mark.parametrize("chain", CHAINS)
def test_without_a_compiler_threads_change_no_bit(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "load", lambda: None)
    # Long enough for torch to share the work out.
    encoding, vector = encoding_over(chain, 80_001), values(80_001, 5)
    with threads(1):
        data, one = both_ways(encoding, vector)
    with threads(4):
        again, four = both_ways(encoding, vector)
        if chain.startswith("lowrank"):
            # Its products are the processor's own; decoding has one order.
            encoding.decode(data, four, KEY)
        else:
            assert again == data
    assert torch.equal(four, one)


def both_ways(encoding: Encoding, vector: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    out = torch.full_like(vector, 7.0)
    data = b"".join(map(bytes, encoding.encode(vector, KEY, {})))
    encoding.decode(data, out, KEY)
    return data, out


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

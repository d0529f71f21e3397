"""What encoding and decoding hold in memory: two blocks beside what is remembered and what is sent; and one
block, whatever hostile bytes claim.

A process of its own gets as much address space as that takes, and not a quarter of a vector more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# One child for each chain, forked with everything loaded; it dies where it needs more than it is allowed.
SCRIPT = r"""
import json, os, resource, struct, sys
from pathlib import Path
import numpy as np
import torch
import zstandard
from roundtable.client.trainer import write_remembering
from roundtable.client.worker.silo_state import SiloState
from roundtable.core.encodings import BLOCK_ELEMENTS, StreamKey, get_encoding
from roundtable.core.encodings.encoding import Encoding, HeldBytes
from roundtable.core.job_tables.transfer_table import TransferTable
from roundtable.core.layout import Layout
from roundtable.server.storage.finite_check import EncodedCheck

MIB, SIZE, FOLDER, KEY = 1 << 20, 8 << 20, Path(sys.argv[1]), StreamKey(1, "a", 1, 1)
SHAPES = [(2000, 1000), (1000,), (40, 20), (60, 300), (3000, 1900), (5,)]
shapes = SHAPES + [(SIZE - sum(int(np.prod(shape)) for shape in SHAPES),)]
LAYOUT = Layout.of({f"t{number}": torch.empty(shape) for number, shape in enumerate(shapes)})
LITTLE = Layout.of({"t": torch.empty(100, 100)})
torch.set_num_threads(1)
DELTA = torch.empty(SIZE)
for part in DELTA.split(MIB // 4):
    part.normal_()
BLOCK = torch.zeros(BLOCK_ELEMENTS)

def holds(allowed, prepare, work):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        prepared = prepare()
        (line,) = (line for line in open("/proc/self/status") if line.startswith("VmSize"))
        now = 1024 * int(line.split()[1])
        resource.setrlimit(resource.RLIMIT_AS, (now + allowed, resource.RLIM_INFINITY))
        work(prepared)
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)

def update(transfer, state, kept):
    written = write_remembering(FOLDER / "update", DELTA, transfer, LAYOUT, KEY, kept)
    state.save("job", (2, 1), written.memory, (1, 1))

def copying(transfer):
    encoding = get_encoding(transfer.up)
    honest = type(encoding).encode
    type(encoding).encode = lambda self, vector, *more: honest(self, vector.clone(), *more)

def check(path, encoding):
    reader = encoding.reader(HeldBytes(np.memmap(path, np.uint8, "r").data), SIZE, KEY)
    for start in range(0, SIZE, BLOCK_ELEMENTS):
        reader.read(BLOCK[: SIZE - start])

def refuse(encoding):
    flaw = EncodedCheck(encoding, SIZE, KEY).flaw(FOLDER / "hostile")
    assert flaw, "it was taken"

def hostile():
    frame, four = struct.Struct("<II").pack, struct.Struct("<I").pack
    topk, packed = "topk(ratio=0.01)", "int8 | zstd"
    yield topk, frame(2**32 - 1, 2**32 - 1)
    yield topk, frame(50_000, 150_001)
    yield topk, frame(1, 4) + b"\xff" * 4 + bytes(4)
    yield "topk(threshold=0.5, per=layer) | int8", frame(2**18, 2**19) + bytes(2**19)
    yield packed, four(2**31)
    zeros = bytes(2**26)
    for more in ({}, {"write_content_size": False}):
        bomb = zstandard.ZstdCompressor(**more).compress(zeros)
        yield packed, four(MIB) + four(len(bomb)) + bomb
    long = zstandard.ZstdCompressionParameters(window_log=27)
    bomb = zstandard.ZstdCompressor(compression_params=long).compress(zeros[:MIB])
    yield packed, four(MIB) + four(len(bomb)) + bomb
    yield "multilevel", bytes(200)

for chain, data in hostile():
    (FOLDER / "hostile").write_bytes(data)
    encoding = get_encoding(chain).over(LAYOUT)
    print(json.dumps(holds(4 * BLOCK_ELEMENTS, lambda: None, lambda _: refuse(encoding))))

for line in sys.stdin:
    asked = json.loads(line)
    transfer, state = TransferTable.model_validate(asked["transfer"]), SiloState(FOLDER / "state")
    encoding = get_encoding(transfer.up).over(LAYOUT)
    # Loads kernels, and whatever else is loaded once.
    small = write_remembering(FOLDER / "update", DELTA[:10_000].clone(), transfer, LITTLE, KEY, None)
    names = sorted(transfer.memory.names)
    state.save("job", (1, 1), {name: DELTA for name in names}, None)
    data = FOLDER / "sent"
    data.write_bytes(b"".join(encoding.encode(DELTA, KEY, {})))
    # The update is mapped once it is written; what is remembered, before.
    mapped, sent = data.stat().st_size, 8 * asked["sent"]
    allowed = 2 * 4 * BLOCK_ELEMENTS + sent + 3 * MIB
    beside = 4 * SIZE * asked["fresh"]

    def encoded(prepare):
        def load():
            prepare(transfer)
            return state.load("job", (1, 1)) if names else None
        return holds(allowed + mapped + beside, load, lambda kept: update(transfer, state, kept))

    told = {"encoded": encoded(lambda transfer: None)}
    if asked["control"]:
        told["copied"] = encoded(copying)
    told["decoded"] = holds(allowed + mapped, lambda: None, lambda _: check(data, encoding))
    print(json.dumps(told), flush=True)
"""
D = 8 << 20
# transfer, values that are chosen and sent, vectors that are remembered beside the memory that there was
CHAINS: list[tuple[dict[str, object], int, int]] = [
    ({"up": "bfloat16"}, 0, 0),
    ({"up": "int8"}, 0, 0),
    ({"up": "int4(rounding=stochastic)"}, 0, 0),
    ({"up": "nf4"}, 0, 0),
    ({"up": "natural"}, 0, 0),
    ({"up": "minmax(bits=8)"}, 0, 0),
    ({"up": "sign"}, 0, 0),
    ({"up": "int4 | zstd"}, 0, 0),
    ({"up": "topk(ratio=0.01) | int8"}, D // 100, 0),
    ({"up": "topk(ratio=0.01, per=layer)"}, D // 100, 0),
    ({"up": "topk(ratio=0.01, rescale=true)"}, D // 100, 0),
    ({"up": "topk(ratio=0.01)", "momentum": 0.9}, D // 100, 1),
    ({"up": "topk(ratio=0.01)", "feedback": "ef21"}, D // 100, 1),
    ({"up": "randomk(ratio=0.05)"}, D // 20, 0),
    ({"up": "lowrank(rank=4)"}, 0, 0),
    ({"up": "multilevel"}, D // 20, 0),
]


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="how much a process holds is read in /proc"
)
def test_two_blocks_are_held_beside_what_is_remembered_and_sent(tmp_path: Path) -> None:
    asked = [
        {"transfer": transfer, "sent": sent, "fresh": fresh, "control": transfer["up"] in ("int8", "sign")}
        for transfer, sent, fresh in CHAINS
    ]
    # Large pieces of memory go back at once, so that none of an earlier step is there for a later one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        input="".join(json.dumps(each) + "\n" for each in asked),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    hostile, told = told[: -len(asked)], told[-len(asked) :]
    assert hostile == [True] * 9, f"a claim was believed: {done.stderr[-3000:]}"
    found = {str(each["transfer"]): answer for each, answer in zip(asked, told, strict=True)}
    expected = {
        str(each["transfer"]): {"encoded": True, "decoded": True}
        | ({"copied": False} if each["control"] else {})
        for each in asked
    }
    assert found == expected, done.stderr[-3000:]

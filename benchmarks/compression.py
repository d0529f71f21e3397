"""Encodings: how fast they are beside memcpy and beside others, and what they cost in accuracy.

    python benchmarks/compression.py speed                        # minutes; peers where they are installed
    python benchmarks/compression.py accuracy [--mnist mnist.npz] # half an hour; goes on where it stopped
    python benchmarks/compression.py draw                         # docs/figures/compression-*.png
    python benchmarks/compression.py sizes                        # bytes a round of 1.3 B parameters

Speeds are GB of float32 a second on one core, from the processor time of the call (medians; all contestants
take turns in each repeat), so that other work on the machine counts little; the share of memcpy's speed is
taken within the same run. "eager" is the same code in torch, without a compiler. Peers may be installed in
an environment of their own: compression-requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import compression_accuracy
import numpy as np
import torch
import torch.distributed as dist

from roundtable.cluster.stepping.factored_gradients import FactoredGradients
from roundtable.core import Layout
from roundtable.core.encodings import StreamKey, get_encoding

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
RUNS = ROOT / "build" / "compression-accuracy.jsonl"
KEY = StreamKey(1, "alder", 1, 1)
Work = Callable[[], object]

FLOORS = {
    "int8(block=256)": 0.5,
    "int4(block=256)": 0.5,
    "int4(block=64)": 0.5,
    "int8(block=256, rounding=stochastic)": 0.3,
    "int4(block=64, rounding=stochastic)": 0.3,
    "nf4(block=64)": 0.2,
    "topk(ratio=0.01) | int8": 0.25,
}
"""The least share of memcpy's speed that encoding is to have."""

OTHERS = (
    "float16",
    "bfloat16",
    "int2",
    "fp4(block=64)",
    "sign(block=4096)",
    "qsgd(levels=127)",
    "natural",
    "minmax(bits=8)",
    "topk(ratio=0.05) | int8",
    "randomk(ratio=0.1)",
    "lowrank(rank=4)",
)

REDUCED = "powersgd(rank=4), among ranks"

RIVALS = {
    "torch PowerSGD hook": REDUCED,
    "bitsandbytes 8 bit": "int8(block=256)",
    "bitsandbytes NF4": "nf4(block=64)",
    "bitsandbytes FP4": "fp4(block=64)",
    "torch.topk": "topk(ratio=0.01) | int8",
    "numpy.partition": "topk(ratio=0.01) | int8",
    "zstd 1 over int8": "int8(block=256)",
    "NVFLARE float16": "float16",
    "NVFLARE adaquant": "int8(block=256)",
}
"""Peers, and which of ours does most nearly the same."""


def update(elements: int, seed: int = 1) -> torch.Tensor:
    """Cubes of normal values: about as heavy-tailed as real updates (kurtosis 46)."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).pow_(3).mul_(1e-4)


def layout_of(values: torch.Tensor) -> Layout:
    """One square matrix."""
    return Layout.of({"w": values.view(math.isqrt(len(values)), -1)})


def drained(chain: str, values: torch.Tensor) -> Work:
    """Encodes and lets each block go, as a stream does."""
    encoding = get_encoding(chain).over(layout_of(values))

    def work() -> None:
        for _ in encoding.encode(values, KEY):
            pass

    return work


def decoded(chain: str, values: torch.Tensor) -> Work:
    """Decodes into memory that is there."""
    encoding, out = get_encoding(chain).over(layout_of(values)), torch.empty_like(values)
    data = b"".join(bytes(block) for block in encoding.encode(values, KEY))
    return lambda: encoding.decode(data, out, KEY)


def own(values: torch.Tensor) -> Iterator[tuple[str, Work]]:
    """memcpy, and encoding and decoding of each chain."""
    out = torch.empty_like(values)
    yield "memcpy", lambda: out.copy_(values)
    for chain in (*FLOORS, *OTHERS):
        yield chain, drained(chain, values)
        yield f"{chain}, decode", decoded(chain, values)


def peers(values: torch.Tensor) -> Iterator[tuple[str, Work]]:
    """What others offer for the same, where it is installed; what fails is said."""
    k = len(values) // 100
    yield "torch.topk", lambda: torch.topk(values.abs(), k, sorted=False)
    array = values.numpy()
    yield "numpy.partition", lambda: np.argpartition(np.abs(array), len(array) - k)[-k:]
    for offered in (_powersgd, _bitsandbytes, _zstd, _nvflare):
        try:
            yield from offered(values)
        except Exception as error:  # noqa: BLE001 (what a peer fails with here is a finding)
            print(f"{offered.__name__[1:]}: left out: {type(error).__name__}: {error}", file=sys.stderr)


def _powersgd(values: torch.Tensor) -> Iterator[tuple[str, Work]]:
    """A step's reduction of one matrix on one rank, by what the ranks of a silo's cluster use, and by torch's
    hook for DDP: factors, sums, product and what error feedback keeps."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gradient = values.clone().view(math.isqrt(len(values)), -1)
    parameter = torch.nn.Parameter(torch.empty_like(gradient))
    ours = FactoredGradients({parameter: "w"}, dist.group.WORLD, 4)
    state = hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    state.iter = 2
    bucket: Any = _Bucket(parameter, gradient)

    def fresh() -> None:
        gradient.view(-1).copy_(values)

    def reduce() -> None:
        fresh()
        ours.reduce([(parameter, gradient)])

    def reduce_by_torch() -> None:
        fresh()
        hook.powerSGD_hook(state, bucket).wait()

    yield REDUCED, reduce
    yield "torch PowerSGD hook", reduce_by_torch


class _Bucket:
    """What DDP gives a hook: a bucket with one gradient."""

    def __init__(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self._held = parameter, gradient

    def buffer(self) -> torch.Tensor:
        return self._held[1].view(-1)

    def gradients(self) -> list[torch.Tensor]:
        return [self._held[1]]

    def parameters(self) -> list[torch.Tensor]:
        return [self._held[0]]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _bitsandbytes(values: torch.Tensor) -> Iterator[tuple[str, Work]]:
    from bitsandbytes import functional

    yield "bitsandbytes 8 bit", lambda: functional.quantize_blockwise(values, blocksize=256)
    codes, state = functional.quantize_blockwise(values, blocksize=256)
    yield "bitsandbytes 8 bit, decode", lambda: functional.dequantize_blockwise(codes, state)
    for kind in ("nf4", "fp4"):

        def quantise(kind: str = kind) -> Any:
            return functional.quantize_4bit(values, blocksize=64, quant_type=kind)

        held = quantise()
        yield f"bitsandbytes {kind.upper()}", quantise
        yield f"bitsandbytes {kind.upper()}, decode", lambda held=held: functional.dequantize_4bit(*held)


def _zstd(values: torch.Tensor) -> Iterator[tuple[str, Work]]:
    import zstandard

    data = b"".join(bytes(block) for block in get_encoding("int8(block=256)").encode(values))
    yield "zstd 1 over int8", lambda: zstandard.ZstdCompressor(level=1).compress(data)


def _nvflare(values: torch.Tensor) -> Iterator[tuple[str, Work]]:
    from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer

    context: Any = None
    for kind in ("float16", "adaquant", "blockwise8", "normfloat4"):
        quantizer = ModelQuantizer(quantization_type=kind)

        def quantise(quantizer: Any = quantizer) -> object:
            return quantizer.quantization({"w": values.numpy()}, context)

        try:
            quantise()
        except Exception as error:  # noqa: BLE001 (what a peer fails with here is a finding)
            print(f"NVFLARE {kind}: fails here: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        yield f"NVFLARE {kind}", quantise


def measured(works: Sequence[tuple[str, Work]], elements: int, repeats: int) -> dict[str, dict[str, float]]:
    """GB a second by processor time and by the clock; medians of `repeats`, in turns."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in works}
    for turn in range(repeats + 1):
        for name, work in works:
            slow = sum(cpu for cpu, _ in spent[name]) > SLOW
            if slow and len(spent[name]) > 2:
                continue
            cpu, clock = time.process_time(), time.perf_counter()
            work()
            both = time.process_time() - cpu, time.perf_counter() - clock
            if turn or both[0] > SLOW:
                spent[name].append(both)
            print(f"\r[{turn}/{repeats}] {name:50}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    size = 4 * elements / 1e9
    return {
        name: {
            "GB/s": size / statistics.median(cpu for cpu, _ in times),
            "GB/s by the clock": size / statistics.median(clock for _, clock in times),
        }
        for name, times in spent.items()
    }


SLOW = 3.0
"""Seconds of processor time after which a contestant is not repeated as often as others."""


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Ours with kernels, and without in a process of its own; peers."""
    torch.set_num_threads(1)
    elements = math.isqrt(options.elements) ** 2
    values = update(elements)

    def asked(works: Iterator[tuple[str, Work]]) -> list[tuple[str, Work]]:
        only = ("memcpy", *options.only) if options.only else ("",)
        return [(name, work) for name, work in works if any(word in name for word in only)]

    beside = [] if options.own or (options.eager and not options.only) else asked(peers(values))
    found = measured([*asked(own(values)), *beside], elements, options.repeats)
    if options.eager:
        return found
    command = [
        sys.executable,
        __file__,
        "speed",
        "--eager",
        "--json",
        "--repeats",
        str(min(3, options.repeats)),
    ]
    child = subprocess.run(
        [*command, "--elements", str(elements), *(["--only", *options.only] if options.only else [])],
        env={**os.environ, "ROUNDTABLE_KERNELS": "off"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return {"compiled": found, "eager": json.loads(child.stdout)}


def speed_table(found: dict[str, Any]) -> str:
    """As Markdown."""
    compiled, eager = found["compiled"], found["eager"]
    copy = compiled["memcpy"]["GB/s"]
    eager_copy = eager["memcpy"]["GB/s"]
    lines = [
        f"memcpy {copy:.1f} GB/s",
        "",
        "| encoding | encode | of memcpy | floor | decode | eager: encode, decode | peers |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for chain in (*FLOORS, *OTHERS):
        mine, back = compiled[chain]["GB/s"], compiled[f"{chain}, decode"]["GB/s"]
        floor = FLOORS.get(chain)
        said = "" if floor is None else f"{floor:g}{'' if mine >= floor * copy else ': missed'}"
        slow, slow_back = (eager[name]["GB/s"] * copy / eager_copy for name in (chain, f"{chain}, decode"))
        rivals = [
            _rival(compiled, name) for name, ours in RIVALS.items() if ours == chain and name in compiled
        ]
        lines.append(
            f"| `{chain.replace('|', '&#124;')}` | {mine:.1f} | {mine / copy:.2f} | {said} | {back:.1f} "
            f"| {slow:.2f}, {slow_back:.2f} | {'; '.join(rivals)} |"
        )
    if REDUCED in compiled:
        mine = compiled[REDUCED]["GB/s"]
        rival = _rival(compiled, "torch PowerSGD hook")
        lines.append(f"| `{REDUCED}` | {mine:.1f} | {mine / copy:.2f} | | | | {rival} |")
    return "\n".join(lines)


def speed_list(found: dict[str, Any]) -> str:
    """What was asked for with --only, a line each."""
    return "\n".join(
        f"{kind}: {name}: {figures['GB/s']:.2f} GB/s"
        for kind, contestants in found.items()
        for name, figures in contestants.items()
    )


def _rival(compiled: dict[str, dict[str, float]], name: str) -> str:
    back = compiled.get(f"{name}, decode")
    return f"{name} {compiled[name]['GB/s']:.2f}" + (f", decode {back['GB/s']:.2f}" if back else "")


def sizes(elements: Sequence[int]) -> list[dict[str, float]]:
    """Bytes of a silo and round, up and down, for models of so many values, whose updates lie in a file."""
    ways = {"up": get_encoding("topk(ratio=0.05) | int8"), "down": get_encoding("int4(block=256)")}
    rows = []
    for count in elements:
        with tempfile.NamedTemporaryFile(prefix="roundtable-sizes-") as file:
            values = torch.from_file(file.name, shared=True, size=count)
            for number, piece in enumerate(torch.split(values, 1 << 22)):
                piece.copy_(update(len(piece), number))
            row: dict[str, float] = {"elements": count}
            for way, encoding in ways.items():
                began, row[way] = time.perf_counter(), 0
                for block in encoding.encode(values, KEY):
                    row[way] += len(block)
                row[f"{way}_s"] = time.perf_counter() - began
        rows.append(row)
    return rows


def sizes_table(found: Sequence[dict[str, float]]) -> str:
    """As lines of text."""
    return "\n".join(
        f"{row['elements'] / 1e6:g} M parameters: {row['up'] / 1e6:.2f} MB up ({row['up_s']:.1f} s), "
        f"{row['down'] / 1e6:.2f} MB down ({row['down_s']:.1f} s), {(row['up'] + row['down']) / 1e6:.1f} MB"
        for row in found
    )


def accuracy_table(table: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| task | encoding | × smaller | accuracy | lost |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(table, key=lambda row: (row["course"], row["smaller"])):
        lines.append(
            f"| {row['course']} | {row['contestant'].replace('|', '&#124;')} | {row['smaller']:.1f} "
            f"| {row['points']:.2f} | {row['lost']:+.2f} ± {row['error']:.2f} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "accuracy", "draw", "sizes"))
    parser.add_argument("--elements", type=int, default=25_000_000, help="speed: values of the vector")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[5_000_000, 40_000_000, 1_300_000_000],
        help="sizes: parameters of the models; each takes four bytes on the disk",
    )
    parser.add_argument("--repeats", type=int, default=7, help="speed: how often each is measured")
    parser.add_argument("--own", action="store_true", help="speed: leave peers out")
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=5, help="accuracy: seeds 1, 2, ...")
    parser.add_argument(
        "--mnist", type=Path, help="accuracy: MNIST as an .npz file; without it that task is left out"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="accuracy: these tasks; speed: contestants with these words"
    )
    parser.add_argument(
        "--runs", type=Path, default=RUNS, help="accuracy: finished runs, which are not made again"
    )
    parser.add_argument("--masked", action="store_true", help="accuracy: under secure aggregation")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="draw: the folder of the pictures")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.what == "speed":
        found = speed(options)
        shown = speed_list if options.only else speed_table
        print(json.dumps(found) if options.json else shown(found))
        return
    if options.what == "sizes":
        counted = sizes(options.sizes)
        print(json.dumps(counted) if options.json else sizes_table(counted))
        return
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    if options.what == "draw":
        rows = list(compression_accuracy.read(options.runs).values())
        if not rows:
            sys.exit(f"no finished runs in {options.runs}: run `accuracy` first, or name them with --runs")
        for file in compression_accuracy.draw(rows, options.figures):
            print(file)
        return
    rows = compression_accuracy.measure(
        options.runs, options.seeds, options.mnist, options.only, options.masked
    )
    table = compression_accuracy.costs(rows)
    if options.json:
        print(json.dumps(table))
        return
    print(accuracy_table(table), *compression_accuracy.verdicts(table), sep="\n")


if __name__ == "__main__":
    main()

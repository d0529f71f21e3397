"""Aggregation rules side by side with ByzFL and Flower, in one process, on the same data and threads.

    python benchmarks/aggregation.py                             20 updates of 1 million parameters
    python benchmarks/aggregation.py --columns 25000000
    python benchmarks/aggregation.py --clients 100 --skip-slow   peers that would take minutes are left out
    python benchmarks/aggregation.py --out-of-core DIR           100 files of 25 million parameters, 10 GB

Peers are compared where they are installed (aggregation-requirements.txt, in an environment of their own).
Printed are medians of the repeats, the ratio to the fastest peer, and the memory that a call takes beyond its
input. `plain` is this package without its compiled kernels. Times depend on the machine; read the ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from roundtable.aggregation import (
    AggregationConfig,
    ClientRow,
    FileMatrix,
    StreamingMean,
    TensorMatrix,
    aggregate,
)
from roundtable.aggregation.rows import kernels

Work = Callable[[], object]
Step = Callable[[torch.Tensor], torch.Tensor]
PATIENCE = 5.0
"""Seconds after which a work is not repeated any more."""


def timed(work: Work, repeats: int) -> tuple[float, float]:
    """Median seconds of a call, after one that is not counted, and the MB that it takes at its peak."""
    start = time.perf_counter()
    memory = peak_memory(work)
    first = time.perf_counter() - start
    times: list[float] = []
    while first + sum(times) < PATIENCE and len(times) < repeats:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times or [first]), memory


def peak_memory(work: Work) -> float:
    """MB of resident memory at the peak of a call beyond what was there before; Linux only, else 0."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        work()
        return 0.0

    def field(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    reset.write_text("5")
    before = field("VmRSS")
    work()
    return max(field("VmHWM") - before, 0) / 1024


def triad_bandwidth(columns: int = 20_000_000) -> float:
    """GB/s of a ← b + s·c on the threads that torch has: two vectors read, one written."""
    b, c, a = torch.ones(columns), torch.ones(columns), torch.zeros(columns)
    seconds = min(timed(lambda: torch.add(b, c, alpha=3.0, out=a), 7)[0] for _ in range(2))
    return 3 * 4 * columns / seconds / 1e9


def ours(updates: torch.Tensor, rule: str, parameters: dict[str, object], *pre: str) -> Work:
    """A rule of this package, validation of every update included."""
    config = AggregationConfig(rule, parameters, tuple((step, {"f": len(updates) // 5}) for step in pre))
    clients = [ClientRow(f"silo-{index:03}") for index in range(len(updates))]
    return lambda: aggregate(TensorMatrix(updates), clients, config).vector


def byzfl_works(updates: torch.Tensor, f: int, memory: float) -> dict[str, Work]:
    """ByzFL's rules on the same tensor, by our name; without those that need more than `memory` GB."""
    if importlib.util.find_spec("byzfl") is None:
        return {}
    without_harness()
    import byzfl

    def mixed(
        rule: Callable[[torch.Tensor], torch.Tensor], *steps: Callable[[torch.Tensor], torch.Tensor]
    ) -> Work:
        def work() -> torch.Tensor:
            values = updates
            for step in steps:
                values = step(values)
            return rule(values)

        return work

    nnm, arc = byzfl.NNM(f), byzfl.ARC(f)
    works = {
        "mean": mixed(byzfl.Average()),
        "median": mixed(byzfl.Median()),
        "trimmed_mean": mixed(byzfl.TrMean(f)),
        "mean_around_median": mixed(byzfl.Meamed(f)),
        "krum": mixed(byzfl.Krum(f)),
        "multi_krum": mixed(byzfl.MultiKrum(f)),
        "geometric_median": mixed(byzfl.GeometricMedian()),
        "centred_clipping 1": mixed(byzfl.CenteredClipping(L=1, tau=100.0)),
        "centred_clipping 5": mixed(byzfl.CenteredClipping(L=5, tau=100.0)),
        "monna": mixed(byzfl.MoNNA(f)),
        "caf": mixed(byzfl.CAF(f)),
    }
    # It copies all updates once for each of them.
    if len(updates) * updates.nbytes > memory * 1e9:
        return works
    works["nnm + trimmed_mean"] = mixed(byzfl.TrMean(f), nnm)
    works["nnm + geometric_median"] = mixed(byzfl.GeometricMedian(), nnm)
    # ARC writes to its input, so it is given a copy, as every user would have to.
    works["arc + nnm + trimmed_mean"] = mixed(byzfl.TrMean(f), torch.clone, arc, nnm)
    return works


def without_harness() -> None:
    """ByzFL's package imports its training harness, and that torchvision; its rules need neither."""
    sys.modules.setdefault("byzfl.benchmark", types.ModuleType("byzfl.benchmark"))


def flower_works(updates: torch.Tensor, f: int) -> dict[str, Work]:
    """Flower's aggregation functions on views of the same tensor, by our name."""
    if importlib.util.find_spec("flwr") is None:
        return {}
    from flwr.server.strategy import aggregate as flower

    results = [([row], 1) for row in updates.numpy()]
    return {
        "mean": lambda: flower.aggregate(results),
        "median": lambda: flower.aggregate_median(results),
        "trimmed_mean": lambda: flower.aggregate_trimmed_avg(results, f / len(results)),
        "krum": lambda: flower.aggregate_krum(results, f, 0),
        "multi_krum": lambda: flower.aggregate_krum(results, f, len(results) - f),
    }


def our_works(updates: torch.Tensor, f: int) -> dict[str, Work]:
    """This package's rules, by name."""

    def streaming() -> torch.Tensor:
        mean = StreamingMean(updates.shape[1])
        for row in updates:
            mean.add(row)
        return mean.result()

    return {
        "mean, one by one": streaming,
        "mean": ours(updates, "mean", {}),
        "median": ours(updates, "median", {}),
        "trimmed_mean": ours(updates, "trimmed_mean", {"f": f}),
        "mean_around_median": ours(updates, "mean_around_median", {"f": f}),
        "krum": ours(updates, "krum", {"f": f}),
        "multi_krum": ours(updates, "multi_krum", {"f": f}),
        "bulyan": ours(updates, "bulyan", {"f": (len(updates) - 3) // 4}),
        "geometric_median": ours(updates, "geometric_median", {}),
        "minimum_diameter_averaging": ours(updates, "minimum_diameter_averaging", {"f": f}),
        "centred_clipping 1": ours(updates, "centred_clipping", {"tau": 100.0}),
        "centred_clipping 5": ours(updates, "centred_clipping", {"tau": 100.0, "iterations": 5}),
        "monna": ours(updates, "monna", {"f": f, "pivot": "silo-000"}),
        "caf": ours(updates, "caf", {"f": f}),
        "dnc": ours(updates, "dnc", {"f": f}),
        "nnm + trimmed_mean": ours(updates, "trimmed_mean", {"f": f}, "nnm"),
        "nnm + geometric_median": ours(updates, "geometric_median", {}, "nnm"),
        "arc + nnm + trimmed_mean": ours(updates, "trimmed_mean", {"f": f}, "arc", "nnm"),
    }


def without_kernels(work: Work, repeats: int) -> float:
    """Median seconds with the compiled kernels switched off."""
    limit = kernels.WORTH_COMPILING
    kernels.WORTH_COMPILING = 1 << 62
    try:
        return timed(work, repeats)[0]
    finally:
        kernels.WORTH_COMPILING = limit


def compare(
    clients: int, columns: int, repeats: int, only: list[str], skip_slow: bool, memory: float
) -> None:
    """Prints one line a rule: seconds of each library, ratio to the fastest peer, memory."""
    f = clients // 5
    updates = torch.randn(clients, columns, generator=torch.Generator().manual_seed(0))
    bandwidth = triad_bandwidth()
    print(
        f"n = {clients}, d = {columns}, f = {f}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"triad bandwidth {bandwidth:.1f} GB/s; input {updates.nbytes / 1e6:.0f} MB")
    print(f"{'rule':28}{'ours':>9}{'plain':>9}{'ByzFL':>9}{'Flower':>9}{'ratio':>8}{'MB':>7}{'ByzFL':>7}")
    peers: dict[str, dict[str, Work]] = {}
    if not skip_slow:
        peers = {"ByzFL": byzfl_works(updates, f, memory), "Flower": flower_works(updates, f)}
    for name, work in our_works(updates, f).items():
        if only and name not in only:
            continue
        seconds, taken = timed(work, repeats)
        plain = without_kernels(work, 1)
        theirs = {peer: timed(works[name], repeats) for peer, works in peers.items() if name in works}
        best = min((value for value, _ in theirs.values()), default=float("nan"))
        print(
            f"{name:28}{seconds:9.4f}{plain:9.4f}{cell(theirs, 'ByzFL', 0, '9.3f')}"
            f"{cell(theirs, 'Flower', 0, '9.3f')}{best / seconds:8.1f}{taken:7.0f}"
            f"{cell(theirs, 'ByzFL', 1, '7.0f')}",
            flush=True,
        )
        if name == "mean, one by one":
            moved = 3 * 4 * columns * clients / seconds / 1e9
            print(f"{'':28}{moved:.1f} GB/s moved, {moved / bandwidth:.2f} of the triad bandwidth")


def cell(found: dict[str, tuple[float, float]], peer: str, place: int, style: str) -> str:
    """A figure of a peer, or a dash of the same width."""
    width = int(style.split(".")[0])
    return format(found[peer][place], style) if peer in found else "–".rjust(width)


def out_of_core(folder: Path, clients: int, columns: int, warm: bool) -> None:
    """Rules over files that together exceed what they may use of memory; peak of the whole process.

    Before each rule the files are read once by themselves, in the same state: not cached, or as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:03}.f32" for index in range(clients)]
    for index, path in enumerate(paths):
        if not path.exists() or path.stat().st_size != 4 * columns:
            np.random.default_rng(index).standard_normal(columns, dtype=np.float32).tofile(path)
    names = [ClientRow(f"silo-{index:03}", norm=columns**0.5) for index in range(clients)]
    size, f = 4 * columns * clients / 1e9, clients // 5
    print(
        f"{clients} files of {columns} parameters, {size:.1f} GB, {'cached' if warm else 'not cached'}, "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} processors"
    )
    digests = [blake3().update_mmap(path).hexdigest() for path in paths]
    print(
        f"{'rule':20}{'reading, s':>12}{'rule, s':>9}{'hashed, s':>11}{'passes':>8}{'GB/s':>7}"
        f"{'of reading':>12}{'MB':>6}"
    )
    for rule, parameters, read in (
        ("mean", {}, 1.0),
        ("median", {}, 1.0),
        ("trimmed_mean", {"f": f}, 1.0),
        ("multi_krum", {"f": f}, 2 - f / clients),
        ("geometric_median", {}, 2.0),
    ):
        if not warm:
            forget(paths)
        seconds = read_all(paths)
        config, times = AggregationConfig(rule, parameters), []
        for known in ((), digests):
            if not warm:
                forget(paths)
            start = time.perf_counter()
            aggregate(FileMatrix(paths, columns, digests=known), names, config)
            times.append(time.perf_counter() - start)
        taken, hashed = times
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        speed = read * size / taken
        print(
            f"{rule:20}{seconds:12.1f}{taken:9.1f}{hashed:11.1f}{read:8.1f}{speed:7.2f}"
            f"{speed * seconds / size:12.2f}{peak:6.0f}",
            flush=True,
        )


def read_all(paths: list[Path]) -> float:
    """Seconds to read all files once into one small buffer."""
    buffer = bytearray(1 << 22)
    start = time.perf_counter()
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def forget(paths: list[Path]) -> None:
    """Asks the system to drop what it has cached of the files."""
    for path in paths:
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int)
    parser.add_argument("--columns", type=int)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "1")))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", action="append", default=[], help="a rule of the table; may be repeated")
    parser.add_argument("--peer-memory", type=float, default=8.0, help="GB; what needs more is not run")
    parser.add_argument("--skip-slow", action="store_true", help="do not run the peers")
    parser.add_argument("--out-of-core", type=Path, metavar="DIR", help="write files here and aggregate them")
    parser.add_argument("--warm", action="store_true", help="leave the files in the system's cache")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.out_of_core:
        out_of_core(options.out_of_core, options.clients or 100, options.columns or 25_000_000, options.warm)
        return
    compare(
        options.clients or 20,
        options.columns or 1_000_000,
        options.repeats,
        options.only,
        options.skip_slow,
        options.peer_memory,
    )


if __name__ == "__main__":
    main()

"""The phases of `make gpu`, each in a process: `python tools/gpu/phases.py NAME RESULT [--rehearse]`."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from typing_extensions import override

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Findings:
    """What a phase found, and the file that keeps it; `rehearse`: on the CPU, tiny."""

    rehearse: bool
    kept: Path | None = None
    figures: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The card, or the CPU in a rehearsal."""
        return torch.device("cpu" if self.rehearse else "cuda:0")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What breaks here has failed, and the phase goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - each failure is a finding
            self.failed.append(f"{what}: {type(error).__name__}: {str(error).strip()[:300]}")
        self.keep()

    def keep(self) -> None:
        """Writes the findings, so that a phase which is stopped has not been for nothing."""
        if self.kept is not None:
            values = {"figures": self.figures, "failed": self.failed, "skipped": self.skipped}
            partial = self.kept.with_suffix(".part")
            partial.write_text(json.dumps(values))
            partial.replace(self.kept)

    def expect(self, what: str, figure: str, *, holds: bool) -> None:
        """A figure that must be so."""
        self.figures[what] = figure
        if not holds:
            self.failed.append(f"{what}: {figure}")

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if not self.rehearse:
            torch.cuda.synchronize()


@contextmanager
def alone(found: Findings) -> Iterator[None]:
    """A process group of this process only, on the backend that training would take."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "gloo" if found.rehearse else "nccl"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def tests(found: Findings) -> None:
    """pytest -m gpu in the files that have such tests; in a rehearsal they are only collected."""
    files = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    marked = [path for path, text in files.items() if "mark.gpu" in text]
    kit = [path.stem for path in marked if path.parent.name == "kit"]
    wanted = [
        str(path)
        for path, text in files.items()
        if path.name.startswith("test_") and (path in marked or any(name in text for name in kit))
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *wanted]
    command += ["--collect-only"] if found.rehearse else ["--durations=5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    found.expect("pytest -m gpu", lines[-1].strip("= "), holds=done.returncode == 0)
    found.failed += [line for line in lines if line.startswith("FAILED")]


def ranks(found: Findings) -> None:
    """Every strategy that so many ranks allow against one process."""
    from roundtable.cluster.tools.local_ranks import run_ranks
    from roundtable.cluster.tools.verify import TOLERANCE

    there = 2 if found.rehearse else torch.cuda.device_count()
    for world in (1, 2):
        if world > there:
            found.skipped.append(f"{world} ranks: there is {there} device, and NCCL refuses two ranks on one")
            continue
        with found.trying(f"{world} ranks"):
            result = run_ranks(world, "roundtable.cluster.tools.verify", found.device.type)
            for check in result["checks"]:
                off = check["difference"]
                name = f"{world} on {result['backend']}: {check['strategy']}"
                found.expect(name, f"{off:.1e} from one process", holds=off < TOLERANCE)


FAULT = """
        real = model.training and type(batch[0]) is torch.Tensor and batch[0].device.type == DEVICE
        self.calls += int(real)
        mark = pathlib.Path(self.options.get("mark", "/nowhere/mark"))
        if real and self.calls == 6 and self.options.get("fault") and not mark.exists():
            mark.touch()
            if self.options["fault"] == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
            if self.options["fault"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return F.cross_entropy(model(batch[0]), batch[1] + 999)
        """


def faults(found: Findings) -> None:
    """Faults that really happen, under the agent, and what it makes of them."""
    for fault in ("memory", "kill", "assert"):
        with found.trying(fault), tempfile.TemporaryDirectory() as folder:
            asyncio.run(_fault(found, fault, Path(folder)))
    with alone(found):
        _spread(found)


async def _fault(found: Findings, fault: str, folder: Path) -> None:
    from cluster_silo import TASK, Silo, watched

    from roundtable.client.failures import WorkFailed
    from roundtable.cluster.train.orders import Advice

    loss = "return F.cross_entropy(model(batch[0]), batch[1])\n    def metrics"
    code = TASK.replace(loss, FAULT + loss).replace("DEVICE", repr(found.device.type))
    backend = "gloo" if found.rehearse else "nccl"
    table = {"devices": 1, "backend": backend, "timeout": 60.0, "precision": "float32"}
    silo = Silo(folder, code=code, table=table, fault=fault)
    told: list[str] = []
    async with silo.trainer() as trainer:
        work = replace(silo.work(), trouble=lambda kind, detail, done: told.append(kind))
        if fault == "assert":
            try:
                await trainer.train(work, watched([]))
            except WorkFailed as error:
                kept = Advice.read(silo.config.state / "cluster").lost == ()
                found.expect(
                    "assert", f"{error.kind}, devices kept: {kept}", holds=error.kind == "task_error" and kept
                )
            else:
                found.failed.append("assert: training went on")
            return
        await trainer.train(work, watched([]))
    off = float((silo.update() - silo.alone()).abs().max())
    kind = {"memory": "out_of_memory", "kill": "node_failure"}[fault]
    figure = f"{', '.join(told)}; the update is {off:.1e} from an undisturbed one"
    found.expect(fault, figure, holds=told == [kind] and off < 1e-4)


def _spread(found: Findings) -> None:
    """Offload and tied weights, against one process."""
    from roundtable.cluster.parallel.strategy import Mesh, Strategy
    from roundtable.cluster.tools.verify import TOLERANCE, Probe, difference

    class Tied(Probe):
        @override
        def model(self) -> nn.Module:
            whole = super().model()
            whole[-1].weight = whole[0].weight
            return whole

    cases: list[tuple[str, type[Probe], Strategy]] = [
        ("tied weights, zero3", Tied, Strategy(Mesh(), "zero3", 2)),
        ("tied weights, zero2 with checkpointing", Tied, Strategy(Mesh(), "zero2", 2, checkpointing="every")),
        ("offload", Probe, Strategy(Mesh(), "zero3", 2, offload=True)),
    ]
    for name, task, strategy in cases:
        with found.trying(name):
            off = difference(strategy, found.device, task)
            found.expect(name, f"{off:.1e} from one process", holds=off < TOLERANCE)


def by_hand(
    found: Findings,
    task: Any,
    rows: tuple[Tensor, ...],
    steps: int,
    *,
    compiled: bool = False,
    sharded: bool = False,
) -> list[float]:
    """Seconds of the steps of a loop that an engineer would write in bfloat16, by FSDP2 if `sharded`."""
    from roundtable.core.task import initial_state

    model: Any = initial_state(task, 1).to(found.device)
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=replace(policy, output_dtype=torch.float32))
    run = torch.compile(model) if compiled else model
    optimizer = task.optimizer(model.parameters())
    rows = tuple(part.to(found.device) for part in rows)
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        with torch.autocast(found.device.type, torch.bfloat16, enabled=not sharded):
            loss = task.loss(run, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        taken.append(time.perf_counter() - began)
    return taken


def speed(found: Findings) -> None:
    """Steps of the cluster's loop and of one written by hand, in turn; the median of each."""
    large = {"dim": 1024, "layers": 24, "heads": 16, "hidden": 2816, "vocabulary": 32000, "length": 1024}
    # So many small kernels that the host is what takes the time.
    deep = {"dim": 256, "layers": 48, "heads": 4, "hidden": 704, "vocabulary": 8192, "length": 128}
    tiny = {"dim": 32, "layers": 2, "heads": 4, "hidden": 64, "vocabulary": 64, "length": 16}
    if found.rehearse:
        _speed(found, "tiny", tiny, 4, 6)
    else:
        _speed(found, "large", large, 16, 24)
        _speed(found, "deep", deep, 8, 18)


def _speed(found: Findings, model: str, size: dict[str, int], batch: int, steps: int) -> None:
    from cluster_models import Language

    from roundtable.client.policy.cluster_table import ClusterTable
    from roundtable.cluster.parallel.meshes import Meshes
    from roundtable.cluster.parallel.strategy import Mesh, Strategy
    from roundtable.cluster.plan.arithmetic import count_work
    from roundtable.cluster.plan.device_peaks import peak_flops
    from roundtable.cluster.plan.model_probe import example_batch
    from roundtable.cluster.train.rank_trainer import RankTrainer
    from roundtable.cluster.train.round_reports import RoundProgress, StepReport
    from roundtable.core import JobConfig, Layout
    from roundtable.core.task import Site, initial_state

    class Model(Language):
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    task = Model(examples=2 * batch, **size)
    data, _ = task.data(Site("silo"))
    hand = partial(by_hand, found, task, tuple(part[:batch] for part in data), steps)
    work = count_work(task, example_batch(data)).flops * batch
    peak = peak_flops(ClusterTable(), found.device, "bfloat16")

    def figure(seconds: list[float]) -> str:
        middle = statistics.median(seconds[len(seconds) // 3 :])
        used = f", {work / middle / peak:.1%} of the peak" if peak else ""
        return f"{1000 * middle:.1f} ms a step{used}"

    def ours(strategy: Strategy, *, compiled: bool = False) -> list[float]:
        table = {"steps": steps, "batch_size": batch, "max_gradient_norm": 1.0}
        job = JobConfig.model_validate({"task": "t", "seed": 1, "algorithm": table})
        whole = initial_state(task, 1)
        layout = Layout.of(whole)
        meshes = Meshes(strategy.mesh, found.device.type)
        trainer = RankTrainer(task, job, layout, strategy, meshes, found.device, "silo")
        trainer.load(layout.flatten(whole).clone(), {})
        seen: list[StepReport] = []
        if compiled:
            trainer.replica.compiled.turn_on()
        trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), seen.append)
        if compiled and not trainer.replica.compiled.on:
            raise RuntimeError(f"blocks are plain: {trainer.replica.compiled.failed or 'there are none'}")
        return [report.seconds for report in seen]

    plain = Strategy(Mesh(), "none", batch, precision="bfloat16")
    cases: dict[str, Callable[[], list[float]]] = {
        "by hand": hand,
        "by hand, FSDP2": partial(hand, sharded=True),
        "cluster, none": partial(ours, plain),
        "cluster, zero3": partial(ours, replace(plain, data_parallel="zero3")),
    }
    if model != "deep":
        cases["cluster, none, compiled"] = partial(ours, plain, compiled=True)
    if model == "large":
        cases["by hand, compiled"] = partial(hand, compiled=True)
    with alone(found):
        for name, run in cases.items():
            with found.trying(name):
                found.figures[f"{model}, {name}"] = figure(run())
                if not found.rehearse:
                    torch.cuda.empty_cache()


def predictions(found: Findings) -> None:
    """The planner's seconds of a step, from rates measured here, against steps of one device."""
    from dataclasses import asdict

    from cluster_models import Language

    from roundtable.client.policy.cluster_table import ClusterTable
    from roundtable.cluster.choice.machine_rates import rates_of
    from roundtable.cluster.choice.step_time import step_time
    from roundtable.cluster.choice.unit_sums import UnitSums
    from roundtable.cluster.parallel.meshes import Meshes
    from roundtable.cluster.parallel.strategy import Mesh, Strategy
    from roundtable.cluster.plan.links import measure_links
    from roundtable.cluster.plan.model_probe import probe_model
    from roundtable.cluster.plan.resources import find_resources
    from roundtable.cluster.train.rank_trainer import RankTrainer
    from roundtable.cluster.train.round_reports import RoundProgress, StepReport
    from roundtable.core import JobConfig, Layout
    from roundtable.core.task import Site, initial_state

    tiny = {"dim": 32, "layers": 2, "heads": 4, "hidden": 64, "vocabulary": 64, "length": 16}
    models = {
        "large": {
            "dim": 1024,
            "layers": 24,
            "heads": 16,
            "hidden": 2816,
            "vocabulary": 32000,
            "length": 1024,
        },
        "deep": {"dim": 256, "layers": 48, "heads": 4, "hidden": 704, "vocabulary": 8192, "length": 128},
        "wide": {"dim": 4096, "layers": 4, "heads": 32, "hidden": 11008, "vocabulary": 8192, "length": 512},
    }
    batch, steps = (4, 4) if found.rehearse else (8, 9)
    plain = Strategy(Mesh(), "none", batch)
    half = replace(plain, precision="bfloat16")
    plans = {
        "float32": plain,
        "tf32": replace(plain, precision="tf32"),
        "bfloat16": half,
        "bfloat16 in halves": replace(half, micro_batch=batch // 2),
        "bfloat16, all blocks again": replace(half, checkpointing="every"),
        "bfloat16, zero3": replace(half, data_parallel="zero3"),
        "bfloat16, optimizer in host memory": replace(half, offload_optimizer=True),
    }
    if found.rehearse:
        models, plans = {"tiny": tiny}, {name: plans[name] for name in ("float32", "bfloat16, zero3")}

    class Model(Language):
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=1e-4)

    resources = find_resources(ClusterTable())
    with alone(found):
        links = measure_links(found.device, 1)
        found.figures["measured"] = "; ".join(links.lines(links.at)[1:])
        for model, size in models.items():
            task = Model(examples=2 * batch, **size)
            data, _ = task.data(Site("silo"))
            probe = probe_model(task, data, device=found.device.type)
            sums, whole = UnitSums(probe), initial_state(task, 1)
            layout = Layout.of(whole)
            table = {"steps": steps, "batch_size": batch}
            job = JobConfig.model_validate({"task": "t", "seed": 1, "algorithm": table})
            for name, strategy in plans.items():
                with found.trying(f"{model}, {name}"):
                    meshes = Meshes(strategy.mesh, found.device.type)
                    trainer = RankTrainer(task, job, layout, strategy, meshes, found.device, "silo")
                    trainer.load(layout.flatten(whole).clone(), {})
                    trainer.sampler._wanted = False
                    seen: list[StepReport] = []
                    trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), seen.append)
                    taken = statistics.median(report.seconds for report in seen[steps // 3 :])
                    rates = rates_of(resources, strategy.precision, links)
                    guess = step_time(probe, sums, strategy, batch, rates, resources)
                    terms = {term: seconds for term, seconds in asdict(guess).items() if seconds}
                    said = ", ".join(f"{term} {1e3 * seconds:.1f}" for term, seconds in terms.items())
                    found.figures[f"{model}, {name}"] = (
                        f"{guess.seconds / taken:.2f}: {1e3 * guess.seconds:.1f} ms predicted ({said}), "
                        f"{1e3 * taken:.1f} ms measured"
                    )
                    del trainer
                    if not found.rehearse:
                        torch.cuda.empty_cache()


def memory(found: Findings) -> None:
    """What the planner says that a strategy needs, and what the allocator had at most."""
    import real_memory

    from roundtable.cluster.parallel.strategy import Mesh, Strategy

    plain = Strategy(Mesh(), "none", 4)
    cases = [
        ("none", "large", plain, 2),
        ("zero3", "deep", replace(plain, data_parallel="zero3"), 2),
        ("none, checkpointing every", "deep", replace(plain, checkpointing="every"), 1),
        ("none, bfloat16", "deep", replace(plain, precision="bfloat16"), 1),
    ]
    with alone(found):
        for name, model, strategy, count in cases[: 2 if found.rehearse else None]:
            with found.trying(name):
                if found.rehearse:
                    one = real_memory.measure(0, [(name, model, strategy, count)])[name]
                else:
                    one = real_memory.measure_device(model, strategy, count, found.device)
                share = one.estimated / one.allocated
                figure = f"{share:.2f} of {one.allocated / (1 << 20):.0f} MiB"
                found.expect(name, figure, holds=0.85 < share < 1.15)


def simulation(found: Findings) -> None:
    """A round of many clients stacked and one by one: seconds, and how far the models are apart."""
    from roundtable.core import JobConfig, Task
    from roundtable.core.task import Site
    from roundtable.simulation.simulate import simulate

    class Perceptron(Task):
        """784-200-200-10, and 60 examples at each client."""

        def model(self) -> nn.Module:
            layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)]
            return nn.Sequential(*layers)

        def data(self, site: Site) -> Any:
            chance = torch.Generator().manual_seed(site.index)
            inputs = torch.rand(60, 784, generator=chance)
            return (inputs, torch.randint(0, 10, (60,), generator=chance)), None

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    clients = 8 if found.rehearse else 1000
    models, took = {}, {}
    for backend in ("sequential", "stacked"):
        with found.trying(backend):
            job = JobConfig.model_validate(
                {
                    "task": "perceptron",
                    "rounds": 2,
                    "cohort": {"size": clients},
                    "algorithm": {"learning_rate": 0.05, "batch_size": 8, "epochs": 1},
                    "evaluation": {"every": 0},
                    "simulation": {
                        "clients": clients,
                        "backend": backend,
                        "device": found.device.type,
                        "workers": 1,
                    },
                }
            )
            began = time.perf_counter()
            result = simulate(job, Perceptron())
            found.wait()
            took[backend] = time.perf_counter() - began
            models[backend] = result.model.vector
            trained = result.history["clients"]
            how = f"{result.backend}; clients whose updates count: {trained}"
            right = result.backend.startswith(backend) and trained == [clients, clients]
            found.expect(f"{backend} is", how, holds=right)
            found.figures[f"{clients} clients, 2 rounds, {backend}"] = f"{took[backend]:.2f} s"
    if len(models) == 2:
        off = float((models["stacked"] - models["sequential"]).norm() / models["sequential"].norm())
        found.expect("stacked against sequential", f"{off:.1e} apart", holds=off < 1e-3)
        found.figures["sequential over stacked"] = f"{took['sequential'] / took['stacked']:.2f}"


def aggregation(found: Findings) -> None:
    """Each rule on rows of the device, and on the same rows on the CPU."""
    from roundtable.aggregation.pipeline import AggregationConfig, aggregate
    from roundtable.aggregation.registry import RULES
    from roundtable.aggregation.rows.matrix import TensorMatrix
    from roundtable.aggregation.stages import RuleContext
    from roundtable.aggregation.validation import ClientRow

    rows, columns = (12, 20_000) if found.rehearse else (32, 4_000_000)
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(6))
    clients = [ClientRow(f"silo-{index:02}") for index in range(rows)]
    given: dict[str, dict[str, Any]] = {"centred_clipping": {"tau": 5.0}, "monna": {"pivot": 2}}
    for name in sorted(RULES):
        parameters = {**({"f": 2} if RULES[name].takes("f") else {}), **given.get(name, {})}
        results, took = {}, {}
        with found.trying(name):
            config = AggregationConfig(name, parameters)
            for place in (torch.device("cpu"), found.device):
                context = RuleContext(root_update=values[0].to(place), previous=values[1].to(place))
                began = time.perf_counter()
                moved = values.to(place)
                results[place] = aggregate(TensorMatrix(moved), clients, config, context=context).vector.cpu()
                took[place] = time.perf_counter() - began
            first, second = results[torch.device("cpu")], results[found.device]
            off = float((first - second).norm() / first.norm().clamp(min=1e-12))
            same = "the same bytes" if torch.equal(first, second) else f"{off:.1e} apart"
            gain = took[torch.device("cpu")] / took[found.device]
            found.expect(name, f"{same}; the CPU takes {gain:.2f} times as long", holds=off < 1e-5)


def prefetch(found: Findings) -> None:
    """A round with batches copied ahead, and one that waits for each."""
    from cluster_models import Language

    from roundtable.cluster.parallel.meshes import Meshes
    from roundtable.cluster.parallel.strategy import Mesh, Strategy
    from roundtable.cluster.train.prefetch import Prefetched
    from roundtable.cluster.train.rank_trainer import RankTrainer
    from roundtable.cluster.train.round_reports import RoundProgress
    from roundtable.core import JobConfig, Layout
    from roundtable.core.task import Site, initial_state

    task = Language(examples=64)
    data, _ = task.data(Site("silo"))
    job = JobConfig.model_validate({"task": "t", "seed": 1, "algorithm": {"steps": 12, "batch_size": 8}})
    strategy, ends = Strategy(Mesh(), "none", 4), []
    torch.use_deterministic_algorithms(True, warn_only=True)
    with alone(found):
        for ahead in (Prefetched.ahead, lambda self: None):
            kept, Prefetched.ahead = Prefetched.ahead, ahead  # type: ignore[method-assign,assignment]
            whole = initial_state(task, 1)
            layout = Layout.of(whole)
            trainer = RankTrainer(
                task, job, layout, strategy, Meshes(Mesh(), found.device.type), found.device, "silo"
            )
            trainer.load(layout.flatten(whole).clone(), {})
            trainer.fit(trainer.batches(data, 1), 1, RoundProgress(), lambda report: None)
            ends.append([tensor.detach().cpu().clone() for _, tensor in trainer.replica.tensors()])
            Prefetched.ahead = kept  # type: ignore[method-assign]
    same = all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    found.expect("12 steps, batches ahead or not", "the same bits" if same else "other bits", holds=same)


def main() -> int:
    """Runs one phase, and writes what it found; what was found is no error of the phase's."""
    name, result = sys.argv[1], Path(sys.argv[2])
    found = Findings("--rehearse" in sys.argv[3:], result)
    {each.__name__: each for each in PHASES}[name](found)
    found.keep()
    return 0


PHASES: tuple[Callable[[Findings], None], ...] = (
    tests,
    ranks,
    faults,
    speed,
    predictions,
    memory,
    simulation,
    aggregation,
    prefetch,
)

if __name__ == "__main__":
    raise SystemExit(main())

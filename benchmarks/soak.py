"""Hours of rounds: memory, descriptors, threads, database, artifacts and latency, with a picture.

    pip install -e '.[bench]'
    python benchmarks/soak.py --minutes 180                  # 200 light agents and a whole one, over TLS
    python benchmarks/soak.py --minutes 180 --train 20     # which train for 10 to 20 seconds a round
    python benchmarks/soak.py --virtual-hours 24             # a day of the simulator's time
    python benchmarks/soak.py --judge build/soak             # what an earlier run has left

The light agents are those of light_agents.py; the whole one is `roundtable client`, with its process for
training. Samples are lines of JSON in `--out`, the picture is soak.png beside them. Exits with 1 where
something grows that should not; the bounds are in benchmarks/soak_verdict.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import psutil
import torch
from load import VALUES, Load, coordinator, free_port
from soak_verdict import KINDS, Run, as_json, draw, judge, table

from roundtable.core import JobConfig, Task, parse_job
from roundtable.core.errors import UnavailableError
from roundtable.core.evidence.release import release
from roundtable.core.identity.credentials import issue
from roundtable.operator import OperatorClient
from roundtable.simulation import simulate
from roundtable.simulation.reporting.progress import Progress

SAMPLES = 240
WHOLE_AGENT = "whole"
AGENT_TOML = """coordinator = "localhost:{port}"
credentials = "{name}"
state = "{name}-state"
[tasks]
t = "whole.py:Whole"
[limits]
device = "cpu"
threads = 1
"""
TASK = f"""
import torch
from roundtable.core import Task

class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros({VALUES}))

class Whole(Task):
    def model(self):
        return Sum()
    def data(self, site):
        return (torch.ones(20, {VALUES}), torch.ones(20)), None
    def loss(self, model, batch):
        return (batch[0] @ model.w - batch[1]).square().mean()
"""
VIRTUAL_JOB = """task = "soak.py:Day"
rounds = 100000
[cohort]
size = 50
minimum = 20
deadline = "10m"
[algorithm]
learning_rate = 0.1
batch_size = 10
[evaluation]
every = 10
clients = "cohort"
[stop]
time = "{hours}h"
[simulation]
clients = 2000
workers = 1
[simulation.devices]
speed = {{ median = 2, sigma = 0.5 }}
download = 2e6
upload = {{ median = 5e5, sigma = 1.0 }}
latency = "2s"
availability = 0.3
period = "1d"
[simulation.dropouts]
dropout = 0.02
crash_training = 0.01
crash_upload = 0.01
"""


def say(line: str) -> None:
    """Where it stands: over the line before in a terminal, a line of its own elsewhere."""
    print(f"\r{line} " if sys.stderr.isatty() else f"{line}\n", end="", flush=True, file=sys.stderr)


class Day(Task):
    """The simulator's task: a small model, and twenty points for each client."""

    def model(self) -> Any:
        return torch.nn.Linear(20, 2)

    def data(self, site: Any) -> Any:
        inputs = torch.randn(40, 20, generator=torch.Generator().manual_seed(site.index))
        targets = inputs[:, :2].argmax(1)
        return (inputs[:20], targets[:20]), (inputs[20:], targets[20:])

    def loss(self, model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


class Recorder:
    """Writes samples, a line each, at once: what a run that is cut short has seen stays."""

    def __init__(self, file: Path, **about: Any) -> None:
        this = release()
        self._file = file.open("w", buffering=1)
        self._about = {"software": this.version, "commit": this.commit, "cores": os.cpu_count(), **about}
        self._begun = time.monotonic()
        self._write(self._about)

    def add(self, **values: Any) -> None:
        """One sample."""
        self._write({"load": os.getloadavg()[0], **values})

    def minutes(self) -> float:
        """Since the first line."""
        return (time.monotonic() - self._begun) / 60

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """No line comes any more."""
        self._file.close()


class Rounds:
    """Counts a job's rounds by its events, as anybody who watches does, and times them."""

    def __init__(self, address: str, credentials: Path, job: str) -> None:
        self._place = address, credentials
        self._job = job
        self._seconds: list[float] = []
        self.done = 0
        self.trouble: list[str] = []
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        """The mean of the rounds since the last call; NaN where there was none."""
        found, self._seconds = self._seconds, []
        return sum(found) / len(found) if found else float("nan")

    def ended(self) -> bool:
        """Whether the job has ended."""
        return not self._thread.is_alive()

    def _watch(self) -> None:
        began = 0.0
        with OperatorClient(*self._place) as operator:
            for update in operator.watch(self._job):
                for event in update.events:
                    if event.kind == "round_started":
                        began = event.time
                    elif event.kind == "round_committed":
                        self._seconds.append(event.time - began)
                        self.done = event.round
                    elif "fail" in event.kind or "reject" in event.kind:
                        self.trouble.append(f"round {event.round}: {event.message}")


@contextmanager
def whole_agent(load: Load) -> Iterator[psutil.Process]:
    """A silo's agent as it is installed."""
    issue(load.folder / "ca", WHOLE_AGENT, "agent", load.folder / WHOLE_AGENT)
    (load.folder / "whole.py").write_text(TASK)
    file = load.folder / "agent.toml"
    file.write_text(AGENT_TOML.format(port=load.port, name=WHOLE_AGENT))
    with (load.folder / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "roundtable", "client", "--config", str(file)], stdout=log, stderr=log
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def soak(folder: Path, samples: Path, agents: int, minutes: float, train: float) -> None:
    """Real rounds, one after the other, until the time is over."""
    page = f"127.0.0.1:{free_port()}"
    load = Load(folder, agents, agents + 1, 0, train)
    load.prepare()
    recorder = Recorder(
        samples,
        kind="real",
        said=f"{agents} light agents and a whole one, {minutes:g} minutes of rounds",
        agents=agents,
        minutes=minutes,
        train=train,
    )
    with (
        coordinator(folder, load.port, page) as hub,
        OperatorClient(*_operator(load)) as operator,
        whole_agent(load) as agent,
    ):
        workers = load.connect(operator, hub)
        while load.online(operator) <= agents:
            _alive(agent, folder / "agent.log")
            time.sleep(0.2)
        job = operator.submit(load.job(10_000_000), folder / "model.safetensors").id
        rounds = Rounds(*_operator(load), job)
        begun, seen = time.monotonic(), 0
        while (gone := (time.monotonic() - begun) / 60) < minutes:
            time.sleep(max(60 * minutes / SAMPLES, 0.5))
            _alive(hub, folder / "coordinator.log")
            _alive(agent, folder / "agent.log")
            if rounds.ended():
                raise RuntimeError(f"the job has ended: {operator.job(job).job.reason}")
            if rounds.done > seen:
                seen = rounds.done
                recorder.add(time=gone, **_sample(folder, page, hub, agent, operator, job, rounds))
                say(f"{gone:.1f} of {minutes:g} minutes, {seen} rounds")
        operator.cancel(job)
        print("".join(f"\n! {line}" for line in rounds.trouble[:5]))
        for worker in workers:
            worker.communicate(b"")
    recorder.close()


def _operator(load: Load) -> tuple[str, Path]:
    return f"localhost:{load.port}", load.folder / "olga"


def _alive(process: psutil.Process, log: Path) -> None:
    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
        raise RuntimeError(f"a process has ended by itself: {log.read_text(errors='replace')[-2000:]}")


def _sample(
    folder: Path,
    page: str,
    hub: psutil.Process,
    agent: psutil.Process,
    operator: OperatorClient,
    job: str,
    rounds: Rounds,
) -> dict[str, float]:
    state = folder / "state"
    # Before it is asked anything: an answer about a long job takes some megabytes for a moment.
    its = _of([hub])
    with urlopen(f"http://{page}/metrics") as answer:
        series = sum(not line.startswith(b"#") for line in answer)
    family = [agent, *agent.children(recursive=True)]
    return {
        "rounds": rounds.done,
        "round": rounds.seconds(),
        "status": _milliseconds(operator.status),
        "job": _milliseconds(lambda: operator.job(job)),
        **its,
        "series": series,
        "database": sum(file.stat().st_size for file in state.glob("*.db")) / 1e6,
        "wal": sum(file.stat().st_size for file in state.glob("*.db-wal")) / 1e6,
        "artifacts": _size(state / "artifacts"),
        "log": _size(folder / "coordinator.log"),
        **{f"agent_{name}": value for name, value in _of(family).items()},
        "agent_state": _size(folder / f"{WHOLE_AGENT}-state"),
    }


def _milliseconds(call: Callable[[], object]) -> float:
    """How long an answer takes; where none comes in time, how long it was waited for."""
    begun = time.perf_counter()
    with suppress(UnavailableError):
        call()
    return 1e3 * (time.perf_counter() - begun)


def _of(processes: list[psutil.Process]) -> dict[str, float]:
    return {
        "memory": sum(process.memory_info().rss for process in processes) / 1e6,
        "files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
    }


def _size(place: Path) -> float:
    total = 0
    for file in place.rglob("*") if place.is_dir() else [place]:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            # It was renamed or deleted meanwhile, as it should be.
            continue
    return total / 1e6


def soak_virtual(folder: Path, samples: Path, hours: float) -> None:
    """A simulation of so many hours of its own time, sampled at its rounds."""
    recorder = Recorder(
        samples, kind="virtual", said=f"{hours:g} virtual hours of 2,000 clients, 50 a round", hours=hours
    )
    job: JobConfig = parse_job(VIRTUAL_JOB.format(hours=hours))
    me, next_at, since, last = psutil.Process(), 0.0, 0, time.monotonic()

    def look(said: Progress) -> None:
        nonlocal next_at, since, last
        if said.kind != "round" or said.record is None:
            return
        since += 1
        reached = said.record.ended / 3600
        if reached < next_at:
            return
        next_at = reached + hours / SAMPLES
        now = time.monotonic()
        values = {"rounds": said.round, "round": (now - last) / since, "run": _size(folder / "run")}
        recorder.add(time=reached, minutes=recorder.minutes(), **values, **_of([me, *me.children(True)]))
        say(f"{reached:.1f} of {hours:g} virtual hours, {said.round} rounds")
        since, last = 0, now

    result = simulate(job, folder=Path(__file__).parent, run_dir=folder / "run", progress=look)
    print(f"\n{result.status}: {result.reason}, after {recorder.minutes():.1f} minutes")
    recorder.close()


def report(folder: Path, as_document: bool) -> int:
    """Judges and draws what is in the folder; 1 where something grows, 2 where there is nothing to judge."""
    runs = [Run.read(file) for kind in KINDS if (file := folder / f"{kind}.jsonl").exists()]
    if not runs:
        print(f"{folder} holds no samples: run with --minutes or --virtual-hours first", file=sys.stderr)
        return 2
    try:
        found = [(run, judge(run)) for run in runs]
    except ValueError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 2
    if as_document:
        print(json.dumps([as_json(*each) for each in found], indent=2))
    else:
        print("\n\n".join(table(*each) for each in found))
    draw(runs, folder / "soak.png")
    return 0 if all(verdict.holds for _, verdicts in found for verdict in verdicts) else 1


def main() -> int:
    """Runs what was asked for, then judges it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="of real rounds")
    parser.add_argument("--agents", type=int, default=200, help="light ones")
    parser.add_argument("--train", type=float, default=0.0, help="the most seconds that a light one trains")
    parser.add_argument("--virtual-hours", type=float, default=0.0, help="of the simulator's time")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder of samples and picture")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="run nothing; judge what is there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    if chosen.judge:
        return report(chosen.judge, chosen.json)
    if not chosen.minutes and not chosen.virtual_hours:
        parser.error("say how long: --minutes, --virtual-hours, or both")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="roundtable-soak-") as folder:
            if chosen.minutes:
                soak(Path(folder), chosen.out / "real.jsonl", chosen.agents, chosen.minutes, chosen.train)
            if chosen.virtual_hours:
                soak_virtual(Path(folder), chosen.out / "virtual.jsonl", chosen.virtual_hours)
    except KeyboardInterrupt:
        print("\nended early; judging what there is")
    return report(chosen.out, chosen.json)


if __name__ == "__main__":
    sys.exit(main())

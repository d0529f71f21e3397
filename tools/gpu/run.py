"""What a GPU is asked on the day that there is one: `make gpu`, for one card of 80 GB, 45 minutes at most.

python tools/gpu/run.py                  every phase that has not passed yet, then docs/gpu.md
python tools/gpu/run.py --list           the phases, and how each stands
python tools/gpu/run.py --phase speed    these phases only, whatever became of them before
python tools/gpu/run.py --rehearse       the same on this machine's CPU, tiny: all but the card is tried

Each phase is a process of its own with a time limit, so that a device that is lost costs its phase. The state
file says what became of each: a run that was broken off goes on with the next phase. Nothing in the state of
another card, version or commit counts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from page import write_page

ROOT = Path(__file__).resolve().parents[2]
PHASES = {
    "tests": (300, "the tests that need a GPU"),
    "ranks": (240, "a cluster on NCCL: one rank, and two where there are devices for them"),
    "faults": (
        480,
        "real faults: out of memory, an assertion in a kernel, a killed rank, offload, tied weights",
    ),
    "speed": (480, "steps against a hand-written loop, with and without compilation"),
    "predictions": (300, "the planner's seconds of a step against steps"),
    "memory": (300, "the planner's estimate against the allocator"),
    "simulation": (360, "stacked clients against the plain loop"),
    "aggregation": (360, "rules on the device against the CPU"),
    "prefetch": (120, "batches copied ahead: the same bits"),
}
BUDGET = 45 * 60
_RUNNING: list[int] = []
_STOPPED: list[int] = []


def about() -> dict[str, str]:
    """What the figures are of, asked in a process of its own."""
    code = (
        "import json, torch; c = torch.cuda.is_available(); print(json.dumps({"
        "'device': torch.cuda.get_device_name(0) if c else 'CPU', 'torch': torch.__version__,"
        "'cuda': str(torch.version.cuda), 'devices': str(torch.cuda.device_count())}))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {**json.loads(asked.stdout.splitlines()[-1]), "commit": commit.stdout.strip() or "unknown"}


def stop(number: int, frame: object) -> None:
    """Ends the phase that runs: it has a session of its own, and would go on with the card."""
    _STOPPED.append(number)
    for process in _RUNNING:
        os.killpg(process, signal.SIGKILL)


def why_none(here: Mapping[str, str]) -> str:
    """Why no phase can run here; empty where one can."""
    if here["device"] != "CPU":
        return ""
    if here["cuda"] == "None":
        return f"torch {here['torch']} is built without CUDA"
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "does nvidia-smi show one?" if seen is None else f"CUDA_VISIBLE_DEVICES is {seen!r}"
    return f"torch {here['torch']} for CUDA {here['cuda']} finds no device; {hint}"


def run_phase(name: str, limit: float, state: Path, *, rehearse: bool) -> dict[str, Any]:
    """What a phase found; a phase that breaks, or takes too long, has failed with what it said last."""
    result, began = state / f"{name}.json", time.monotonic()
    result.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("phases.py")), name, str(result)]
    paths = [str(ROOT / "tests" / "kit"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(
        [*command, *(["--rehearse"] if rehearse else [])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _RUNNING.append(process.pid)
    if _STOPPED:
        os.killpg(process.pid, signal.SIGKILL)
    stopped = ""
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        stopped = f"stopped after its {limit:.0f} s"
    _RUNNING.remove(process.pid)
    (state / f"{name}.log").write_text(said)
    found: dict[str, Any] = {"figures": {}, "failed": [], "skipped": []}
    if result.exists():
        found = json.loads(result.read_text())
    if process.returncode:
        last = [line for line in said.strip().splitlines() if line.strip()] or ["it said nothing"]
        why = stopped or last[-1][:300]
        found["failed"].append(f"the phase ended with status {process.returncode}: {why}")
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Runs the phases that are asked for, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=None, help="these only")
    parser.add_argument("--list", action="store_true", help="show the phases and how they stand")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--again", action="store_true", help="forget what passed before")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu", help="where results are kept")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md", help="what is written")
    given = parser.parse_args()
    here = about()
    if (reason := why_none(here)) and not (given.rehearse or given.list):
        for name in given.phase or PHASES:
            print(f"{name:12} cannot run: {PHASES[name][1]}: {reason}", file=sys.stderr)
        print("nothing is written; --rehearse tries every phase on the CPU", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    folder = given.state / ("rehearsal" if given.rehearse else "device")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "state.json"
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if given.again or state.get("about") != here:
        state = {"about": here, "phases": {}}
    done = state["phases"]
    if given.list:
        for name, (limit, text) in PHASES.items():
            print(f"{name:12} {standing(done.get(name)):8} at most {limit // 60} min  {text}")
        return 0
    began = time.monotonic()
    wanted = given.phase or [name for name in PHASES if standing(done.get(name)) != "passed"]
    for name in wanted:
        limit, text = PHASES[name]
        left = BUDGET - (time.monotonic() - began)
        if left < 30:
            done[name] = {"figures": {}, "failed": [], "skipped": ["no time was left"], "seconds": 0.0}
        else:
            print(f"{name}: {text}", flush=True)
            found = run_phase(name, min(limit, left), folder, rehearse=given.rehearse)
            if _STOPPED:
                print(f"   stopped; the same command goes on with {name}", flush=True)
                return 130
            done[name] = found
            print(f"   {standing(done[name])} in {done[name]['seconds']} s", flush=True)
            for line in done[name]["failed"]:
                print(f"   FAILED {line}", flush=True)
        partial = file.with_suffix(".part")
        partial.write_text(json.dumps(state, indent=1))
        partial.replace(file)
    page = folder / "gpu.md" if given.rehearse else given.page
    write_page(page, here, {name: text for name, (_, text) in PHASES.items()}, done)
    print(f"written: {page}", flush=True)
    return int(any(done.get(name, {}).get("failed") for name in PHASES))


def standing(result: dict[str, Any] | None) -> str:
    """In one word."""
    if result is None:
        return "not run"
    if result["failed"]:
        return "failed"
    return "passed" if result["figures"] else "skipped"


if __name__ == "__main__":
    raise SystemExit(main())

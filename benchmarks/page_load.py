"""The coordinator's page under load: silos, jobs and events as many as stated, with and without open pages.

    pip install -e '.[bench]'
    python benchmarks/page_load.py                       # 1,000 agents, 20 jobs, 10 pages
    python benchmarks/page_load.py --agents 100 --jobs 4

The agents are those of light_agents.py. A page is a browser's stream over HTTPS, of the overview and of
single jobs in turn. Printed are the events a second; the coordinator's share of a core without open pages,
before and after, with them, and the difference to the mean of the two, because jobs that go on cost more with
each silo that they have asked; and the time from an event, by the coordinator's clock, to its arrival: a
browser then draws it within a frame.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import psutil
from light_agents import HEARTBEAT
from load import Load, free_port

from roundtable.administration import Administrator
from roundtable.core.identity.credentials import issue

MEASURED_SECONDS = 20.0
SETTLED_SECONDS = 5.0
TURNS = 5


class Page:
    """One browser's stream: what arrives, and how late."""

    def __init__(self, port: int, cookie: str, topics: str) -> None:
        self.delays: list[float] = []
        self.bytes = 0
        self._link = _link(port)
        self._link.request("GET", f"/api/live?topics={topics}", headers={"Cookie": cookie})
        self._answer = self._link.getresponse()
        if self._answer.status != 200:
            raise SystemExit(f"the stream answers with {self._answer.status}: {self._answer.read()[:200]!r}")
        self._began = time.time()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while line := self._answer.readline():
                now = time.time()
                self.bytes += len(line)
                if line.startswith(b"data: "):
                    told = json.loads(line[6:]).get("lines", [])
                    self.delays += [now - event["time"] for event in told if event["time"] > self._began]
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return

    def close(self) -> None:
        """Ends the stream."""
        self._link.close()


def main() -> None:
    """Runs it and prints a line for each turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--train", type=float, default=4.0, help="seconds that a silo trains at most")
    parser.add_argument("--pages", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load = Load(folder, given.agents, given.cohort, 100_000, given.train)
        load.prepare()
        issue(folder / "ca", "ada", "admin", folder / "ada")
        port = free_port()
        process = _coordinator(folder, load.port, port)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            with Administrator(f"localhost:{load.port}", folder / "ada") as admin:
                workers = load.connect(admin, psutil.Process(process.pid))
                jobs = [
                    admin.submit(
                        load.job(load.rounds), folder / "model.safetensors", request_id=f"job-{number}"
                    ).id
                    for number in range(given.jobs)
                ]
                time.sleep(SETTLED_SECONDS)
                word = admin.open_page().word
                cookie, began = _signed_in(port, word)
                print(f"first content after signing in: {began:.2f} s, {given.agents} silos", flush=True)
                before, rises = _share(psutil.Process(process.pid)), []
                for turn in range(TURNS):
                    before, rise = _turn(
                        turn, psutil.Process(process.pid), before, port, cookie, jobs, given.pages
                    )
                    rises.append(rise)
                print(f"with {given.pages} pages: {statistics.median(rises):+.1f} points of a core (median)")
        finally:
            for worker in workers:
                worker.kill()
            process.terminate()
            process.wait(60)


def _turn(
    turn: int, process: psutil.Process, before: float, port: int, cookie: str, jobs: list[str], pages: int
) -> tuple[float, float]:
    """The share without pages after it, and by how much it was more with them."""
    shows = [f"job:{jobs[number % len(jobs)]}" if number % 2 else "overview" for number in range(pages)]
    opened = [Page(port, cookie, topic) for topic in shows]
    time.sleep(SETTLED_SECONDS)
    for page in opened:
        page.delays.clear()
        page.bytes = 0
    shown = _share(process)
    delays = sorted(delay for page in opened for delay in page.delays)
    received, events = sum(page.bytes for page in opened), len(opened[0].delays)
    for page in opened:
        page.close()
    time.sleep(SETTLED_SECONDS)
    if not delays:
        raise SystemExit("no event came: the jobs do not run")
    after = _share(process)
    rise = shown - (before + after) / 2
    middle, last = statistics.median(delays), delays[int(0.99 * (len(delays) - 1))]
    print(
        f"turn {turn + 1}: {events / MEASURED_SECONDS:.0f} events/s at the overview; coordinator "
        f"{before:.1f} and {after:.1f} % of a core without, {shown:.1f} % with {pages} pages ({rise:+.1f}); "
        f"event to page: median {1e3 * middle:.0f} ms, 99th percentile {1e3 * last:.0f} ms; "
        f"{received / MEASURED_SECONDS / pages / 1e3:.1f} kB/s a page",
        flush=True,
    )
    return after, rise


def _share(process: psutil.Process) -> float:
    """Percent of a core over the measured time."""
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(MEASURED_SECONDS)
    return float(100 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began))


def _coordinator(folder: Path, port: int, page: int) -> subprocess.Popen[bytes]:
    values = {"listen": f"127.0.0.1:{port}", "state": "state", "credentials": "hub", "heartbeat": HEARTBEAT}
    file = folder / "coordinator.toml"
    tables = f'[dashboard]\nlisten = "127.0.0.1:{page}"\n'
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + tables)
    command = [sys.executable, "-m", "roundtable", "server", str(file)]
    with (folder / "coordinator.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _signed_in(port: int, word: str) -> tuple[str, float]:
    """The session's cookie, and the seconds from there to the first whole answer of the overview."""
    link = _link(port)
    body = urlencode({"token": word, "next": "/"})
    link.request("POST", "/sign-in", body, {"Content-Type": "application/x-www-form-urlencoded"})
    answer = link.getresponse()
    answer.read()
    cookie = (answer.headers.get("set-cookie") or "").partition(";")[0]
    began = time.monotonic()
    link.request("GET", "/api/live?topics=overview", headers={"Cookie": cookie})
    stream = link.getresponse()
    while b'"silos"' not in stream.readline():
        pass
    taken = time.monotonic() - began
    link.close()
    return cookie, taken


def _link(port: int) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", port, context=ssl._create_unverified_context())


if __name__ == "__main__":
    main()

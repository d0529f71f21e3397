"""Pictures of the coordinator's page and of a silo's for the docs: real silos train the digits example.

    .venv/bin/python tools/page_pictures.py [--out docs/figures]

Needs Chromium (`make browser`), playwright and scikit-learn; takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright
from sklearn.datasets import load_digits

from roundtable.child_processes import Children
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.demo import HOST, free_port

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "digits"
SHOWN = "alder"
"""Whose page is shown: its people are asked for each job, and have said yes to the first."""
SILOS = (SHOWN, "birch", "cedar", "hospital-north")
ROUNDS = {"digits": 12, "digits-slow": 12, "digits-next": 3000}
PATIENCE = 300_000.0


def main() -> None:
    """Makes all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    out: Path = parser.parse_args().out
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no browser here: `make browser` installs Chromium where it can")
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder) / "logs") as children:
        page, token, own = _begin(Path(folder), children)
        with sync_playwright() as playwright:
            opened = playwright.chromium.launch(
                executable_path=browser, args=["--no-sandbox", "--ignore-certificate-errors"]
            )
            context = opened.new_context(viewport={"width": 1280, "height": 900})
            context.set_default_timeout(PATIENCE)
            _look(context.new_page(), page, token, out)
            _look_at_silo(context.new_page(), own, out)
            opened.close()


def _begin(folder: Path, children: Children) -> tuple[str, str, str]:
    """A coordinator, silos and jobs; the page's address, a token for it, and the address of a silo's page."""
    authority, address, page = folder / "ca", f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    create_ca(authority, "Roundtable CA")
    issue(authority, "coordinator", "coordinator", folder / "coordinator", [HOST, "localhost"])
    issue(authority, "olga", "admin", folder / "olga")
    options = ["--listen", address, "--page", page, "--state", str(folder / "state")]
    children.start("coordinator", ["server", *options, "--credentials", str(folder / "coordinator")])
    images, labels = load_digits(return_X_y=True)
    for index, name in enumerate(SILOS):
        silo = folder / name
        issue(authority, name, "agent", silo / "credentials")
        rows = slice(index, None, len(SILOS))
        np.savez(
            silo / "digits.npz", images=images[rows].astype("uint8"), labels=labels[rows].astype("uint8")
        )
        asks = f'page = "{HOST}:{free_port()}"\n' if name == SHOWN else ""
        rules = "[policy]\napproval = true\nrounds = 5000\nmetrics_digits = 3\n" if name == SHOWN else ""
        (silo / "agent.toml").write_text(
            f'{asks}coordinator = "{address}"\ncredentials = "credentials"\nstate = "state"\n'
            f'[tasks]\ndigits = "{EXAMPLE / "digits.py"}:Digits"\n'
            f'[data]\ndigits = "{silo / "digits.npz"}"\n{rules}'
        )
        children.start(name, ["client", "--config", str(silo / "agent.toml")])
    environment = {
        **os.environ,
        "ROUNDTABLE_COORDINATOR": address,
        "ROUNDTABLE_CREDENTIALS": str(folder / "olga"),
    }

    def run(*command: str) -> str:
        """The command's output; again while the coordinator is not there yet."""
        for _ in range(60):
            called = [sys.executable, "-m", "roundtable", *command]
            done = subprocess.run(called, capture_output=True, text=True, check=False, env=environment)
            if done.returncode == 0:
                return done.stdout
            time.sleep(2.0)
        raise SystemExit(done.stderr)

    token = json.loads(run("token", "create", "maria", "--role", "operator", "--json"))["token"]
    own = ("client", "--config", str(folder / SHOWN / "agent.toml"))
    for seed, (name, rounds) in enumerate(ROUNDS.items()):
        changes = [f"name={name}", f"rounds={rounds}", f"seed={seed}"]
        last = name == list(ROUNDS)[-1]
        if not last:
            # It waits until the shown silo's people have said yes.
            changes.append(f"cohort.minimum={len(SILOS)}")
        if name == "digits-slow":
            changes.append("algorithm.learning_rate=0.01")
        run(
            "job",
            "submit",
            str(EXAMPLE / "job.toml"),
            *(part for each in changes for part in ("--set", each)),
        )
        if not last:
            run(*own, "approve", "--yes", _asked(run, *own))
            while (status := _status(run, name)) != "finished":
                if status == "paused":
                    run("job", "resume", name)
                time.sleep(0.5)
    return f"https://{page}", token, run(*own, "page").strip()


def _status(run: Callable[..., str], name: str) -> str:
    jobs = json.loads(run("job", "list", "--json"))
    return next(str(job["status"]) for job in jobs if job["name"] == name)


def _asked(run: Callable[..., str], *own: str) -> str:
    """The job that waits for the silo's people, once there is one."""
    while True:
        waiting = [job["job"] for job in json.loads(run(*own, "jobs", "--json")) if not job["approved"]]
        if waiting:
            return str(waiting[0])
        time.sleep(0.2)


def _look(page: Page, address: str, token: str, out: Path) -> None:
    page.goto(address)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("link", name="Jobs", exact=True).click()
    # Two jobs are over, the third is in its middle.
    under_way = re.compile(r"[1-9][0-9]+ / 3000")
    page.get_by_role("row").filter(has_text="digits-next").get_by_text(under_way).wait_for()
    for name in ("Overview", "Jobs", "Silos", "Privacy", "Audit"):
        page.get_by_role("navigation").get_by_role("link", name=name).click()
        page.wait_for_timeout(2500)
        page.screenshot(path=out / f"page-{name.lower()}.png")
    page.get_by_role("navigation").get_by_role("link", name="Compare").click()
    page.get_by_role("checkbox").nth(len(ROUNDS) - 1).wait_for()
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.locator("figure.chart").nth(1).wait_for()
    page.wait_for_timeout(2500)
    page.screenshot(path=out / "page-compare.png")
    page.get_by_role("navigation").get_by_role("link", name="Overview").click()
    page.get_by_role("link", name="digits-next", exact=True).first.click()
    page.locator("figure.chart").nth(1).wait_for()
    page.wait_for_timeout(4000)
    page.set_viewport_size({"width": 1280, "height": 1500})
    page.wait_for_timeout(1000)
    page.screenshot(path=out / "page-job.png")


def _look_at_silo(page: Page, address: str, out: Path) -> None:
    page.goto(address)
    page.get_by_role("link", name="Read and approve").wait_for()
    page.wait_for_timeout(1500)
    page.screenshot(path=out / "silo-jobs.png")
    page.get_by_role("link", name="What left").click()
    page.get_by_text("The silo's log holds together").wait_for()
    page.screenshot(path=out / "silo-left.png")
    page.get_by_role("link", name="Policy").click()
    page.screenshot(path=out / "silo-policy.png")
    page.get_by_role("navigation").get_by_role("link", name="Jobs").click()
    page.get_by_role("link", name="digits-next").click()
    page.get_by_role("row").filter(has_text="changed, was").first.wait_for()
    page.screenshot(path=out / "silo-job.png")


if __name__ == "__main__":
    main()

"""What `make` runs, as plain commands for any Python from 3.11 on: `python3 tools/house.py NAME`.

dev      the virtual environment .venv with everything for development
demo     dev, then `roundtable demo`
test     dev, then every check below: the one command that tells whether the project is well
lint     ruff's rules and format
types    mypy, strict
layers   which folder may import which (contracts in setup.cfg)
proto    generated code against the .proto files
deploy   the compose file's schema, the Helm charts, the manifests kept beside them
compat   generated code on the oldest and on the newest protobuf and grpcio
browser  Chromium for the tests of the page, by this system's packages; CI asks for it, others may
wheel    builds the wheel and runs the fast tests on it, outside the tree; arguments go to pytest
gpu      what a GPU is asked, into docs/gpu.md: 45 minutes at most; --rehearse, --phase, --list and more
docs     the site in build/site, checked; --serve shows it here, --versions builds those of all releases
dist     wheel, source distribution and bill of materials in dist/, the same bytes wherever they are built
version  the version and the commit of this tree, for a copy that has no history: see core/evidence/release.py
pins     writes constraints.txt from what is installed
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from environments import ROOT, environment

VENV = ROOT / ".venv"
BIN = VENV / "bin"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = ["protobuf==4.25.8", "grpcio==1.62.3"]
# So many tests that fail among others may pass alone: they run real processes, sockets and signals.
AGAIN = 3
# The oldest grpcio has no wheel for newer Pythons, and building it takes many minutes.
HAS_OLDEST = sys.version_info < (3, 13)


def run(*command: str | Path, **environ: str) -> None:
    """Runs a command from the top of the tree, showing it first; stops everything where it fails."""
    shown = " ".join(str(part).removeprefix(f"{ROOT}/") for part in command)
    print(
        f"$ {' '.join(f'{key}={value}' for key, value in environ.items())} {shown}".replace("$  ", "$ "),
        flush=True,
    )
    done = subprocess.run(list(command), cwd=ROOT, env={**os.environ, **environ}, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def dev() -> None:
    """Makes .venv, and again only when what it was made from has changed."""
    made_from = [ROOT / "setup.cfg", ROOT / "pyproject.toml", CONSTRAINTS]
    stamp = VENV / "made-from.txt"
    state = "\n".join(file.read_text() for file in made_from)
    if stamp.exists() and stamp.read_text() == state:
        return
    if not (BIN / "python").exists():
        run(sys.executable, "-m", "venv", VENV)
    print("setting up .venv, once: PyTorch and what stands on it, some minutes", flush=True)
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    # torch comes first and alone, so that nothing that depends on it picks another build of it.
    run(BIN / "python", "-m", "pip", "install", "--quiet", torch)
    run(BIN / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "-e", ".[dev]")
    stamp.write_text(state)


def demo() -> None:
    """The main job."""
    dev()
    run(BIN / "roundtable", "demo")


def lint() -> None:
    """Rules and format."""
    run(BIN / "ruff", "check", ".")
    run(BIN / "ruff", "format", "--check", ".")


def types() -> None:
    """Strict types of the whole package, under its import name."""
    run(BIN / "python", "tools/tree.py")
    run(BIN / "mypy", "build/tree/roundtable")


def layers() -> None:
    """The table of docs/architecture.md."""
    run(BIN / "python", "tools/tree.py")
    run(BIN / "lint-imports", PYTHONPATH="build/tree")


def proto() -> None:
    """Fails when a .proto file and the code generated from it drift apart."""
    if HAS_OLDEST:
        run(BIN / "python", "tools/generate_proto.py", "--check")
    else:
        print("skipped: the generator has no wheel for this Python; CI checks on 3.11")


def deploy() -> None:
    """What can be checked of deploy/ without a container engine or a cluster."""
    run(BIN / "python", "tools/compose.py")
    run(BIN / "python", "tools/charts.py", "--check")


def compat() -> None:
    """A real round trip under the oldest and the newest versions."""
    pinned = [line for line in CONSTRAINTS.read_text().split() if line.startswith(("grpcio==", "protobuf=="))]
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(build_wheel()) as wheel:
            wheel.extractall(
                folder, [name for name in wheel.namelist() if name.startswith("roundtable/proto/")]
            )
        for name, pins in (("newest", pinned), ("oldest", OLDEST)):
            if name == "newest" or HAS_OLDEST:
                run(environment(name, pins), "tools/proto_roundtrip.py", PYTHONPATH=folder)
            else:
                print("skipped: the oldest grpcio has no wheel for this Python; CI checks on 3.11")


def browser() -> None:
    """Tests of the page are skipped where there is none: playwright's own is not loaded."""
    if found := shutil.which("chromium") or shutil.which("google-chrome"):
        print(f"{found} is there")
    elif shutil.which("apt-get") and os.geteuid() == 0:
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium")
    else:
        print("no browser: install chromium, and the tests of the page run, too")


def build_wheel() -> Path:
    """The wheel, from a clean build folder, so that no deleted module survives in it."""
    out = ROOT / "build" / "wheel"
    for stale in (ROOT / "build" / "lib", out):
        shutil.rmtree(stale, ignore_errors=True)
    run(BIN / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, ".")
    return next(out.glob("*.whl"))


def wheel(*arguments: str) -> None:
    """The fast tests against the wheel in a new environment outside the tree.

    Other people's packages come from .venv by a path file, which does not bring .venv's editable
    install of this one along: a module that the wheel lacks is missing here.
    """
    built = build_wheel()
    with tempfile.TemporaryDirectory(prefix="roundtable-wheel-") as folder:
        venv.create(folder, with_pip=False)
        python = Path(folder, "bin", "python")
        site = Path(capture(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
        ours = capture(BIN / "python", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (site / "others.pth").write_text(ours + "\n")
        run(BIN / "python", "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", built)
        found = capture(python, "import roundtable; print(roundtable.__file__)")
        if not Path(found).is_relative_to(site):
            raise SystemExit(f"the tests would run on {found}, which is not the wheel's code")
        tests = arguments or (
            "-q",
            "--durations=10",
            "-n",
            # Tests wait for servers and agents of their own: a worker more than cores keeps these at work.
            str(min(4, (os.cpu_count() or 1) + 1)),
            "--dist",
            "loadfile",
            # In the order of tests/conftest.py.
            "--no-loadscope-reorder",
        )
        command = [python, "-P", "-m", "pytest", "-o", f"cache_dir={folder}/cache"]
        environ = {"OMP_NUM_THREADS": "1", "ROUNDTABLE_WHEEL": str(site)}
        try:
            run(*command, *tests, **environ)
        except SystemExit:
            failed = _failed(Path(folder, "cache"))
            if not 0 < len(failed) <= AGAIN:
                raise
            print(f"\n{len(failed)} failed; once more, alone: one that fails twice fails", flush=True)
            run(*command, "-q", *failed, **environ)
            print("UNSTEADY, failed and then passed; look into each:", *failed, sep="\n   ", flush=True)


def _failed(cache: Path) -> list[str]:
    """The tests that failed in the run before, as pytest names them."""
    found = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(found.read_text())) if found.exists() else []


def capture(python: Path, code: str) -> str:
    """What a line of Python prints."""
    done = subprocess.run([python, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def dist() -> None:
    """What is uploaded to an index, checked as it would check it."""
    dev()
    run(BIN / "python", "tools/distributions.py", ROOT / "dist")


def docs(*arguments: str) -> None:
    """The site: docs/ and the reference out of the code; stops at a dead link or a page without a place."""
    dev()
    run(BIN / "python", "tools/handbook/build_site.py", *arguments)


def version() -> None:
    """What this tree is, as every build carries it."""
    rule = runpy.run_path(str(ROOT / "core" / "evidence" / "release.py"))
    print(rule["written"](rule["release"]()), end="")


def pins() -> None:
    """Pins of everything that an install with every extra brings, without platform suffixes."""
    run(BIN / "python", "tools/pins.py")


def test() -> None:
    """Every check, cheap ones first."""
    dev()
    # On a developer's machine nothing is installed unasked.
    asked = (browser,) if os.environ.get("CI") else ()
    _timed(lint, layers)
    # The types take one core for most of a minute, and the next ones another for half of it.
    with beside(types):
        _timed(proto, deploy, compat, *asked)
    _timed(wheel)
    print("\nall checks passed")


def _timed(*checks: Callable[[], None]) -> None:
    for check in checks:
        start = time.monotonic()
        print(f"\n== {check.__name__}", flush=True)
        check()
        print(f"   {time.monotonic() - start:.0f} s", flush=True)


@contextmanager
def beside(check: Callable[[], None]) -> Iterator[None]:
    """Runs a check in a process of its own while the block does others; what it says comes after theirs."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([sys.executable, __file__, check.__name__], stdout=said, stderr=said)
        try:
            yield
            start = time.monotonic()
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        print(f"\n== {check.__name__}, beside these", flush=True)
        print(said.read().decode(errors="replace"), end="", flush=True)
        print(f"   {time.monotonic() - start:.0f} s longer", flush=True)
        if code:
            raise SystemExit(code)


def gpu(*arguments: str) -> None:
    """Every check that needs a card, in phases that go on where a run was broken off."""
    dev()
    run(BIN / "python", "tools/gpu/run.py", *arguments)


COMMANDS = (
    *(dev, demo, test, lint, types, layers, proto, deploy, compat, browser, wheel),
    *(gpu, docs, dist, version, pins),
)
TAKES_ARGUMENTS = ("wheel", "gpu", "docs")


def main() -> int:
    """Runs the command that the first argument names."""
    commands = {command.__name__: command for command in COMMANDS}
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in commands or (len(sys.argv) > 2 and name not in TAKES_ARGUMENTS):
        print(__doc__)
        return 2
    commands[name](*sys.argv[2:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

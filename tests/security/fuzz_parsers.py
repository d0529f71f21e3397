"""Fuzzes the parsers of files with atheris, which looks for inputs that reach new code.

    .venv/bin/python tests/security/fuzz_parsers.py --minutes 10

atheris lives in an environment of its own. An input that ends in anything but one of our own errors ends
the run, is kept below --findings, and the exit status is 1. An input's first byte says which parser of
test_parsers.py beside this file gets the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KIT = ROOT / "tests" / "kit"
ATHERIS = "atheris==3.0.0"
LONGEST = 4096


def fuzz(options: list[str]) -> None:
    """Runs in a process of its own, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["roundtable", "tomllib", "json"], enable_loader_override=False):
        from test_parsers import FUZZED

        from roundtable.core.errors import RoundtableError
    parsers, tried = list(FUZZED.items()), Counter[str]()

    def one(data: bytes) -> None:
        if not data:
            return
        name, (parse, _) = parsers[data[0] % len(parsers)]
        tried[name] += 1
        if sum(tried.values()) % 5000 == 0:
            print("tried:", dict(tried), file=sys.stderr, flush=True)
        with contextlib.suppress(RoundtableError):
            parse(data[1:])

    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


def main() -> int:
    """Starts from one good example for each parser; says how many inputs were tried."""
    if sys.argv[1:2] == ["--child"]:
        fuzz(sys.argv[2:])
    sys.path[:0] = [str(HERE), str(KIT), str(ROOT / "tools")]
    from environments import environment
    from test_parsers import FUZZED, folder_of
    from tree import build

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--findings", type=Path, default=ROOT / "build" / "findings")
    wanted = parser.parse_args()
    wanted.findings.mkdir(parents=True, exist_ok=True)
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    with tempfile.TemporaryDirectory() as folder:
        package, corpus = Path(folder, "package"), Path(folder, "corpus")
        # A copy, as the tree of links is made anew whenever types are checked.
        shutil.copytree(build(), package)
        corpus.mkdir()
        for index, (name, (_, good)) in enumerate(FUZZED.items()):
            kept = [path.read_bytes() for path in sorted(folder_of(name).glob("*"))]
            for number, data in enumerate([good(), *kept]):
                (corpus / f"{index}-{number}").write_bytes(bytes([index]) + data)
        options = [
            f"-max_total_time={round(60 * wanted.minutes)}",
            f"-max_len={LONGEST}",
            "-rss_limit_mb=3000",
            "-print_final_stats=1",
            f"-artifact_prefix={wanted.findings}/",
        ]
        done = subprocess.run(
            [environment("atheris", [ATHERIS]), __file__, "--child", *options, corpus],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(HERE), str(KIT), libraries])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    tried = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    print(*re.findall(r"^tried: .*$", done.stderr, re.MULTILINE)[-1:], sep="\n")
    print(*re.findall(r"^#\d+.*cov: .*$", done.stderr, re.MULTILINE)[-1:], sep="\n")
    print(f"{int(tried[1]) if tried else 0:,} inputs to {len(FUZZED)} parsers in {wanted.minutes:g} minutes")
    if done.returncode or not tried:
        print(done.stderr[-6000:])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

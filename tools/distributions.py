"""The wheel, the source distribution and the bill of materials of a commit: the same bytes from every build.

    python tools/distributions.py OUT

What would differ is taken away: the files are those of the commit, with one time (the commit's) and plain
modes, whatever the umask; the build tools are pinned; members of the source distribution are sorted and
belong to nobody. `twine check` reads both. The bill of materials (CycloneDX) lists what an install with the
extras of SHIPPED brings, at the versions that were tested.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import runpy
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environments import ROOT, environment
from pins import closure

RELEASE = ROOT / "core" / "evidence" / "release.py"
SHIPPED = "roundtable-fl[client,oidc,pandas,plot,postgresql,s3,server,tensorboard,tracing]"
CHECKER = ["twine==7.0.0"]
LISTER = ["cyclonedx-bom==7.5.0"]


def distributions(out: Path) -> list[Path]:
    """Builds both of HEAD into `out`; their paths, the wheel first."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with _tree() as (tree, moment):
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(moment)}
        wheel = out / _backend("build_wheel", tree, out, environ)
        source = out / _backend("build_sdist", tree, out, environ)
    source.write_bytes(repacked(source.read_bytes(), moment))
    return [wheel, source]


@contextmanager
def _tree() -> Iterator[tuple[Path, int]]:
    """The files of HEAD in a folder of their own, and the commit's time in seconds."""
    rule = runpy.run_path(str(RELEASE))
    moment = int(_git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="roundtable-build-") as folder:
        tree = Path(folder)
        with tarfile.open(fileobj=io.BytesIO(_git_bytes("archive", "HEAD"))) as archive:
            archive.extractall(tree, filter="data")
        built = tree / "core" / "evidence" / rule["BUILT"]
        built.write_text(rule["written"](rule["release"]()))
        for place in (tree, *tree.rglob("*")):
            if not place.is_symlink():
                place.chmod(0o755 if place.is_dir() or place.stat().st_mode & 0o100 else 0o644)
            os.utime(place, (moment, moment), follow_symlinks=False)
        yield tree, moment


def _backend(hook: str, tree: Path, out: Path, environ: dict[str, str]) -> str:
    """Calls a hook of setuptools' in an environment that holds the pinned setuptools; the file's name."""
    (pin,) = [line for line in _pins() if line.startswith("setuptools==")]
    code = (
        "import os, sys; os.umask(0o022); import setuptools.build_meta as backend; "
        f"print('built', getattr(backend, {hook!r})({str(out)!r}))"
    )
    done = subprocess.run(
        [environment("build", [pin]), "-c", code],
        cwd=tree,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{hook} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.rsplit("built ", 1)[1].strip()


def repacked(archive: bytes, moment: int) -> bytes:
    """The same .tar.gz with members sorted, of one time, of plain modes, of nobody."""
    holder = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        gzip.GzipFile(fileobj=holder, mode="wb", mtime=moment, filename="") as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.linkname, plain.size = member.type, member.linkname, member.size
            plain.mtime, plain.mode = moment, 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    return holder.getvalue()


def bill_of_materials() -> bytes:
    """CycloneDX JSON of what SHIPPED brings in this environment, with licences; the same bytes each time."""
    lister = environment("sbom", LISTER).with_name("cyclonedx-py")
    words = [lister, "environment", "--output-reproducible", "--output-format", "JSON", sys.executable]
    found: dict[str, Any] = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    wanted = closure(SHIPPED)
    kept = [each for each in found["components"] if wanted.get(_plain(each["name"]))]
    missing = wanted.keys() - {_plain(each["name"]) for each in kept}
    if missing:
        raise SystemExit(f"the bill of materials lacks {', '.join(sorted(missing))}")
    references = {each["bom-ref"] for each in kept}
    found["components"] = kept
    found["dependencies"] = [
        {**each, "dependsOn": [ref for ref in each.get("dependsOn", ()) if ref in references]}
        for each in found.get("dependencies", ())
        if each["ref"] in references
    ]
    return (json.dumps(found, indent=1, sort_keys=True) + "\n").encode()


def check(files: list[Path]) -> None:
    """What an index would say of them."""
    subprocess.run([environment("twine", CHECKER), "-m", "twine", "check", "--strict", *files], check=True)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pins() -> list[str]:
    return (ROOT / "constraints.txt").read_text().split()


def _git(*words: str) -> str:
    return _git_bytes(*words).decode().strip()


def _git_bytes(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout


def build(out: Path) -> list[Path]:
    """All three in `out`: the wheel first, checked as an index would."""
    files = distributions(out)
    check(files)
    bill = out / "sbom.cdx.json"
    bill.write_bytes(bill_of_materials())
    return [*files, bill]


def main() -> int:
    """Builds into the folder that is named."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    for file in build(Path(sys.argv[1])):
        print(file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

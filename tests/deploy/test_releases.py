"""Releases: what tools/publish.py makes is checked by it and by common tools, and nothing altered passes."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import publish
import pytest
import yaml

from roundtable.core.evidence.release import NEXT

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
COORDINATOR = "roundtable-coordinator"


def wheel_of(folder: Path, version: str) -> Path:
    """As much of a wheel as says its version."""
    file = folder / f"roundtable_fl-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            f"roundtable-{version}.dist-info/METADATA", f"Name: roundtable\nVersion: {version}\n"
        )
    return file


def image_of(file: Path, manifest: bytes = b'{"schemaVersion": 2}', named: str = "") -> Path:
    """An OCI archive of one image, by its layout."""
    digest = named or f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    index = {"schemaVersion": 2, "manifests": [{"digest": digest, "size": len(manifest)}]}
    with tarfile.open(file, "w") as archive:
        for name, data in (
            ("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'),
            ("index.json", json.dumps(index).encode()),
            (f"blobs/sha256/{digest[7:]}", manifest),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(publish.PASSPHRASE, "correct horse")
    publish.new_key(tmp_path / "release.key")
    return tmp_path / "release.key"


@pytest.fixture
def release(tmp_path: Path, key: Path) -> Path:
    out = tmp_path / "out"
    image = image_of(tmp_path / f"{COORDINATOR}.tar")
    publish.make(out, NEXT, COMMIT, [wheel_of(tmp_path, NEXT)], [image], key)
    return out


def test_a_release_is_checked_offline_by_us_and_by_common_tools(release: Path, key: Path) -> None:
    public = key.with_suffix(".pub")
    assert publish.check(release, public) == f"{NEXT} {COMMIT}"
    names = {file.name for file in release.iterdir()}
    charts = {f"{COORDINATOR}-{NEXT}.tgz", f"roundtable-agent-{NEXT}.tgz"}
    assert names == charts | {
        "RELEASE",
        "SHA256SUMS",
        "SHA256SUMS.sig",
        "constraints.txt",
        f"{COORDINATOR}.tar",
        f"roundtable_fl-{NEXT}-py3-none-any.whl",
    }
    assert key.stat().st_mode & 0o777 == 0o600
    assert b"ENCRYPTED" in key.read_bytes()
    page = (ROOT / "docs" / "releases.md").read_text()
    (told,) = re.findall(r"```sh\n(sha256sum .*?)```", page, re.DOTALL)
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    assert public == release.parent / "release.pub", "where the page says that it lies"
    done = subprocess.run(["sh", "-ec", told], cwd=release, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (release / "SHA256SUMS.sig").write_bytes(bytes(64))
    assert subprocess.run(["sh", "-ec", told], cwd=release, capture_output=True, check=False).returncode


def test_a_chart_of_a_release_names_its_image_by_digest(release: Path, tmp_path: Path) -> None:
    digest = publish.digest_of(release / f"{COORDINATOR}.tar")
    with tarfile.open(release / f"{COORDINATOR}-{NEXT}.tgz") as archive:
        archive.extractall(tmp_path / "charts", filter="data")
    values = yaml.safe_load((tmp_path / "charts" / COORDINATOR / "values.yaml").read_text())
    assert values["image"]["digest"] == digest
    there = {
        file.relative_to(ROOT / "deploy" / "helm") for file in (ROOT / "deploy/helm" / COORDINATOR).rglob("*")
    }
    assert {file.relative_to(tmp_path / "charts") for file in (tmp_path / "charts").rglob("*")} - {
        Path(COORDINATOR)
    } == there
    if not list((ROOT / "build" / "wheels").glob("helm-sdkpy*/*.so")):
        pytest.skip("Helm's library is not here: python tools/charts.py --check fetches it")
    words = [sys.executable, ROOT / "tools" / "charts.py", tmp_path / "charts" / COORDINATOR]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f'image: "{COORDINATOR}@{digest}"' in done.stdout


def test_an_agents_chart_without_an_image_goes_by_the_release(release: Path) -> None:
    with tarfile.open(release / f"roundtable-agent-{NEXT}.tgz") as archive:
        member = archive.extractfile("roundtable-agent/values.yaml")
        assert member is not None
        assert yaml.safe_load(member.read())["image"]["digest"] == ""
    kept = (ROOT / "deploy" / "kubernetes" / "roundtable-agent.yaml").read_text()
    assert f'image: "roundtable-agent:{NEXT}-cuda"' in kept


def sums_of(release: Path, change: Callable[[str], str]) -> None:
    file = release / "SHA256SUMS"
    file.write_text(change(file.read_text()))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda out: (out / "constraints.txt").write_text("torch==0\n"), "constraints.txt was changed"),
        (lambda out: (out / f"{COORDINATOR}-{NEXT}.tgz").unlink(), "tgz is missing"),
        (lambda out: (out / "more.whl").write_bytes(b""), "more.whl is not part of the release"),
        (lambda out: sums_of(out, lambda text: text.replace("0", "1")), "is not what the owner of"),
        (lambda out: sums_of(out, lambda text: ""), "is not what the owner of"),
        (lambda out: (out / "SHA256SUMS.sig").write_bytes(b"short"), "is not what the owner of"),
        (lambda out: (out / "SHA256SUMS.sig").unlink(), "SHA256SUMS.sig cannot be read"),
        (lambda out: (out / "RELEASE").write_text("9.9.9 x\n"), "RELEASE was changed"),
    ],
)
def test_what_was_altered_is_named(
    release: Path, key: Path, harm: Callable[[Path], object], said: str
) -> None:
    harm(release)
    with pytest.raises(publish.Refused, match=said):
        publish.check(release, key.with_suffix(".pub"))


def test_another_key_does_not_pass(release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = publish.new_key(tmp_path / "other.key")
    assert publish.main(["check", str(release), "--key", str(other)]) == 2
    assert "do not use this release" in capsys.readouterr().err
    assert publish.main(["check", str(release), "--key", str(release / "RELEASE")]) == 2
    assert "cannot be read as a public key" in capsys.readouterr().err


def test_what_is_no_release_is_not_made(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, full = wheel_of(tmp_path, NEXT), tmp_path / "full"
    full.mkdir()
    (full / "file").touch()

    def refused(said: str, version: str = NEXT, out: Path = tmp_path / "out", **changed: Path) -> None:
        given = {"wheel": wheel, "key": key, **changed}
        images = [given.pop("image")] if "image" in given else []
        with pytest.raises(publish.Refused, match=said):
            publish.make(out, version, COMMIT, [given["wheel"]], images, given["key"])
        assert not out.exists() or out == full

    refused("is not a release: commit everything, tag", version=f"{NEXT}.dev3+g0123456789ab")
    refused("is not a release", version=f"{NEXT}.post1+g0123456789ab.dirty")
    refused("is not empty", out=full)
    refused("build the wheel again", wheel=wheel_of(tmp_path, "9.9.9"))
    refused("no chart is called postgres", image=image_of(tmp_path / "postgres.tar"))
    refused("is no OCI archive", image=wheel)
    swapped = image_of(tmp_path / f"{COORDINATOR}.tar", named="sha256:" + 64 * "0")
    refused("its manifest is not the one that its index names", image=swapped)
    refused("is not a digest", image=image_of(tmp_path / "roundtable-agent.tar", named="sha256:../../x"))
    monkeypatch.setenv(publish.PASSPHRASE, "wrong")
    refused(f"is the passphrase in {publish.PASSPHRASE} right", key=key)
    with pytest.raises(publish.Refused, match="a release key is made once"):
        publish.new_key(key)


@pytest.mark.parametrize(
    ("release", "python", "passes"),
    [
        (f"{NEXT} {COMMIT}", "3.11-slim-bookworm", False),
        (f"{NEXT} {COMMIT}", f"3.11-slim-bookworm@sha256:{64 * 'a'}", True),
        (f"{NEXT}.dev12+g0123456789ab {COMMIT}", "3.11-slim-bookworm", True),
    ],
)
def test_an_image_of_a_release_needs_a_base_with_its_digest(release: str, python: str, passes: bool) -> None:
    dockerfile = re.sub(r"\\\n\s*", "", (ROOT / "deploy" / "docker" / "Dockerfile").read_text())
    (command,) = re.findall(r"^RUN (case .* esac)$", dockerfile, re.MULTILINE)
    given = {"RELEASE": release, "PYTHON": python, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", command], env=given, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is passes
    assert passes or "names no digest" in done.stderr


@pytest.mark.slow
def test_a_tagged_commit_becomes_a_release(tmp_path: Path, key: Path) -> None:
    """The whole way, in a clone with the tag: its wheel is built, packed, signed and checked."""
    if not (ROOT / ".git").exists():
        pytest.skip("this copy has no history")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / ".venv").symlink_to(sys.prefix)
    (clone / ".git" / "info" / "exclude").write_text(".venv\n")
    words = [sys.executable, clone / "tools" / "publish.py", "make", tmp_path / "out", "--key", key]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not a release" in done.stderr
    subprocess.run(["git", "-C", clone, "tag", f"v{NEXT}"], check=True)
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert publish.check(tmp_path / "out", key.with_suffix(".pub")).startswith(f"{NEXT} ")

"""Makes a release and checks one: wheel, pins, charts and images in one folder, under one signature.

    python tools/publish.py key release.key                       # once: release.key and release.pub
    python tools/publish.py make OUT --key release.key --image roundtable-coordinator.tar ...
    python tools/publish.py check OUT --key release.pub           # needs no network

`make` refuses a tree that is not a tagged commit. Images are OCI archives; each chart is packed with the
digest of the image that has its name. SHA256SUMS names every file; SHA256SUMS.sig is Ed25519 over it, so
that sha256sum and openssl check a release too (docs/releases.md).
"""

from __future__ import annotations

import argparse
import getpass
import gzip
import hashlib
import io
import json
import os
import re
import runpy
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from distributions import build
from environments import ROOT

CHARTS = ROOT / "deploy" / "helm"
SUMS, SIGNATURE, RELEASE = "SHA256SUMS", "SHA256SUMS.sig", "RELEASE"
PASSPHRASE = "ROUNDTABLE_RELEASE_PASSPHRASE"
NUMBERS = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._+-]*)")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Refused(Exception):
    """What is wrong with a release, and what to do."""


def new_key(file: Path) -> Path:
    """Writes a sealed private key, and beside it the public one, whose path is returned."""
    public = file.with_suffix(".pub")
    for taken in (file, public):
        if taken.exists():
            raise Refused(f"{taken} exists: a release key is made once; move it away if it is to be replaced")
    key = Ed25519PrivateKey.generate()
    seal = serialization.BestAvailableEncryption(_passphrase())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, seal)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(pem)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return public


def need_release(version: str) -> None:
    """Refuses what lies between two releases."""
    if not NUMBERS.fullmatch(version):
        raise Refused(
            f"this tree is {version}, which is not a release: commit everything, tag the commit "
            f"`v{version.partition('.dev')[0]}`, and run this again"
        )


def make(out: Path, version: str, commit: str, packages: list[Path], images: list[Path], key: Path) -> None:
    """Fills the empty folder `out`; `packages` are the wheel, and what else was built of the same commit."""
    need_release(version)
    signer = _private(key)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty: a release is made in a folder of its own")
    wheel = packages[0]
    said = _version_of(wheel)
    if said != version:
        raise Refused(f"{wheel.name} says that it is {said}, the tree is {version}: build the wheel again")
    digests = {image.stem: digest_of(image) for image in images}
    unknown = digests.keys() - {chart.parent.name for chart in CHARTS.glob("*/Chart.yaml")}
    if unknown:
        raise Refused(f"no chart is called {', '.join(sorted(unknown))}: name an image's file like its chart")
    out.mkdir(parents=True, exist_ok=True)
    (out / RELEASE).write_text(f"{version} {commit}\n")
    for file in (*packages, ROOT / "constraints.txt", *images):
        shutil.copyfile(file, out / file.name)
    for chart in sorted(file.parent for file in CHARTS.glob("*/Chart.yaml")):
        archive = packed(chart, version, digests.get(chart.name, ""))
        (out / f"{chart.name}-{version}.tgz").write_bytes(archive)
    files = sorted(out.iterdir())
    sums = "".join(f"{_sum(file)}  {file.name}\n" for file in files).encode()
    (out / SUMS).write_bytes(sums)
    (out / SIGNATURE).write_bytes(signer.sign(sums))


def check(folder: Path, key: Path) -> str:
    """What the folder's release is, after its signature and every file have been checked."""
    try:
        public = serialization.load_pem_public_key(_read(key))
        if not isinstance(public, Ed25519PublicKey):
            raise Refused(f"{key} is no Ed25519 key: use the release.pub that you were given")
        sums = _read(folder / SUMS)
        public.verify(_read(folder / SIGNATURE), sums)
    except ValueError as error:
        raise Refused(f"{key} cannot be read as a public key: {error}") from error
    except InvalidSignature as error:
        raise Refused(
            f"{folder / SUMS} is not what the owner of {key} signed: do not use this release"
        ) from error
    named = {}
    for line in sums.decode("ascii", "replace").splitlines():
        found = LINE.fullmatch(line)
        if found is None or found[2] in named:
            raise Refused(f"{folder / SUMS} has a line that is not a sum, or one file twice: {line!a}")
        named[found[2]] = found[1]
    there = {file.name for file in folder.iterdir()} - {SUMS, SIGNATURE}
    for wrong, said in (
        (named.keys() - there, "is missing: fetch it again"),
        (there - named.keys(), "is not part of the release: move it away"),
        (
            {name for name in named.keys() & there if _sum(folder / name) != named[name]},
            "was changed: fetch it again",
        ),
    ):
        if wrong:
            raise Refused(f"{folder / min(wrong)} {said}")
    return _read(folder / RELEASE).decode("ascii", "replace").strip()


def packed(chart: Path, version: str, digest: str) -> bytes:
    """A chart's archive, the same bytes each time; with the digest of its image, if there is one."""
    about = (chart / "Chart.yaml").read_text()
    for name in ("version", "appVersion"):
        if not re.search(rf'(?m)^{name}: "?{re.escape(version)}"?$', about):
            raise Refused(f"{chart / 'Chart.yaml'}: {name} is not {version}: raise it before the tag")
    holder = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=holder, mode="wb", mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for file in sorted(file for file in chart.rglob("*") if file.is_file()):
            data = file.read_bytes()
            if digest and file.name == "values.yaml":
                data = _pinned(data, digest, file)
            member = tarfile.TarInfo(f"{chart.name}/{file.relative_to(chart)}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return holder.getvalue()


def _pinned(values: bytes, digest: str, file: Path) -> bytes:
    pinned, count = re.subn(rb'(?m)^  digest: ""', b'  digest: "%s"' % digest.encode(), values)
    if count != 1:
        raise Refused(f'{file}: it has {count} lines `digest: ""` under image, and needs one')
    return pinned


def digest_of(image: Path) -> str:
    """The digest by which a registry will know the one image of an OCI archive."""
    try:
        with tarfile.open(image) as archive:

            def read(name: str) -> bytes:
                member = archive.extractfile(name)
                if member is None:
                    raise KeyError(name)
                return member.read()

            listed: list[dict[str, Any]] = json.loads(read("index.json"))["manifests"]
            (digest,) = [str(each["digest"]) for each in listed]
            if not DIGEST.fullmatch(digest):
                raise Refused(f"{image}: its index names {digest!a}, which is not a digest")
            manifest = read(f"blobs/sha256/{digest.partition(':')[2]}")
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise Refused(
            f"{image} is no OCI archive of one image ({type(error).__name__}: {error}): "
            "podman save --format oci-archive writes one"
        ) from error
    if f"sha256:{hashlib.sha256(manifest).hexdigest()}" != digest:
        raise Refused(f"{image}: its manifest is not the one that its index names: save it again")
    return digest


def _version_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (about,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        (said,) = re.findall(r"(?m)^Version: (.*)$", archive.read(about).decode())
    return str(said)


def _private(file: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(_read(file), _passphrase())
    except (ValueError, TypeError) as error:
        raise Refused(
            f"{file} cannot be opened: {error}; is the passphrase in {PASSPHRASE} right?"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise Refused(f"{file} is no Ed25519 key: `python tools/publish.py key` makes one")
    return key


def _passphrase() -> bytes:
    given = os.environ.get(PASSPHRASE) or (
        getpass.getpass("release key's passphrase: ") if sys.stdin.isatty() else ""
    )
    if not given:
        raise Refused(f"the release key is sealed: set {PASSPHRASE}, or run this in a terminal")
    return given.encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error


def _sum(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror}") from error


def main(words: list[str] | None = None) -> int:
    """Runs one of the three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("key", help="make a release key").add_argument("file", type=Path)
    making = commands.add_parser("make", help="make a release of this tree")
    making.add_argument(
        "--image", type=Path, action="append", default=[], help="OCI archive named like its chart"
    )
    checking = commands.add_parser("check", help="check a release, offline")
    for each, help_ in ((making, "release.key"), (checking, "release.pub")):
        each.add_argument("folder", type=Path)
        each.add_argument("--key", type=Path, required=True, help=help_)
    chosen = parser.parse_args(words)
    try:
        if chosen.command == "key":
            print(f"{new_key(chosen.file)} is what others check releases with")
        elif chosen.command == "check":
            print(f"{chosen.folder} is Roundtable {check(chosen.folder, chosen.key)}, whole and signed")
        else:
            this = runpy.run_path(str(ROOT / "core" / "evidence" / "release.py"))["release"]()
            need_release(this.version)
            print("building the wheel, the source distribution and the bill of materials", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                packages = build(Path(folder))
                make(chosen.folder, this.version, this.commit, packages, chosen.image, chosen.key)
            print(f"{chosen.folder} is release {this.version}")
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Secure aggregation against its floor and its peer: CPU milliseconds of one silo and of the coordinator.

    python benchmarks/secagg.py [--cases small|all] [--repeat 5] [--flower /path/to/python] [--large]

Ours is the whole protocol through its state machines, malicious-coordinator checks included: from a
float32 update to the bytes that are uploaded and the last share, and from the first advertisement to
the unmasked sum. The floor does the same work with bare primitives in straight loops and no protocol
around them: the same number of key pairs, agreements, signatures made and verified, shares, keystream
bytes, additions and hashed bytes. The peer is Flower's SecAgg+ (its client functions and its workflow,
see secagg_flower.py), run by the interpreter given with --flower, with as many shares and the same
threshold. All are measured in turn in one run, in CPU time of one process; medians are printed. Of a
silo's bytes, those of its masked vector (4 for each parameter) are left out. One case is a job that says
nothing but `secure_aggregation = true`: 100 silos with the service's corruption and dropout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, GCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from roundtable.core.privacy_table import DROPOUT_TOLERANCE
from roundtable.privacy.collusion import CORRUPTION_OF_MANY
from roundtable.privacy.secagg import (
    Ed25519Signer,
    MemoryReleases,
    QuantisedUpdate,
    Quantiser,
    SecAggClient,
    SecAggParameters,
    SecAggServer,
    ServerPhase,
    Session,
    choose_parameters,
    shamir,
)

PIECE = 1 << 18
TARGET = 2.0


@dataclass(frozen=True)
class Case:
    n: int
    length: int
    drops: int
    corruption: float = 0.1
    dropout: float = 0.1

    @property
    def plan(self) -> SecAggParameters:
        return choose_parameters(self.n, self.dropout, self.corruption)

    @property
    def neighbours_met(self) -> int:
        """How many of a silo's neighbours survive."""
        return round(self.plan.k * (self.n - self.drops) / (self.n - 1)) if self.drops else self.plan.k

    def __str__(self) -> str:
        graph = "full graph" if self.plan.full_graph else f"k = {self.plan.k}"
        return f"{self.n} × {self.length / 1e6:g} M, {graph}, t = {self.plan.t}, {self.drops} dropped"


class Stopwatch:
    """CPU seconds by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def run(self, who: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = time.process_time()
        answer = call(*arguments)
        self.spent[who] = self.spent.get(who, 0.0) + time.process_time() - start
        return answer


def ours(case: Case, update: np.ndarray, upload: np.ndarray) -> tuple[float, float, int, int]:
    """CPU seconds of the median silo and of the coordinator; bytes that the last silo sent and received."""
    session, plan, watch = Session("benchmark", 0, 0, case.length), case.plan, Stopwatch()
    names = [f"silo-{index:04d}" for index in range(case.n)]
    signers = [Ed25519Signer() for _ in names]
    directory = {name: signer.public for name, signer in zip(names, signers, strict=True)}
    server = watch.run("coordinator", SecAggServer, session, plan, directory)
    clients = {
        name: watch.run(name, SecAggClient, session, plan, name, signer, directory, MemoryReleases())
        for name, signer in zip(names, signers, strict=True)
    }
    adverts = {name: watch.run(name, client.advertise) for name, client in clients.items()}
    for advert in adverts.values():
        watch.run("coordinator", server.receive, advert)
    dropped, last = set(names[: case.drops]), names[-1]
    sent, received = len(adverts[last]), 0
    while server.phase is not ServerPhase.DONE:
        for name, message in watch.run("coordinator", server.advance).items():
            received += len(message) * (name == last)
            if server.phase is not ServerPhase.MASKED:
                answer = watch.run(name, clients[name].handle, message)
                watch.run("coordinator", server.receive, answer)
                sent += len(answer) * (name == last)
            elif name not in dropped:
                watch.run(name, clients[name].handle, message)
                header = watch.run(name, masked, clients[name], update, plan, upload)
                watch.run("coordinator", server.fold, header, upload)
                sent += len(header) * (name == last)
    quantiser = Quantiser.of(plan)
    mean = quantiser.decode_sum(server.total[:1000]) / (case.n - case.drops)
    assert np.abs(mean - update[:1000]).max() <= quantiser.step, "the sum is wrong"
    silos = [watch.spent[name] for name in names if name not in dropped]
    return statistics.median(silos), watch.spent["coordinator"], sent, received


def masked(client: SecAggClient, update: np.ndarray, plan: SecAggParameters, upload: np.ndarray) -> bytes:
    at = 0
    for chunk in client.masked_chunks(QuantisedUpdate(update, 1, Quantiser.of(plan))):
        upload[at : at + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        at += len(chunk)
    return client.masked()


def derive(secret: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=bytes(32), info=b"floor").derive(secret)


def keystream(count: int, length: int, total: np.ndarray, piece_done: Callable[[np.ndarray], object]) -> None:
    """Expand and add `count` masks, piece by piece."""
    streams = [Cipher(AES(os.urandom(32)), GCM(bytes(12))).encryptor() for _ in range(count)]
    zeros, mask = memoryview(bytes(PIECE)), bytearray(PIECE + 16)
    words = np.frombuffer(mask, dtype=np.uint32, count=PIECE // 4)
    for start in range(0, length, PIECE // 4):
        piece = total[start : start + PIECE // 4]
        for stream in streams:
            stream.update_into(zeros[: piece.nbytes], mask)
            np.add(piece, words[: len(piece)], out=piece)
        piece_done(piece)


def floor_silo(case: Case, update: np.ndarray) -> float:
    """CPU seconds of one silo's primitives."""
    plan = case.plan
    others, signer = plan.k, Ed25519PrivateKey.generate()
    verify, signature = signer.public_key().verify, signer.sign(bytes(32))
    peer = X25519PrivateKey.generate().public_key().public_bytes_raw()
    total = np.empty(case.length, dtype=np.uint32)
    start = time.process_time()
    box, mask = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    for _ in range(5 if plan.full_graph else 6):
        signer.sign(bytes(32))
    for _ in range(case.n + plan.consents + (0 if plan.full_graph else case.neighbours_met)):
        verify(signature, bytes(32))
    holders = range(1, others + 1 + plan.full_graph)
    shares = shamir.share(bytes(64), plan.t, holders)
    for direction in range(2):
        for _ in range(others):
            key = derive(box.exchange(X25519PublicKey.from_public_bytes(peer)))
            cipher = AESGCM(key)
            sealed = cipher.encrypt(bytes(12), shares[0], bytes(42))
            if direction:
                cipher.decrypt(bytes(12), sealed, bytes(42))
    for _ in range(others):
        derive(mask.exchange(X25519PublicKey.from_public_bytes(peer)))
    scale = 1e8 / max(1.0, float(np.linalg.norm(update)))
    random = Cipher(AES(os.urandom(32)), CTR(bytes(16))).encryptor()
    for at in range(0, case.length, PIECE // 4):
        values = np.multiply(update[at : at + PIECE // 4], scale, dtype=np.float64)
        values += np.frombuffer(random.update(bytes(4 * len(values))), dtype=np.uint32) * 2.0**-32
        total[at : at + PIECE // 4] = np.floor(values, out=values).astype(np.int64)
    digest = blake3()
    keystream(others + 1, case.length, total, lambda piece: digest.update(piece.data.cast("B")))
    digest.digest()
    return time.process_time() - start


def floor_coordinator(case: Case, upload: np.ndarray) -> float:
    """CPU seconds of the coordinator's primitives."""
    plan, alive = case.plan, case.n - case.drops
    signer = Ed25519PrivateKey.generate()
    verify, signature = signer.public_key().verify, signer.sign(bytes(32))
    peer = X25519PrivateKey.generate().public_key().public_bytes_raw()
    holders = range(1, plan.k + 1 + plan.full_graph)
    shares = shamir.share(bytes(32), plan.t, holders)[: plan.t]
    private = X25519PrivateKey.generate()
    start = time.process_time()
    for _ in range((2 if plan.full_graph else 3) * case.n + 3 * alive):
        verify(signature, bytes(32))
    total = np.zeros(case.length, dtype=np.uint32)
    words = upload.view(np.uint32)
    for _ in range(alive):
        blake3(upload).digest()
        np.add(total, words, out=total)
    coefficients = shamir.lagrange(holders[: plan.t])
    for _ in range(case.n):
        if not plan.full_graph:
            coefficients = shamir.lagrange(holders[: plan.t])
        derive(shamir.combine(coefficients, shares))
    recovered = case.drops * case.neighbours_met
    for _ in range(recovered):
        derive(private.exchange(X25519PublicKey.from_public_bytes(peer)))
    keystream(alive + recovered, case.length, total, lambda piece: None)
    return time.process_time() - start


def flower(python: str, case: Case) -> tuple[float, float]:
    """CPU seconds of Flower's median client and of its workflow."""
    shares = case.n if case.plan.full_graph else case.plan.k + 1
    script = Path(__file__).with_name("secagg_flower.py")
    numbers = [case.n, case.length, case.drops, shares, case.plan.t]
    answer = subprocess.run(
        [python, str(script), *map(str, numbers)], check=True, capture_output=True, text=True
    )
    spent = json.loads(answer.stdout.splitlines()[-1])
    return spent["client"], spent["server"]


def report(case: Case, repeat: int, python: str | None) -> None:
    update = (np.random.default_rng(0).normal(size=case.length) * 1e-4).astype(np.float32)
    upload = np.zeros(4 * case.length, dtype=np.uint8)
    rows = [
        (*ours(case, update, upload), floor_silo(case, update), floor_coordinator(case, upload))
        for _ in range(repeat)
    ]
    medians = [statistics.median(row) for row in zip(*rows, strict=True)]
    silo, coordinator, silo_floor, coordinator_floor = (1e3 * medians[at] for at in (0, 1, 4, 5))
    print(f"\n{case}\n  {case.plan.summary()}")
    print(f"  beside its vector a silo sends {medians[2]:,.0f} bytes and receives {medians[3]:,.0f}")
    for who, own, floor in (("silo", silo, silo_floor), ("coordinator", coordinator, coordinator_floor)):
        ratio = own / floor
        verdict = "met" if ratio <= TARGET else "MISSED"
        figures = f"ours {own:8.1f} ms   floor {floor:8.1f} ms   ratio {ratio:.2f}"
        print(f"  {who:12} {figures}   target {TARGET:g}: {verdict}")
    if python:
        client, server = (1e3 * seconds for seconds in flower(python, case))
        print(f"  {'Flower':12} client {client:8.1f} ms ({client / silo:.1f} × ours)", end="   ")
        print(f"server {server:8.1f} ms ({server / coordinator:.1f} × ours)")


def resident() -> int:
    """Bytes resident in memory at the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def large(length: int = 25_000_000) -> None:
    """20 silos of 25 M: the peak above idle in vectors, with uploads in a memory-mapped file."""
    case = Case(20, length, 2)
    update = np.full(length, 1e-5, dtype=np.float32)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4 * length)
        upload = np.memmap(file.name, dtype=np.uint8, mode="r+")
        ours(Case(3, 1000, 0), update[:1000], np.zeros(4000, dtype=np.uint8))
        idle = resident()
        silo, coordinator, _, _ = ours(case, update, upload)
        peak = (resident() - idle) / (4 * length)
    verdict = "met" if peak <= 3 else "MISSED"
    print(f"\n{case}\n  silo {silo:.2f} s, coordinator {coordinator:.2f} s, everything in one process")
    print(f"  peak above idle {peak:.2f} vectors, the mapped upload included; target 3: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", choices=["small", "all"], default="all")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--flower", help="the interpreter of an environment that has Flower")
    parser.add_argument("--large", action="store_true", help="20 × 25 M as well")
    options = parser.parse_args()
    print(f"{sys.version.split()[0]}, numpy {np.__version__}; CPU milliseconds, medians of {options.repeat}")
    for case in [Case(20, 1_000_000, 0), Case(20, 1_000_000, 2)]:
        report(case, options.repeat, options.flower)
    if options.cases == "all":
        report(Case(100, 1_000_000, 10), min(options.repeat, 3), options.flower)
        default = Case(100, 1_000_000, 10, CORRUPTION_OF_MANY, DROPOUT_TOLERANCE)
        report(default, options.repeat, options.flower)
    if options.large:
        large()


if __name__ == "__main__":
    main()

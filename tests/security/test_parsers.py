"""Every parser of a file or message that somebody else wrote: noise and damage give our own errors, only."""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import re
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from decoders import DECODERS, strange
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from roundtable.client.agent.release_ledger import ReleaseLedger
from roundtable.client.agent.silo_log import SiloLog
from roundtable.client.policy.config import load_agent_config
from roundtable.client.policy.known_jobs import KnownJobs
from roundtable.core import Layout, Model, parse_job
from roundtable.core.config import job_from_json
from roundtable.core.errors import RoundtableError
from roundtable.core.evidence.audit_log import read_log
from roundtable.core.evidence.provenance_check import check_provenance
from roundtable.core.identity.certificates import certificates_in, key_in_request, load_key, signing_request
from roundtable.core.identity.credentials import (
    create_ca,
    issue,
    load_credentials,
    load_silo_identity,
    verify_identity,
)
from roundtable.core.identity.invitation import Invitation, Secret
from roundtable.core.identity.revocation import parse_list, revoke
from roundtable.core.models import model_blocks, open_model
from roundtable.privacy import Budget, Charge, Entry, gaussian_charge
from roundtable.privacy.example_level.own_account import SiloAccount
from roundtable.privacy.secagg.framing import Kind, seal, unseal
from roundtable.server import load_server_config
from roundtable.server.auth.oidc import OidcTable, Provider

INPUTS = 60
"""For each parser; the slow suite tries a hundred times as many."""


@cache
def place() -> Path:
    """A folder with one good file of each kind."""
    folder = Path(mkdtemp(prefix="roundtable-parsers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    create_ca(folder / "ca")
    issue(folder / "ca", "north", "agent", folder / "north")
    issue(folder / "ca", "hub", "coordinator", folder / "hub", ["localhost"])
    revoke(folder / "ca", folder / "north" / "node.crt")
    (folder / "model").write_bytes(b"{}")
    return folder


def _written(data: bytes, name: str) -> Path:
    path = place() / name
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _good(*parts: str) -> bytes:
    return place().joinpath(*parts).read_bytes()


def _credentials(data: bytes) -> None:
    folder = place() / "mixed"
    folder.mkdir(exist_ok=True)
    for name in ("ca.crt", "node.key", "identity.crt", "identity.key"):
        (folder / name).write_bytes(_good("north", name))
    (folder / "node.crt").write_bytes(data)
    load_credentials(folder)


def _silo_identity(data: bytes) -> None:
    folder = place() / "mixed"
    folder.mkdir(exist_ok=True)
    for name in ("ca.crt", "identity.crt"):
        (folder / name).write_bytes(_good("north", name))
    (folder / "identity.key").write_bytes(data)
    load_silo_identity(folder)


def _journal(data: bytes) -> None:
    SiloLog(_written(data, "audit.jsonl"), place() / "north").note("north", "x")


def _known(data: bytes) -> None:
    folder = place() / "state" / "jobs" / "known"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "j.json").write_bytes(data)
    KnownJobs(place() / "state").all()


def _layout() -> Layout:
    return Layout.of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))


@cache
def _model() -> bytes:
    module, layout = nn.BatchNorm1d(2), Layout.of(nn.BatchNorm1d(2))
    local = {"num_batches_tracked": module.state_dict()["num_batches_tracked"]}
    made = Model(layout, layout.flatten(module), local, {"job": "\u00e9"})
    return b"".join(bytes(block) for block in model_blocks(made))


def _charge() -> Charge:
    return gaussian_charge("client", {"sampling": "poisson", "rate": 0.1}, 1.0)


def _envelope() -> bytes:
    return seal(Kind.ALIVE, bytes(32), b"payload")


def _provider(data: bytes) -> None:
    path = _written(data, "keys.json")
    table = OidcTable(issuer="i", audience="a", jwks=str(path), roles={"x": "viewer"})
    Provider(table).check(_text(data))


PARSERS: dict[str, tuple[Callable[[bytes], Any], Callable[[], bytes]]] = {
    "job.toml": (
        lambda data: parse_job(_text(data)),
        lambda: b'task = "t"\nrounds = 3\n[cohort]\nsize = 2\n',
    ),
    "job JSON": (
        lambda data: job_from_json(_text(data)),
        lambda: parse_job('task = "t"\nrounds = 2').to_json().encode(),
    ),
    "agent.toml": (
        lambda data: load_agent_config(_written(data, "agent.toml")),
        lambda: (
            b'coordinator = "a:1"\n[tasks]\nt = "t.py:T"\n[tasks.u]\nuse = "u.py"\n[policy]\nrounds = 2\n'
        ),
    ),
    "coordinator.toml": (
        lambda data: load_server_config(_written(data, "coordinator.toml")),
        lambda: b'listen = "0.0.0.0:7443"\nenrolment = "0.0.0.0:7444"\n',
    ),
    "certificate": (lambda data: certificates_in(data, "x"), lambda: _good("north", "node.crt")),
    "identity": (
        lambda data: verify_identity(data, _good("ca", "ca.crt")),
        lambda: _good("north", "identity.crt"),
    ),
    "node.crt": (_credentials, lambda: _good("north", "node.crt")),
    "identity.key": (_silo_identity, lambda: _good("north", "identity.key")),
    "key": (lambda data: load_key(_written(data, "x.key")), lambda: _good("north", "node.key")),
    "request": (key_in_request, lambda: signing_request(load_key(place() / "north" / "node.key"))),
    "crl.pem": (
        lambda data: parse_list(data, certificates_in(_good("ca", "ca.crt"), "ca"), "crl.pem"),
        lambda: _good("ca", "crl.pem"),
    ),
    "invitation": (
        lambda data: Invitation.parse(_text(data)),
        lambda: str(Invitation(Secret("00" * 8, bytes(32)), bytes(32))).encode(),
    ),
    "token": (
        lambda data: Secret.of_token(_text(data)),
        lambda: Secret("00" * 8, bytes(32)).to_token().encode(),
    ),
    "audit log": (
        lambda data: read_log(_text(data).splitlines(), _good("ca", "ca.crt")),
        lambda: (
            b'{"entry":{"sequence":1,"time":1,"actor":"a","action":"b","object":"c","detail":{},'
            b'"previous":"0","hash":"0"}}\n{"seal":{"purpose":"seal","statement":{},"signature":""}}'
        ),
    ),
    "silo's log": (_journal, lambda: b'{"entry":{"sequence":1}}\n'),
    "known jobs": (_known, lambda: b'{"id":"j","digest":"d"}'),
    "provenance": (
        lambda data: check_provenance(
            place() / "model", _written(data, "statement.json"), _good("ca", "ca.crt")
        ),
        lambda: b'{"purpose":"provenance","statement":{"model":"x"},"signature":"00","certificate":"x"}',
    ),
    "model": (lambda data: open_model(_written(data, "m.safetensors")), _model),
    "layout": (lambda data: Layout.from_json(_text(data)), lambda: _layout().to_json().encode()),
    "secure aggregation": (unseal, _envelope),
    "charge": (lambda data: Charge.from_json(_text(data)), lambda: _charge().to_json().encode()),
    "silo's account": (
        lambda data: SiloAccount.from_json(_text(data)),
        lambda: (
            SiloAccount(Budget("p", 1.0, 1e-5), (Entry("p", "", "j", 1, 1, _charge(), True),))
            .to_json()
            .encode()
        ),
    ),
    "releases": (
        lambda data: ReleaseLedger(_written(data, "releases.jsonl")),
        lambda: b'{"kind":"begun","job":"j","round":1,"attempt":1}\n',
    ),
    "JSON Web Token": (
        _provider,
        lambda: base64.urlsafe_b64encode(json.dumps({"alg": "none"}).encode()) + b".e30.",
    ),
}


CORPUS = Path(__file__).parent / "corpus"
"""Inputs that once were finds, or nearly: a folder for each parser, with "-" for what is no letter."""
FUZZED = {
    **PARSERS,
    **{name: (parse, partial(strange, name, 0)) for name, parse in DECODERS.items()},
}


def folder_of(name: str) -> Path:
    """Where a parser's inputs are kept."""
    return CORPUS / re.sub(r"[^A-Za-z0-9]+", "-", name)


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    """Noise, or the good file with a few places changed, removed or repeated."""

    def change(data: tuple[int, int, bytes]) -> bytes:
        start, length, other = data
        return good[:start] + other + good[start + length :]

    places = st.integers(0, len(good))
    edits = st.tuples(places, st.integers(0, 40), st.binary(max_size=40) | st.just(b"[" * 3000)).map(change)
    return (
        st.binary(max_size=400)
        | edits
        | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
    )


@cache
def _example(name: str) -> bytes:
    return FUZZED[name][1]()


def _check(name: str, data: st.DataObject) -> None:
    inputs = damaged(_example(name))
    if name in DECODERS:
        inputs |= st.integers(0, 1 << 32).map(partial(strange, name))
    with contextlib.suppress(RoundtableError):
        FUZZED[name][0](data.draw(inputs))


@pytest.mark.parametrize("name", FUZZED)
def test_inputs_that_were_kept_give_our_own_errors(name: str) -> None:
    with contextlib.suppress(RoundtableError):
        FUZZED[name][0](_example(name))
    for path in sorted(folder_of(name).glob("*")):
        with contextlib.suppress(RoundtableError):
            FUZZED[name][0](path.read_bytes())


def test_every_kept_input_has_its_parser() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= {folder_of(name).name for name in FUZZED}


@pytest.mark.parametrize("name", FUZZED)
@settings(max_examples=INPUTS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_give_our_own_errors(name: str, data: st.DataObject) -> None:
    _check(name, data)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FUZZED)
@settings(max_examples=100 * INPUTS, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_damaged_files_give_our_own_errors(name: str, data: st.DataObject) -> None:
    _check(name, data)

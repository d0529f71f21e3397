"""Operators of an identity provider, whose keys lie behind a small web server of our own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from service import running

from roundtable.core.errors import ConfigError, IdentityError
from roundtable.proto import administration_pb2, administration_pb2_grpc, operator_pb2, operator_pb2_grpc
from roundtable.server import ServerConfig
from roundtable.server.auth.oidc import LEEWAY_SECONDS, OidcTable, Provider

jwt = pytest.importorskip("jwt")
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402


class Issuer:
    """Signs tokens and publishes keys."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        published = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        self.keys = {"keys": [{**published, "kid": "k1", "alg": "ES256", "use": "sig"}]}

    def token(self, key: Any = None, algorithm: str = "ES256", kid: str = "k1", **changes: Any) -> str:
        now = time.time()
        claims = {
            "iss": "https://id.example",
            "aud": "roundtable",
            "sub": "ada",
            "iat": now,
            "exp": now + 60,
            "roles": ["fl-viewers", "others"],
        }
        claims = {name: value for name, value in {**claims, **changes}.items() if value is not None}
        return jwt.encode(claims, key or self.key, algorithm, headers={"kid": kid})


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def address(issuer: Issuer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(issuer.keys).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/keys"
    server.shutdown()


ROLES = {"fl-viewers": "viewer", "fl-operators": "operator"}


@pytest.fixture(params=["http", "file"])
def provider(request: pytest.FixtureRequest, issuer: Issuer, address: str, tmp_path: Path) -> Provider:
    place = address
    if request.param == "file":
        (tmp_path / "keys.json").write_text(json.dumps(issuer.keys))
        place = str(tmp_path / "keys.json")
    return Provider(OidcTable(issuer="https://id.example", audience="roundtable", jwks=place, roles=ROLES))


def test_a_good_token_gives_the_strongest_role_of_its_groups(provider: Provider, issuer: Issuer) -> None:
    ends = time.time() + 60
    name, role, expires = provider.check(issuer.token(exp=ends))
    assert (name, role) == ("ada", "viewer")
    assert expires == ends + LEEWAY_SECONDS
    assert provider.check(issuer.token(roles=["fl-operators", "fl-viewers"]))[:2] == ("ada", "operator")
    assert provider.check(issuer.token(roles="fl-viewers"))[:2] == ("ada", "viewer")
    assert provider.check(issuer.token(roles=[7, ["x"], {"a": 1}, None, "fl-viewers"]))[1] == "viewer"


@pytest.mark.parametrize("groups", [7, 7.5, True, [7], [["fl-viewers"]], {"fl-viewers": 1}, [None], "others"])
def test_groups_that_are_no_words_give_no_role(provider: Provider, issuer: Issuer, groups: Any) -> None:
    with pytest.raises(IdentityError, match="no role here"):
        provider.check(issuer.token(roles=groups))


def test_every_other_token_is_refused(provider: Provider, issuer: Issuer) -> None:
    now = time.time()
    public = issuer.keys["keys"][0]
    bad = [
        issuer.token(exp=now - 3600),
        issuer.token(exp=None),
        issuer.token(iat=None),
        issuer.token(sub=None),
        issuer.token(aud="another"),
        issuer.token(iss="https://evil.example"),
        issuer.token(nbf=now + 3600),
        issuer.token(kid="k2"),
        issuer.token(key=ec.generate_private_key(ec.SECP256R1())),
        issuer.token(key=issuer.other, algorithm="RS256"),
        issuer.token(key=public["x"] + public["y"], algorithm="HS256"),
        jwt.encode({"sub": "ada"}, None, "none", headers={"kid": "k1"}),
        issuer.token()[:-4] + "AAAA",
        "a.b.c",
        "",
    ]
    for token in bad:
        with pytest.raises(IdentityError, match="is not accepted"):
            provider.check(token)
    with pytest.raises(IdentityError, match="no role here"):
        provider.check(issuer.token(roles=["others"]))


def test_keys_come_over_https_or_from_a_file() -> None:
    values = {"issuer": "i", "audience": "a", "roles": {}}
    with pytest.raises(ValueError, match="https"):
        OidcTable(jwks="http://id.example/keys", **values)
    with pytest.raises(ValueError, match="not a role"):
        OidcTable(jwks="https://id.example/keys", issuer="i", audience="a", roles={"x": "king"})


async def test_a_coordinator_lets_them_in_through_the_second_door(
    settings: Callable[..., ServerConfig], certificates: Path, issuer: Issuer, address: str
) -> None:
    table = {"issuer": "https://id.example", "audience": "roundtable", "jwks": address, "roles": ROLES}
    secure = grpc.ssl_channel_credentials((certificates / "ca" / "ca.crt").read_bytes())
    async with running(settings(enrolment="127.0.0.1:0", oidc=table)) as coordinator:

        def channel(token: str) -> Any:
            both = grpc.composite_channel_credentials(secure, grpc.access_token_call_credentials(token))
            return grpc.aio.secure_channel(f"localhost:{coordinator.security.enrolment_port}", both)

        async with channel(issuer.token()) as viewer:
            stub: Any = operator_pb2_grpc.OperatorsStub(viewer)
            await stub.Status(operator_pb2.StatusRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="'oidc:ada' is here as viewer"):
                await stub.CancelJob(operator_pb2.JobRequest(job="x"))
        async with channel(issuer.token(roles=["fl-operators"])) as operator:
            admin: Any = administration_pb2_grpc.AdministrationStub(operator)
            call = admin.ReadAudit(administration_pb2.ReadAuditRequest())
            lines = [line async for part in call for line in part.lines]
            assert lines
        async with channel(issuer.token(aud="another")) as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await operator_pb2_grpc.OperatorsStub(stranger).Status(operator_pb2.StatusRequest())  # type: ignore[misc]
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jwt", None)
    with pytest.raises(ConfigError, match="oidc"):
        Provider(OidcTable(issuer="i", audience="a", jwks="x", roles={}))

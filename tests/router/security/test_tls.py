"""TLS at the front and towards workers, and what is refused at the start."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from trustme import KeyType

from router.security.security import Security, check_security
from router.security.tls import FailedHandshakes
from router.serve import run
from router.settings import Settings, SettingsError
from router.settings.administration import Address
from router.workers.spec import parse_worker
from tests.certificates import Authority, Pair
from tests.fakes.http_engine import HttpEngine, models
from tests.fakes.http_engine import running as engine_running
from tests.fakes.raw_client import get, post
from tests.fakes.scripted_worker import ScriptedWorker, events
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running, source_of

BODY = {"prompt": "x"}


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(ca: Authority) -> Pair:
    return ca.pair("127.0.0.1")


class Plain(NamedTuple):
    """What a client sees that only connects and asks for /health."""

    serial: object
    """The certificate's number."""
    status: bytes


async def plain(router: RunningRouter, context: ssl.SSLContext) -> Plain:
    return await asyncio.to_thread(_plain, router.port, context)


def _plain(port: int, context: ssl.SSLContext) -> Plain:
    with (
        socket.create_connection(("127.0.0.1", port), 10) as sock,
        context.wrap_socket(sock, server_hostname="127.0.0.1") as secure,
    ):
        serial = (secure.getpeercert() or {})["serialNumber"]
        secure.sendall(get("/health"))
        status = secure.recv(15)
        if not status:
            raise ConnectionError("closed without an answer")
        return Plain(serial, status)


@asynccontextmanager
async def client_of(router: RunningRouter, context: ssl.SSLContext) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        f"https://127.0.0.1:{router.port}",
        connector=aiohttp.TCPConnector(ssl=context),
        timeout=aiohttp.ClientTimeout(20),
    ) as session:
        yield session


async def test_the_front_speaks_tls_and_nothing_else(
    a: ScriptedWorker, ca: Authority, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    a.then(events(b"one", b"two"))
    async with running(a, tls_cert=pair.cert, tls_key=pair.key) as router:
        assert f"Listening on https://127.0.0.1:{router.port}\n" in capsys.readouterr().out
        async with client_of(router, ca.client()) as client:
            async with client.post("/v1/completions", json={**BODY, "stream": True}) as answer:
                assert (await answer.read()) == b"data: one\n\ndata: two\n\n"
            for size in (10, 300_000):
                async with client.post("/v1/completions", json={"prompt": "x" * size}) as answer:
                    assert (answer.status, await answer.json()) == (200, {"ok": True})
            async with client.post("/v1/completions", data=b"no JSON") as answer:
                assert answer.status == 400
        async with router.client() as unencrypted:
            unencrypted.send(get("/health"))
            assert b"200 OK" not in await unencrypted.rest()


async def test_a_request_that_is_refused_unread_gets_its_answer_over_tls(
    a: ScriptedWorker, ca: Authority, pair: Pair
) -> None:
    async with (
        running(a, tls_cert=pair.cert, tls_key=pair.key, max_body_size=10) as router,
        client_of(router, ca.client()) as client,
        client.post("/v1/completions", json=BODY) as answer,
    ):
        assert answer.status == 413


async def test_old_versions_of_tls_are_refused(a: ScriptedWorker, ca: Authority, pair: Pair) -> None:
    old = ca.client()
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    async with running(a, tls_cert=pair.cert, tls_key=pair.key) as router:
        with pytest.raises(ssl.SSLError):
            await plain(router, old)


async def test_only_clients_with_a_certificate_of_the_authority_come_in(
    a: ScriptedWorker, ca: Authority, pair: Pair, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    theirs, foreign = ca.pair("client", "client"), stranger.pair("client", "foreign")
    async with running(a, tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=ca.file) as router:
        async with client_of(router, ca.client(theirs)) as client, client.post("/v1/completions", json=BODY) as answer:
            assert answer.status == 200
        for context in (ca.client(), ca.client(foreign)):
            with pytest.raises(OSError):
                await plain(router, context)


async def test_the_admin_surface_is_served_likewise(a: ScriptedWorker, ca: Authority, pair: Pair) -> None:
    async with running(a, tls_cert=pair.cert, tls_key=pair.key, admin_listen=Address("127.0.0.1", 0)) as router:
        assert router.app._admin
        url = f"https://127.0.0.1:{router.app._admin.port}/admin/workers"
        async with aiohttp.ClientSession() as client:
            async with client.get(url, ssl=ca.client()) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.get(url)


async def test_a_hangup_reads_the_certificate_again(a: ScriptedWorker, ca: Authority, pair: Pair) -> None:
    async with running(a, source=source_of(a), tls_cert=pair.cert, tls_key=pair.key) as router:
        first = await plain(router, ca.client())
        ca.pair("127.0.0.1")  # in the same files
        await router.hang_up()
        second = await plain(router, ca.client())
        assert first.serial != second.serial
        shutil.copy(ca.pair("h", "other").cert, pair.cert)  # not the key's: all stays as it was
        await router.hang_up()
        assert await plain(router, ca.client()) == second


async def test_a_certificate_with_a_key_of_another_kind_takes_the_place_of_the_one_before(
    a: ScriptedWorker, ca: Authority, pair: Pair
) -> None:
    """OpenSSL keeps one of each kind, and would go on showing the old one."""
    async with running(a, source=source_of(a), tls_cert=pair.cert, tls_key=pair.key) as router:
        first = await plain(router, ca.client())
        ca.pair("127.0.0.1", kind=KeyType.RSA)  # in the same files
        await router.hang_up()
        assert (await plain(router, ca.client())).serial != first.serial


async def test_a_hangup_reads_whose_certificates_are_taken_again(
    a: ScriptedWorker, ca: Authority, pair: Pair, tmp_path: Path
) -> None:
    authorities = tmp_path / "authorities.pem"
    shutil.copy(ca.file, authorities)
    other = Authority(tmp_path, "other")
    before, after = ca.client(ca.pair("client", "before")), ca.client(other.pair("client", "after"))
    files = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": str(authorities)}
    async with running(a, source=source_of(a), **files) as router:
        await plain(router, before)
        with pytest.raises(OSError):
            await plain(router, after)
        shutil.copy(other.file, authorities)
        await router.hang_up()
        await plain(router, after)
        with pytest.raises(OSError):
            await plain(router, before)


# -- workers


@asynccontextmanager
async def secure_engine(tls: ssl.SSLContext) -> AsyncIterator[HttpEngine]:
    answers = {"/v1/models": models("m"), "/version": (200, b'{"version":"0.32.0"}')}
    async with engine_running(HttpEngine({**answers, "/v1/completions": (200, b'{"ok":true}')}, tls)) as engine:
        yield engine


class Behind(ScriptedWorker):
    """Stands for an engine that is another fake."""

    def __init__(self, engine: HttpEngine) -> None:
        super().__init__()
        self._engine = engine

    @property
    def url(self) -> str:
        return self._engine.url


async def status_through(engine: HttpEngine, **settings: Any) -> int:
    """Of a request through a router with that worker."""
    async with running(Behind(engine), router_mode="kv", **settings) as router, router.client() as client:
        return (await client.ask(post())).status


async def test_workers_are_asked_over_tls_by_both_ways_that_lead_there(
    ca: Authority, pair: Pair, tmp_path: Path
) -> None:
    """The pool's connections and the session that asks for health: both show a certificate, and check the other's."""
    shown = ca.pair("router", "router")
    other = Authority(tmp_path, "other")
    async with secure_engine(ca.server(pair, clients=ca)) as engine:
        secure = {"worker_ca": ca.file, "worker_cert": shown.cert, "worker_key": shown.key}
        assert await status_through(engine, **secure) == 200
        assert {path for path, _ in engine.asked} >= {"/health", "/v1/models", "/v1/completions"}
        asked = len(engine.asked)
        for wrong in ({**secure, "worker_ca": other.file}, {"worker_ca": ca.file}, {}):
            assert await status_through(engine, **wrong) == 503
        assert len(engine.asked) == asked


async def test_a_hangup_reads_what_workers_are_shown_again(ca: Authority, pair: Pair, tmp_path: Path) -> None:
    """And who signs theirs: a certificate that ends must not take a restart to be replaced."""
    shown, other = ca.pair("router", "router"), Authority(tmp_path, "other")
    async with secure_engine(other.server(other.pair("127.0.0.1", "engine"), clients=other)) as engine:
        worker = Behind(engine)
        secure: dict[str, Any] = {"worker_ca": ca.file, "worker_cert": shown.cert, "worker_key": shown.key}
        async with running(worker, source=source_of(worker), health_interval=0.5, **secure) as router:
            assert not router.is_up(worker)
            theirs = other.pair("router", "theirs")
            shutil.copy(other.file, ca.file)
            shutil.copy(theirs.cert, shown.cert)  # not the key's: all stays as it was
            await router.hang_up()
            shutil.copy(theirs.key, shown.key)
            await router.hang_up()
            await until(lambda: router.is_up(worker))
            async with router.client() as client:
                assert (await client.ask(post())).status == 200


def shown(client: ssl.SSLContext, server: ssl.SSLContext) -> object:
    """The number of the certificate that the server sees of the client. Raises ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return (sides[1].getpeercert() or {})["serialNumber"]


def test_what_workers_are_shown_and_who_signs_theirs_is_what_was_read_last(
    ca: Authority, pair: Pair, tmp_path: Path
) -> None:
    """Also where the key is of another kind, and where an authority was taken out."""
    ours, other, trusted = ca.pair("router", "router"), Authority(tmp_path, "other"), tmp_path / "trusted.pem"
    engine, theirs = ca.server(pair, ca), ca.server(other.pair("127.0.0.1", "theirs"), ca)
    shutil.copy(ca.file, trusted)
    files = {"worker_ca": str(trusted), "worker_cert": ours.cert, "worker_key": ours.key}
    security = Security(settings(**files), lambda: 0.0, lambda _: None)
    client = security.workers.context
    assert client
    first = shown(client, engine)
    ca.pair("router", "router", KeyType.RSA)
    security.read_again()()
    assert shown(client, engine) != first
    shutil.copy(other.file, trusted)
    security.read_again()()
    assert shown(client, theirs)
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(client, engine)


async def test_a_handshake_that_fails_is_counted_and_told(
    a: ScriptedWorker, ca: Authority, pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path, "other").client()
    async with running(a, tls_cert=pair.cert, tls_key=pair.key) as router:
        assert (await plain(router, ca.client())).status == b"HTTP/1.1 200 OK"
        assert router.total("router_clients_refused_total", cause="tls_handshake") == 0
        async with router.client() as client:
            client.send(get("/health"))
            assert await client.rest() == b""
        with pytest.raises(ssl.SSLCertVerificationError):
            await plain(router, stranger)
        await until(lambda: router.total("router_clients_refused_total", cause="tls_handshake") == 2)
    (told,) = [record for record in caplog.records if "could not agree on TLS" in record.getMessage()]
    assert told.__dict__["fields"] == {"reason": "HTTP_REQUEST"}


def test_handshakes_that_fail_are_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    refused, error = Counter[str](), ssl.SSLError(1, "[SSL] unexpected")
    error.reason = "UNEXPECTED"
    failed = FailedHandshakes(refused, iter((0.0, 59.0, 60.0)).__next__)
    for _ in range(3):
        failed._note(error)
    assert (refused["tls_handshake"], len(caplog.records)) == (3, 2)


@pytest.mark.parametrize(
    ("dates", "says"),
    [
        (("2020-01-01", "2020-01-02"), ["has expired"]),
        (("2999-01-01", "2999-01-02"), ["is not valid yet"]),
        (("2020-01-01", "2999-01-01"), []),
    ],
)
@pytest.mark.parametrize("kind", KeyType)
async def test_a_certificate_whose_time_is_not_now_is_told_of_at_the_start_and_when_it_is_read_again(
    a: ScriptedWorker,
    ca: Authority,
    caplog: pytest.LogCaptureFixture,
    dates: tuple[str, str],
    says: list[str],
    kind: KeyType,
) -> None:
    pair = ca.pair("127.0.0.1", kind=kind, dates=(datetime.fromisoformat(dates[0]), datetime.fromisoformat(dates[1])))
    files = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": ca.file}
    async with running(a, source=source_of(a), **files) as router:
        await router.hang_up()
        assert router.total("router_clients_refused_total", cause="tls_handshake") == 0
    told = [record.getMessage() for record in caplog.records if "certificate" in record.getMessage()]
    assert told == [f"The certificate of --tls-cert {what}" for what in says * 2]


# -- at the start


def settings(**fields: Any) -> Settings:
    return Settings(workers=(parse_worker("http://a:1"),), **fields)


def test_a_pair_that_does_not_belong_together_is_told_at_the_start(
    ca: Authority, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ca.pair("h", "other")
    assert run(settings(tls_cert=pair.cert, tls_key=other.key)) == 2
    said = capsys.readouterr().err
    assert said == f"kv-router: --tls-key: {other.key} is not the key of the certificate in {pair.cert}.\n"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tls_client_ca": "/nowhere"}, "--tls-client-ca needs --tls-cert and --tls-key"),
        ({"tls_cert": "/nowhere"}, "--tls-cert needs --tls-key"),
        ({"tls_cert": "/nowhere", "tls_key": "/nowhere"}, "--tls-cert: /nowhere cannot be read"),
        ({"worker_ca": "/nowhere"}, "--worker-ca: /nowhere cannot be read"),
        ({"worker_api_key_file": "/nowhere"}, "--worker-api-key-file: /nowhere cannot be read"),
        ({"api_keys": "/nowhere"}, "--api-keys: /nowhere cannot be read"),
        ({"nats_creds": "/nowhere", "event_plane": "nats://n"}, "--nats-creds: /nowhere cannot be read"),
        ({"nats_ca": "/nowhere", "event_plane": "tls://n"}, "--nats-ca: /nowhere cannot be read"),
        ({"nats_creds": "/nowhere"}, "are for nats://"),
    ],
)
def test_files_that_are_not_there(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        check_security(settings(**fields))


@pytest.mark.parametrize("name", ["api_keys", "tls_key", "worker_api_key_file", "nats_creds"])
def test_a_pipe_that_would_be_empty_when_it_is_read_again(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}: {pipe} is a pipe"):
        check_security(settings(**{name: str(pipe)}))

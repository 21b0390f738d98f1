"""The event plane before a NATS server that asks who comes, and that is asked who it is."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import nats.errors
import pytest

import publishers.embedded_nats
import publishers.in_process
import publishers.nats_plane
from engines.rank_load import RankLoad
from engines.vllm.decode import Decoder
from indexer.events import LoadReport, decode_load
from publishers.connect import make_plane
from publishers.credentials import NatsFiles
from publishers.embedded_nats import NatsServer, nats_server_binary
from publishers.in_process import EventThread, FiguresThread
from publishers.nats_access import SafeClient
from publishers.nats_plane import NatsPlane
from publishers.plane import all_loads
from publishers.plugin_settings import Settings
from tests.certificates import Authority
from tests.fakes.faulty_proxy import FaultyProxy
from tests.fakes.waiting import until
from tests.nats_accounts import make_accounts, make_nkey
from tests.nats_fixture import running_nats_server

# nats-py leaves the sockets of attempts that failed to the garbage collector, which is called here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


@asynccontextmanager
async def configured(configuration: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsServer]:
    """A real nats-server with a configuration file."""
    file, start = folder / "nats.conf", folder / "nats-server"
    file.write_text(configuration)
    start.write_text(f'#!/bin/sh\nexec {nats_server_binary()} -c {file} "$@"\n')
    start.chmod(0o755)
    monkeypatch.setattr(publishers.embedded_nats, "nats_server_binary", lambda: start)
    async with running_nats_server() as server:
        yield server


async def connects(url: str, files: NatsFiles) -> bool:
    """Whether the first attempt succeeds, and a message gets through."""
    plane = make_plane(url, files)
    assert isinstance(plane, NatsPlane)
    try:
        await plane.start()
        if not plane.connected:
            return False
        got = asyncio.Event()
        await plane.subscribe("x", lambda _: got.set())
        plane.publish("x", b"1")
        async with asyncio.timeout(30):
            await got.wait()
        return True
    finally:
        await plane.close()


def replace(file: str, by: str) -> None:
    Path(by).replace(file)


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The fields of what was logged."""
    return [record.__dict__.get("fields", {}) for record in caplog.records]


@pytest.mark.nats
async def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = make_accounts(random.Random(1))
    theirs, strangers = tmp_path / "user.creds", tmp_path / "other.creds"
    theirs.write_text(accounts.creds)
    strangers.write_text(make_accounts(random.Random(2)).creds)
    async with configured(accounts.configuration, tmp_path, monkeypatch) as server:
        assert await connects(server.url, NatsFiles(creds=str(theirs)))
        assert not await connects(server.url, NatsFiles(creds=str(strangers)))
        assert not await connects(server.url, NatsFiles())


@pytest.mark.nats
@pytest.mark.parametrize("who", ["user", "token"])
async def test_what_a_url_cannot_hold_is_encoded_in_it(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "p:/?#%@,ss w\u00f6rd"
    authorization = f'authorization {{ user: "u/@:", password: "{secret}" }}'
    given = f"{quote('u/@:', safe='')}:{quote(secret, safe='')}"
    if who == "token":
        authorization, given = f'authorization {{ token: "{secret}" }}', quote(secret, safe="")
    async with configured(authorization, tmp_path, monkeypatch) as server:
        assert await connects(server.url.replace("nats://", f"nats://{given}@"), NatsFiles())


@pytest.mark.nats
async def test_all_of_a_cluster_are_shown_what_one_was_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is told of one server alone goes on with another where that one ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        route = free.getsockname()[1]
    names = (tmp_path / "one", tmp_path / "other")
    for name in names:
        name.mkdir()
    asking = "authorization { user: a, password: b }"
    cluster = 'cluster {{ name: c, listen: "127.0.0.1:{}", routes: ["nats://127.0.0.1:{}"] }}'
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(
                configured(f"{asking}\nserver_name: {name.name}\n{cluster.format(port, route)}", name, monkeypatch)
            )
            for name, port in zip(names, (route, -1), strict=True)
        ]
        plane = NatsPlane([one.url.replace("nats://", "nats://a:b@")])
        await plane.start()
        await until(lambda: plane._client and len(plane._client.discovered_servers) > 0)
        await one.stop()
        await until(lambda: plane.connected and f":{other.port}" in str(plane._client and plane._client.connected_url))
        await plane.close()


@pytest.mark.nats
async def test_an_nkey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [make_nkey(random.Random(seed)) for seed in (1, 2)]
    files = [tmp_path / "one", tmp_path / "two"]
    for file, key in zip(files, keys, strict=True):
        file.write_text(key.seed + "\n")
    users = f"authorization {{ users = [ {{ nkey: {keys[0].public} }} ] }}"
    async with configured(users, tmp_path, monkeypatch) as server:
        assert await connects(server.url, NatsFiles(nkey_seed=str(files[0])))
        assert not await connects(server.url, NatsFiles(nkey_seed=str(files[1])))


@pytest.mark.nats
async def test_tls_with_certificates_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    cert, key = ca.pair("127.0.0.1")
    client, foreign = ca.pair("client", "client"), other.pair("client", "foreign")
    tls = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{ca.file}", verify: true }}'
    async with configured(tls, tmp_path, monkeypatch) as server:
        url = server.url.replace("nats://", "tls://")
        assert await connects(url, NatsFiles(None, None, ca.file, *client))
        assert not await connects(url, NatsFiles(None, None, other.file, *client))  # not the server that was meant
        assert not await connects(url, NatsFiles(None, None, ca.file, *foreign))
        assert not await connects(url, NatsFiles(None, None, ca.file))


@pytest.mark.nats
async def test_tls_is_used_where_the_server_leaves_it_to_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a broker's clients move to TLS one by one."""
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    cert, key = ca.pair("127.0.0.1")
    tls = f'allow_non_tls: true\ntls {{ cert_file: "{cert}", key_file: "{key}" }}'
    async with configured(tls, tmp_path, monkeypatch) as server:
        url = server.url.replace("nats://", "tls://")
        assert await connects(server.url, NatsFiles())
        assert await connects(url, NatsFiles(ca=ca.file))
        assert not await connects(url, NatsFiles(ca=other.file))  # so it is encrypted indeed


@pytest.mark.nats
async def test_the_end_of_a_tls_connection_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio has nothing to warn of besides."""
    ca = Authority(tmp_path)
    cert, key = ca.pair("127.0.0.1")
    tls = f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    async with configured(tls, tmp_path, monkeypatch) as server:
        plane = make_plane(server.url.replace("nats://", "tls://"), NatsFiles(ca=ca.file))
        await plane.start()
        await server.stop()
        await until(lambda: not plane.connected)
        await plane.close()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == ["The connection to NATS is lost"]


@pytest.mark.nats
async def test_nobody_waits_for_a_server_that_is_gone_to_take_leave_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers.nats_plane, "PING_INTERVAL", 0.05)
    ca = Authority(tmp_path)
    cert, key = ca.pair("127.0.0.1")
    async with (
        configured(f'tls {{ cert_file: "{cert}", key_file: "{key}" }}', tmp_path, monkeypatch) as server,
        FaultyProxy(server.host, server.port) as proxy,
    ):
        plane = make_plane(f"tls://127.0.0.1:{proxy.port}", NatsFiles(ca=ca.file))
        await plane.start()
        before = proxy.accepted
        proxy.stall(True)
        await until(lambda: proxy.accepted > before, timeout=15)  # of the 30 that asyncio would wait
        proxy.stall(False)
        await plane.close()


@pytest.mark.nats
async def test_certificates_are_read_again_with_each_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are replaced before they expire, and so are the authorities; one file may come before the other."""
    old, new = Authority(tmp_path), Authority(tmp_path, "new")
    server_pair, client_pair = old.pair("127.0.0.1"), old.pair("client", "client")
    cert, key = server_pair
    tls = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{old.file}", verify: true }}'
    async with configured(tls, tmp_path, monkeypatch) as server:
        plane = make_plane(server.url.replace("nats://", "tls://"), NatsFiles(None, None, old.file, *client_pair))
        await plane.start()
        assert plane.connected
        await server.stop()
        replace(old.file, new.file)
        for before, after in zip(server_pair, new.pair("127.0.0.1", "new-server"), strict=True):
            replace(before, after)
        fresh = new.pair("client", "new-client")
        replace(client_pair.cert, fresh.cert)
        await server.start()
        wrong = f"--nats-key: {client_pair.key} is not the key of the certificate in {client_pair.cert}."
        await until(lambda: wrong in [str(fields.get("error")) for fields in said(caplog)])
        replace(client_pair.key, fresh.key)
        await until(lambda: plane.connected)
        await plane.close()


async def test_what_is_to_be_encrypted_is_never_sent_in_the_clear() -> None:
    """A server, or anybody between, that says it has no TLS hears no password."""
    heard = asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1000,"headers":true}\r\n')
        heard.put_nowait(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        plane = make_plane(f"tls://user:SECRET@127.0.0.1:{port}")
        await plane.start()
        assert not plane.connected
        async with asyncio.timeout(30):
            assert await heard.get() == b""
        await plane.close()


@pytest.mark.parametrize(
    ("kind", "meanwhile"),
    [("nkey_seed", ""), ("nkey_seed", "SUAN"), ("creds", ""), ("creds", "-BEGIN USER NKEY SEED-\n{seed}\n")],
)
async def test_a_file_that_is_just_being_replaced_is_read_again(kind: str, meanwhile: str, tmp_path: Path) -> None:
    """It is read with each attempt to connect; an attempt that meets half of it is not the last."""
    seed, file = make_nkey(random.Random(1)).seed, tmp_path / "file"
    whole = seed if kind == "nkey_seed" else make_accounts(random.Random(1)).creds
    heard, cut = asyncio.Queue[bytes](), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b'INFO {"server_id":"x","version":"2.10.0","max_payload":1000,"auth_required":true,"nonce":"n"}\r\n'
        )
        said = await reader.readline()
        heard.put_nowait(said[:7])
        if said:
            writer.write(b"PONG\r\n")
            await cut.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        file.write_text(whole)
        plane = make_plane(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", NatsFiles(**{kind: str(file)}))
        await plane.start()
        assert await heard.get() == b"CONNECT"
        file.write_text(meanwhile.format(seed=seed))
        cut.set()
        assert await heard.get() == b""
        cut.clear()
        file.write_text(whole)
        while await heard.get() != b"CONNECT":
            pass
        await until(lambda: plane.connected)
        cut.set()
        await plane.close()


SEED = make_nkey(random.Random(1)).seed


@pytest.mark.parametrize(
    ("url", "content", "flags", "says"),
    [
        ("nats://n", "SECRET", ("creds",), "--nats-creds: .*file holds no NATS credentials"),
        ("nats://n", "SECRET", ("nkey_seed",), "--nats-nkey-seed: .*file holds no nkey seed"),
        ("nats://n", SEED[:-1], ("nkey_seed",), "--nats-nkey-seed: .*file holds no nkey seed"),
        ("nats://n", SEED, ("creds", "nkey_seed"), "two ways to say the same"),
        ("nats://n,tls://n", "ca", ("ca",), "are for tls://, as nats:// may stay in the clear"),
        ("local", SEED, ("nkey_seed",), r"are for nats://HOST:PORT or tls://HOST:PORT"),
        ("nats+embedded://", SEED, ("nkey_seed",), "are for nats://"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, url: str, content: str, flags: tuple[str, ...], says: str) -> None:
    file = tmp_path / "file"
    file.write_text(content)
    if content == "ca":
        file = Path(Authority(tmp_path).file)
    with pytest.raises(ValueError, match=says) as caught:
        make_plane(url, NatsFiles(**dict.fromkeys(flags, str(file))))
    assert "SECRET" not in str(caught.value)
    assert SEED[:-1] not in str(caught.value)


async def test_a_publish_that_would_have_to_wait_is_not_sent() -> None:
    class Waiting(SafeClient):
        async def publish(self, *_: object, **__: object) -> None:
            await asyncio.sleep(0)

    with pytest.raises(nats.errors.Error, match="has ended"):
        Waiting().publish_now("x", b"", "")


def warnings(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    """Errors that name `word`, of the log's warnings; whatever is worse fails."""
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
    told = [str(record.__dict__["fields"].get("error")) for record in caplog.records if "fields" in record.__dict__]
    return [error for error in told if word in error.lower()]


@pytest.mark.nats
async def test_a_server_that_refuses_who_was_let_in_before_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nothing would say why a broker that is there again is not used."""
    async with configured("", tmp_path, monkeypatch) as server:
        plane = NatsPlane([server.url])
        await plane.start()
        await server.stop()
        (tmp_path / "nats.conf").write_text("authorization { token: other }")
        await server.start()
        await until(lambda: warnings(caplog, "authorization"))
        for _ in range(3):  # attempts
            await plane._on_error(nats.errors.Error("nats: 'Authorization Violation'"))
        (tmp_path / "nats.conf").write_text("")
        await server.stop()
        await server.start()
        await until(lambda: plane.connected)
        await plane.close()
    assert len(warnings(caplog, "authorization")) == 1


@pytest.mark.nats
async def test_a_server_that_takes_no_more_subscriptions_is_told_of_once_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where an account has a limit. nats-py gives up then and says nothing, each time that we are connected."""
    monkeypatch.setattr(publishers.nats_plane, "ROUND_TRIP_TIMEOUT", 0.05)
    async with (
        configured("max_subscriptions: 1", tmp_path, monkeypatch) as server,
        FaultyProxy(server.host, server.port) as proxy,
    ):
        plane = NatsPlane([f"nats://127.0.0.1:{proxy.port}"])
        await plane.start()
        for subject in ("one", "two", "three"):
            await plane.subscribe(subject, lambda _: None)
        await until(lambda: proxy.accepted > 4)
        (tmp_path / "nats.conf").write_text("")
        await server.stop()
        await server.start()
        await until(lambda: plane.connected and not plane._away)
        await plane.close()
    assert len(warnings(caplog, "subscriptions")) == 1
    assert caplog.messages.count("The connection to NATS is lost") == 1


@pytest.mark.nats
async def test_what_may_not_be_published_is_told_once_for_each_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    users = 'authorization { users = [ { user: a, password: b, permissions: { publish: ["right", "_INBOX.>"] } } ] }'
    async with configured(users, tmp_path, monkeypatch) as server:
        plane = make_plane(server.url.replace("nats://", "nats://a:b@"))
        await plane.start()
        got = asyncio.Event()
        await plane.subscribe("right", lambda _: got.set())
        for _ in range(50):
            plane.publish("wrong", b"x")
        plane.publish("right", b"x")
        async with asyncio.timeout(30):
            await got.wait()
        await plane.close()
    assert len(warnings(caplog, '"wrong"')) == 1


@pytest.mark.nats
async def test_what_the_plug_in_inside_an_engine_is_to_be_permitted_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishers.in_process, "REPORT_INTERVAL", 0.01)
    both = ["kv.default.figures.>", "_INBOX.>"]
    sends, takes = ["kv.default.events.>", "kv.default.load.>", *both], ["kv.default.replay.>", *both]
    may = {"publish": sends, "subscribe": takes}
    users = [{"user": "a", "password": "b", "permissions": may}, {"user": "router", "password": "c"}]
    async with configured(json.dumps({"authorization": {"users": users}}), tmp_path, monkeypatch) as server:
        plane = make_plane(server.url.replace("nats://", "nats://router:c@"))
        await plane.start()
        reports: list[LoadReport] = []
        await plane.subscribe(all_loads("default"), lambda payload: reports.append(decode_load(payload)))
        settings = Settings(server.url.replace("nats://", "nats://a:b@"), "w")
        core, front_end = EventThread(settings, 0, Decoder), FiguresThread(settings, 0, interval=0.01)
        front_end.update(RankLoad(request_active_slots=5))
        await until(lambda: reports and reports[-1].request_active_slots == 5)
        core.stop()
        front_end.stop()
        await plane.close()
    assert not warnings(caplog, "permit")
    told = (Path(__file__).parents[2] / "docs/security.md").read_text()
    assert [subject for subject in sends + takes if f"`{subject}`" not in told] == []


@pytest.mark.nats
async def test_an_inbox_that_is_not_permitted_is_named_as_permissions_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Subjects are told apart by case: whoever permitted what nats-py makes of it would have permitted nothing."""
    users = 'authorization { users = [ { user: a, password: b, permissions: { publish: ["right"] } } ] }'
    async with configured(users, tmp_path, monkeypatch) as server:
        plane = make_plane(server.url.replace("nats://", "nats://a:b@"))
        await plane.start()
        plane.publish("_INBOX.x", b"")
        await until(lambda: warnings(caplog, "permissions violation"))
        await plane.close()
    assert '"_INBOX.x"' in warnings(caplog, "permissions violation")[0]

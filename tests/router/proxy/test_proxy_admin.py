"""What the admin surface takes, what it refuses and why, and that its description says the same."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from multidict import CIMultiDict

from router.admin.access import Refusal
from router.admin.openapi import NEW_WORKER, document
from router.admin.shapes import Change, Limits, LogLevel, WorkerState
from router.admin.surface import AdminSurface, CannotAdminister
from router.app import App
from router.http.messages import Headers
from router.settings import Settings
from router.settings.administration import Address
from router.settings.logs import LogLevel as Level
from router.workers.spec import _KEYS as WORKER_KEYS
from router.workers.spec import _ROLES as ROLES
from router.workers.spec import worker_from_mapping
from tests.fakes.raw_client import RawClient, get, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, answer
from tests.fakes.waiting import until
from tests.router.proxy.administering import HERE, admin_of, administering
from tests.router.proxy.running import running
from tests.router.security.files import write_keys


async def held(dialogue: Dialogue) -> None:
    """An answer when the test says so."""
    await dialogue.go_on.wait()
    await answer()(dialogue)


def message(told: Any) -> str:
    """Of an error in the shape of all others."""
    error = told["error"]
    assert set(error) == {"message", "type", "param", "code"}
    text: str = error["message"]
    return text


@pytest.mark.parametrize("sent", [b"", b"GET /admin/workers HTTP/1.1\r\nhost:", get("/admin/workers")])
async def test_a_connection_without_a_request_is_closed(
    a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("router.admin.surface._IDLE", 0.02)
    async with running(a, admin_listen=HERE) as router:
        assert router.app._admin
        async with RawClient(router.app._admin.port) as client:
            client.send(sent)
            await client.rest()


async def test_its_port_is_free_for_another_router_as_soon_as_this_one_drains(a: ScriptedWorker) -> None:
    """Its streams may go on for long, and the other one would not start."""
    a.then(held)
    async with administering(a) as admin, admin.router.client() as client:
        assert (await admin.show("a"))[0] == 200
        asked = asyncio.ensure_future(client.ask(post()))
        await until(lambda: a.requests)
        draining = asyncio.ensure_future(admin.router.app.drain(60))
        port = admin.router.app._admin.port if admin.router.app._admin else 0
        await until(lambda: not listens(port))
        assert (await admin.show("a"))[1]["in_flight"] == 1, "who is connected may still look"
        async with running(admin_listen=Address("127.0.0.1", port)) as other, admin_of(other) as anew:
            assert await anew.ask("GET", "workers") == (200, {"workers": []})
        a.go_on.set()
        assert (await asked).status == 200
        await draining


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


async def test_without_the_setting_there_is_no_such_surface(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        assert router.app._admin is None
        assert (await client.ask(get("/admin/workers"))).status == 404


async def test_the_requests_port_knows_nothing_of_it(a: ScriptedWorker) -> None:
    async with administering(a) as admin, admin.router.client() as client:
        for request in (get("/admin/workers"), post("/admin/workers", b'{"url":"http://h:1"}')):
            assert (await client.ask(request)).status == 404


# -- workers


async def test_a_worker_with_all_its_keys(a: ScriptedWorker) -> None:
    keys = {"block_size": 64, "role": "prefill", "connector": "nixl", "bootstrap_port": 9, "host": "h", "store": False}
    async with administering() as admin:
        status, told = await admin.add(a, events="tcp://h:1", replay="tcp://h:2", **keys)
        assert (status, told["role"], told["connector"], told["block_size"]) == (201, "prefill", "nixl", 64)
        spec = admin.router.app._fleet.workers["a"].spec
    assert msgspec.structs.asdict(spec) == {
        "url": a.url, "worker_id": "a", "events": "tcp://h:1", "replay": "tcp://h:2", **keys
    }  # fmt: skip


async def test_a_worker_without_a_name_is_known_by_its_address(a: ScriptedWorker) -> None:
    async with administering() as admin:
        status, told = await admin.ask("POST", "workers", json={"url": f"{a.url}/"})
        assert (status, told["id"]) == (201, f"127.0.0.1:{a.port}")
        assert (await admin.show(f"127.0.0.1:{a.port}"))[0] == 200
        assert (await admin.show(f"127.0.0.1%3A{a.port}"))[0] == 200


async def test_a_worker_that_is_there_already(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with administering(a) as admin:
        for body, says in (
            ({"url": b.url, "name": "a"}, "There is a worker 'a' already"),
            ({"url": a.url, "name": "other"}, f"The worker at {a.url} is here already, as 'a'."),
            ({"url": a.url.replace("http", "HTTP") + "/", "name": "other"}, "is here already"),
        ):
            status, told = await admin.ask("POST", "workers", json=body)
            assert (status, says in message(told)) == (409, True), told
        assert list(admin.router.app._fleet.workers) == ["a"]


WRONG_WORKERS: list[tuple[dict[str, Any], str]] = [
    ({}, "needs a url"),
    ({"url": None}, "not an engine's address"),
    ({"url": 7}, "url takes text"),
    ({"url": "127.0.0.1:8000"}, "http or https"),
    ({"url": "file:///etc/passwd"}, "http or https"),
    ({"url": "http://h:1/v1"}, "leave it out"),
    ({"url": "http://u:p@h:1"}, "user or a password"),
    ({"url": "http://h:1?x"}, "? or #"),
    ({"url": "http://h:0"}, "holds what no host"),
    ({"url": "http://" + "a" * 64}, "holds what no host"),
    ({"url": "http://a..b"}, "holds what no host"),
    ({"url": "http://h:1/\u00e9"}, "holds what no host"),
    ({"url": "http://h:1/a b"}, "not an engine's address"),
    ({"url": "http://h\x00:1"}, "holds what no host"),
    ({"url": "http://h:1", "extra": 1}, "no 'extra'"),
    ({"url": "http://h:1", "rôle": "both"}, "did you mean 'role'"),
    ({"url": "http://h:1", "block_size": 0}, "at least 1"),
    ({"url": "http://h:1", "block_size": 10**30}, "at most 1048576"),
    ({"url": "http://h:1", "block_size": "16"}, "at least 1"),
    ({"url": "http://h:1", "block_size": 1.5}, "at least 1"),
    ({"url": "http://h:1", "role": None}, "prefill, decode or both"),
    ({"url": "http://h:1", "role": []}, "prefill, decode or both"),
    ({"url": "http://h:1", "connector": "x"}, "connector takes"),
    ({"url": "http://h:1", "bootstrap_port": 70000}, "1 to 65535"),
    ({"url": "http://h:1", "store": "true"}, "true or false"),
    ({"url": "http://h:1", "store": 1}, "true or false"),
    ({"url": "http://h:1", "events": "h:1"}, "tcp://HOST:5557"),
    ({"url": "http://h:1", "name": "a/b"}, "letters"),
    ({"url": "http://h:1", "name": ""}, "name takes text"),
]


async def test_wrong_workers_are_explained(a: ScriptedWorker) -> None:
    async with administering(a) as admin:
        for body, says in WRONG_WORKERS:
            status, told = await admin.ask("POST", "workers", json=body)
            assert (status, says in message(told)) == (422, True), (body, told)
        assert list(admin.router.app._fleet.workers) == ["a"]


BODIES = [
    (b"", 400, "not valid JSON"),
    (b"{", 400, "not valid JSON"),
    (b"\xff", 400, "not valid JSON"),
    (b"[" * 10_000, 400, "not valid JSON"),
    (b'{"a":1e999}', 400, "not valid JSON"),
    (b"[]", 422, "not as it should be"),
    (b"null", 422, "not as it should be"),
    (b'"x"', 422, "not as it should be"),
    (b'{"nonsense":1}', 422, "nonsense"),
]
TAKING = [("POST", "workers"), ("PATCH", "workers/a"), ("PUT", "limits"), ("PUT", "log-level")]


@pytest.mark.parametrize(("method", "path"), TAKING)
async def test_wrong_bodies_are_explained(a: ScriptedWorker, method: str, path: str) -> None:
    async with administering(a) as admin:
        said = {"Content-Type": "application/json"}
        for body, expected, says in BODIES:
            status, told = await admin.ask(method, path, data=body, headers=said)
            assert (status, says in message(told)) == (expected, True), (body[:20], told)
        status, told = await admin.ask(method, path, data=b" " * 70_000, headers=said)
        assert (status, "larger than" in message(told)) == (413, True)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            status, told = await admin.ask(method, path, data=b"{}", headers={"Content-Type": kind})
            assert (status, "application/json" in message(told)) == (415, True)
        assert (await admin.show("a"))[1]["state"] == "up"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "Nothing is to change"),
        ({"drain": 1}, "$.drain"),
        ({"drain": None}, "$.drain"),
        ({"role": "x"}, "`$.role`; it takes prefill, decode, both, auto."),
        ({"role": "x - at `$.y`"}, "`$.role`; it takes prefill, decode, both, auto."),
        ({"connector": "nixle"}, "did you mean 'nixl'?"),
        ({"connector": 1}, "$.connector"),
        ({"bootstrap_port": 0}, "from 1 to 65535"),
        ({"bootstrap_port": 65536, "drain": True}, "from 1 to 65535"),
        ({"host": ""}, "takes text"),
        ({"url": "http://h:1"}, "url"),
        ({"drain": True, "name": "b"}, "name"),
    ],
)
async def test_wrong_changes_change_nothing(a: ScriptedWorker, change: dict[str, Any], says: str) -> None:
    async with administering(a) as admin:
        worker = admin.router.app._fleet.workers["a"]
        before = worker.spec
        status, told = await admin.ask("PATCH", "workers/a", json=change)
        assert (status, says in message(told)) == (422, True), told
        assert (worker.spec, worker.state) == (before, "up")


async def test_workers_that_there_are_not() -> None:
    async with administering() as admin:
        for method in ("GET", "PATCH", "DELETE"):
            status, told = await admin.ask(method, "workers/nobody", json={"drain": True})
            assert (status, "'nobody'" in message(told)) == (404, True)


@pytest.mark.parametrize("timeout", ["", "x", "-1", "nan", "inf", "1_0", "86401", "1e999"])
async def test_wrong_timeouts_remove_nothing(a: ScriptedWorker, timeout: str) -> None:
    async with administering(a) as admin:
        status, told = await admin.remove("a", timeout=timeout)
        assert (status, "timeout takes" in message(told)) == (422, True)
        status, told = await admin.remove("a", timout="5")
        assert (status, "'timout'" in message(told)) == (422, True)
        status, told = await admin.remove("a", timeout=["600", "0"])
        assert (status, "more than once" in message(told)) == (422, True)
        assert (await admin.show("a"))[1]["state"] == "up"


async def test_removing_takes_the_drain_timeout_where_none_is_said(a: ScriptedWorker) -> None:
    async with administering(a, drain_timeout=500.0) as admin:
        first, again = await admin.remove("a"), await admin.remove("a")
        assert 499 < first[1]["leaves_in_seconds"] <= 500
        assert again[0] in {202, 404}
        await admin.until_gone("a")


async def test_a_drain_timeout_of_days_is_taken_where_none_is_said(a: ScriptedWorker) -> None:
    async with administering(a, drain_timeout=200_000.0) as admin:
        status, told = await admin.remove("a")
        assert (status, told["leaves_in_seconds"] > 199_000) == (202, True)
        await admin.until_gone("a")


# -- the limits

LIMITS: dict[str, Any] = {
    "max_queue": 5, "queue_timeout": 1.5, "max_concurrency": 1, "max_worker_concurrency": None
}  # fmt: skip


async def test_the_limits_hold_as_soon_as_they_are_set(a: ScriptedWorker) -> None:
    async with administering(a, max_queue=7) as admin:
        before = {"max_queue": 7, "queue_timeout": 60.0, "max_concurrency": None, "max_worker_concurrency": None}
        assert await admin.ask("GET", "limits") == (200, before)
        assert await admin.ask("PUT", "limits", json=LIMITS) == (200, LIMITS)
        assert await admin.ask("GET", "limits") == (200, LIMITS)
        a.then(held)
        async with admin.router.client() as one, admin.router.client() as two:
            first = asyncio.ensure_future(one.ask(post()))
            await until(lambda: a.requests)
            second = asyncio.ensure_future(two.ask(post()))
            await until(lambda: admin.router.total("router_queue_length") == 1)
            await admin.ask("PUT", "limits", json={**LIMITS, "max_concurrency": None})
            assert (await second).status == 200, "whoever waits hears of it"
            a.go_on.set()
            assert (await first).status == 200


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_queue": -1}, "$.max_queue"),
        ({"max_queue": None}, "$.max_queue"),
        ({"queue_timeout": 0}, "$.queue_timeout"),
        ({"queue_timeout": None}, "$.queue_timeout"),
        ({"max_concurrency": 0}, "$.max_concurrency"),
        ({"max_worker_concurrency": "2"}, "$.max_worker_concurrency"),
        ({"max_bodies": 2}, "max_bodies"),
    ],
)
async def test_wrong_limits_change_nothing(a: ScriptedWorker, wrong: dict[str, Any], says: str) -> None:
    async with administering(a) as admin:
        before = await admin.ask("GET", "limits")
        status, told = await admin.ask("PUT", "limits", json={**LIMITS, **wrong})
        assert (status, says in message(told)) == (422, True), told
        status, told = await admin.ask("PUT", "limits", json={"max_queue": 1})
        assert (status, "queue_timeout" in message(told)) == (422, True)
        assert await admin.ask("GET", "limits") == before


# -- the log level


async def test_the_log_level(a: ScriptedWorker, log_level: None) -> None:
    async with administering(a) as admin:
        for level in get_args(Level):
            assert await admin.ask("PUT", "log-level", json={"level": level}) == (200, {"level": level})
            assert await admin.ask("GET", "log-level") == (200, {"level": level})
            assert logging.getLogger().level == getattr(logging, level.upper())
        status, told = await admin.ask("PUT", "log-level", json={"level": "loud"})
        assert (status, "$.level" in message(told)) == (422, True)
        assert logging.getLogger().level == logging.ERROR


# -- who may ask


async def test_paths_and_methods_that_there_are_not(a: ScriptedWorker) -> None:
    async with administering(a) as admin:
        for path in ("", "worker", "workers/", "workers/a/b", "openapi"):
            status, told = await admin.ask("GET", path)
            assert (status, "openapi.json" in message(told)) == (404, True)
        async with admin.client.put("/admin/workers", json={}) as refused:
            assert (refused.status, set(refused.headers["Allow"].split(","))) == (405, {"GET", "POST"})
            assert "does not take PUT" in message(await refused.json())


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "["])
async def test_another_hosts_name_is_refused_without_keys(a: ScriptedWorker, host: str) -> None:
    async with administering(a) as admin:
        for method, path in (("GET", "workers"), ("DELETE", "workers/a"), ("GET", "nowhere")):
            status, _ = await admin.ask(method, path, headers={"Host": host})
            assert status == 403
        for own in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80"):
            assert (await admin.ask("GET", "workers", headers={"Host": own}))[0] == 200


async def test_whoever_authorises_is_asked_each_time(a: ScriptedWorker) -> None:
    def authorize(headers: Headers) -> Refusal | None:
        return None if (b"authorization", b"Bearer right") in headers else Refusal(401, "Show a key.")

    async with running(a) as router:
        assert router.app._roster
        surface = AdminSurface(router.app._roster, router.app._context, 1.0, authorize)
        await surface.start(HERE)
        router.app._admin = surface
        async with admin_of(router) as admin:
            for method, path in (("GET", "workers"), ("DELETE", "workers/a"), ("GET", "openapi.json"), ("GET", "x")):
                async with admin.client.request(method, f"/admin/{path}") as refused:
                    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
                    assert message(await refused.json()) == "Show a key."
            right = {"Authorization": "Bearer right", "Host": "router.example"}
            assert (await admin.ask("GET", "workers", headers=right))[0] == 200


async def test_with_keys_one_with_admin_is_needed(a: ScriptedWorker, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, {"name": "root", "key": "ROOT", "admin": True}, {"name": "user", "key": "USER"})
    async with administering(a, api_keys=keys) as admin:
        for header, expected in (("", 401), ("Bearer x", 401), ("Bearer USER", 403), ("Bearer \u00e9", 401)):
            status, told = await admin.ask("GET", "workers", headers={"Authorization": header} if header else {})
            assert (status, bool(message(told))) == (expected, True)
        root = {"Authorization": "Bearer ROOT", "Host": "router.example"}
        assert (await admin.ask("GET", "workers", headers=root))[0] == 200
        twice = [("Authorization", "Bearer ROOT"), ("Authorization", "Bearer ROOT")]
        assert (await admin.ask("GET", "workers", headers=CIMultiDict(twice)))[0] == 401
        for key, expected in (("ROOT", 200), ("USER", 403), ("x", 401)):  # the other way that a refusal names
            assert (await admin.ask("GET", "workers", headers={"x-api-key": key}))[0] == expected
        assert (await admin.ask("GET", "workers", headers={**root, "x-api-key": "ROOT"}))[0] == 401
        assert (await admin.ask("DELETE", "workers/a", headers=root))[0] == 202


async def test_a_worker_that_joins_is_shown_the_workers_key(
    a: ScriptedWorker, b: ScriptedWorker, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("SECRET\n")
    async with administering(a, worker_api_key_file=str(tmp_path / "key")) as admin:
        await admin.add(b)
        await admin.until_up(b)
    assert b.probes
    assert {each.values(b"authorization")[0] for each in b.probes} == {b"Bearer SECRET"}


async def test_what_fails_is_answered_and_logged(a: ScriptedWorker, caplog: pytest.LogCaptureFixture) -> None:
    async with administering(a) as admin:
        admin.router.app._admin._roster = None  # type: ignore[union-attr]
        status, told = await admin.show("a")
        assert (status, "its log says why" in message(told)) == (500, True)
        assert "A request to administer failed" in caplog.text


async def test_a_client_that_goes_while_it_asks(a: ScriptedWorker, caplog: pytest.LogCaptureFixture) -> None:
    async with administering(a) as admin:
        port = admin.router.app._admin.port  # type: ignore[union-attr]
        head = b"POST /admin/workers HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        async with RawClient(port) as client:
            client.send(head + b"content-length: 100\r\n\r\n{")
            await admin.show("a")
        async with RawClient(port) as client:
            client.send(head + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
            assert b" 400 " in (await client.rest()).split(b"\r\n")[0]
        assert (await admin.show("a"))[0] == 200
    assert "A request to administer failed" not in caplog.text


@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\njunk",
        b"content-length: -1\r\n\r\n",
        b"no colon\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_no_error_of_the_routers(
    a: ScriptedWorker, caplog: pytest.LogCaptureFixture, rest: bytes
) -> None:
    head = b"POST /admin/workers HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with administering(a) as admin:
        async with RawClient(admin.router.app._admin.port) as client:  # type: ignore[union-attr]
            client.send(head + rest)
            assert b" 400 " in (await client.rest()).split(b"\r\n")[0]
        assert (await admin.show("a"))[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_address_that_is_taken(a: ScriptedWorker) -> None:
    taken = Address("127.0.0.1", a.port)
    app = App(Settings(admin_listen=taken, port=0))
    with pytest.raises(CannotAdminister, match=f"--admin-listen 127.0.0.1:{a.port}: Address already in use$"):
        await app.start()
    await app.close()


# -- its description


def routes(surface: AdminSurface) -> set[tuple[str, str]]:
    return {(route.method.lower(), route.resource.canonical) for route in surface.app.router.routes() if route.resource}


async def test_the_description_names_every_route_and_no_other(a: ScriptedWorker) -> None:
    async with administering(a) as admin:
        status, told = await admin.ask("GET", "openapi.json")
        assert (status, told) == (200, json.loads(json.dumps(document())))
        assert admin.router.app._admin
        described = {
            (method, path) for path, item in told["paths"].items() for method in item if method != "parameters"
        }
        assert described == routes(admin.router.app._admin)
        assert told["openapi"] == "3.1.0"


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from ([part["$ref"]] if "$ref" in part else [])
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from references(inner)


def test_every_reference_leads_somewhere() -> None:
    known = {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]}
    assert set(references(document())) == known


def fits(schema: dict[str, Any], value: Any) -> bool:
    """As much of JSON Schema as a worker's keys need."""
    kinds = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
    stated = schema.get("type", [])
    types = [stated] if isinstance(stated, str) else stated
    if types and not any(type(value) is kinds[name] for name in types):
        return False
    if value is None or "enum" in schema:
        return value in schema.get("enum", [None])
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0) and bool(re.search(schema.get("pattern", ""), value))
    return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))


def is_worker(body: dict[str, Any]) -> bool:
    known = NEW_WORKER["properties"]
    return set(NEW_WORKER["required"]) <= set(body) <= set(known) and all(fits(known[k], v) for k, v in body.items())


def test_the_description_of_a_worker_has_its_keys() -> None:
    assert set(NEW_WORKER["properties"]) == set(WORKER_KEYS)
    assert NEW_WORKER["additionalProperties"] is False


@pytest.mark.parametrize("body", [body for body, _ in WRONG_WORKERS if "v1" not in str(body) and ":0" not in str(body)])
def test_the_description_refuses_what_is_refused(body: dict[str, Any]) -> None:
    assert not is_worker(body)


@pytest.mark.parametrize("url", ["http://[.De0D:8E2]", "http://[::1", "http://h:65536", "http://h:99999", "http://h:0"])
def test_an_address_that_cannot_be_is_not_described_either(url: str) -> None:
    assert not is_worker({"url": url})
    with pytest.raises(ValueError, match=re.escape(url)):
        worker_from_mapping({"url": url})


def test_a_change_of_nothing_is_not_described() -> None:
    assert document()["components"]["schemas"]["Change"]["minProperties"] == 1


def test_a_change_is_described_as_it_would_be_of_a_new_worker() -> None:
    described = document()["components"]["schemas"]["Change"]["properties"]
    assert {name: described[name] for name in described if name != "drain"} == {
        name: NEW_WORKER["properties"][name] for name in ("role", "connector", "bootstrap_port", "host")
    }


VALUES: dict[str, list[Any]] = {
    "url": ["http://h:1", "https://h", "http://10.0.0.7:8000/", "http://[::1]:80", "http://a_b.c-d:65535/base/path"],
    "name": [None, "a", "10.0.0.7:8000", "A_b.c-d"],
    "events": [None, "tcp://h:1", "ipc:///tmp/x"],
    "replay": [None, "tcp://h:1"],
    "block_size": [None, 1, 2**20],
    "role": list(ROLES),
    "connector": [None, "nixl", "nixl-push", "mooncake", "store", "sglang"],
    "bootstrap_port": [None, 1, 65535],
    "host": [None, "h", "rack 7"],
    "store": [True, False],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in VALUES.items() for value in values])
def test_the_description_takes_what_is_taken(key: str, value: Any) -> None:
    body = {"url": "http://h:1", key: value}
    worker_from_mapping(body)
    assert is_worker(body)


async def test_what_is_told_has_the_shape_that_is_described(a: ScriptedWorker) -> None:
    schemas = document()["components"]["schemas"]
    async with administering(a) as admin:
        for told in ((await admin.show("a"))[1], (await admin.ask("GET", "workers"))[1]["workers"][0]):
            assert set(told) == set(schemas["WorkerState"]["required"]) == set(WorkerState.__struct_fields__)
            assert set(told["ranks"][0]) == set(schemas["RankStatus"]["required"])
            msgspec.convert(told, WorkerState)
    for shape in (Change, Limits, LogLevel):
        assert schemas[shape.__name__]["additionalProperties"] is False

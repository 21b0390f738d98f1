"""A router that asks for keys: who comes in, how often, for what; and where keys go."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from router.security.guard import Guard
from router.security.keys import Key, Keys
from router.security.security import check_security
from router.settings import Settings, SettingsError
from router.workers.spec import parse_worker
from tests.fakes.raw_client import Answered, RawClient, get, post
from tests.fakes.scripted_worker import ScriptedWorker, answer, drop, never
from tests.fakes.waiting import until
from tests.router.proxy.running import RunningRouter, running, source_of
from tests.router.security.files import ask_with, bearer, get_with, write_keys

ONE, TWO, ADMIN = "kvr-one", "kvr-two", "kvr-admin"
EVERYBODY: list[dict[str, Any]] = [
    {"name": "one", "key": ONE},
    {"name": "two", "key": TWO, "models": ["tiny"]},
    {"name": "ops", "key": ADMIN, "admin": True},
]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return write_keys(tmp_path, *EVERYBODY)


def error(got: Answered) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(got.body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


PATHS = [post(), post("/v1/chat/completions", b'{"messages":[]}'), get("/v1/models"), post("/v1/embeddings", b"{}")]
PATHS += [get("/v1/files"), get("/nowhere"), get("/metrics")]


@pytest.mark.parametrize("request_", PATHS)
async def test_without_a_key_nothing_is_done(a: ScriptedWorker, keys: str, request_: bytes) -> None:
    async with running(a, api_keys=keys) as router, router.client() as client:
        got = await client.ask(request_)
        assert router.total("router_denied_requests_total", reason="no_key") == 1
    assert (got.status, got.header(b"www-authenticate")) == (401, b"Bearer")
    assert got.header(b"x-request-id")
    assert b"An API key is needed here" in got.body
    assert (error(got)["type"], error(got)["code"]) == ("authentication_error", "invalid_api_key")
    assert a.requests == []


WRONG = [
    b"Authorization: Bearer kvr-wrong",
    b"Authorization: Bearer",
    b"Authorization: Bearer " + ONE.encode() + b"x",
    b"Authorization: Basic " + ONE.encode(),
    b"Authorization: " + ONE.encode(),
    b"Authorization: Bearer \xff\xfe",
    b"X-Api-Key: kvr-wrong",
    b"X-Api-Key: " + ONE.encode() + b"\r\n" + bearer(ONE),
    b"X-Api-Key: " + ONE.encode() + b"\r\nAuthorization: Basic x",
    bearer(ONE) + b"\r\n" + bearer("kvr-wrong"),
]


@pytest.mark.parametrize("header", WRONG)
async def test_with_a_wrong_key_nothing_is_done(a: ScriptedWorker, keys: str, header: bytes) -> None:
    async with running(a, api_keys=keys) as router, router.client() as client:
        got = await client.ask(post("/v1/completions", b'{"prompt":"x"}', header))
    assert got.status == 401
    assert b"kvr-" not in got.body
    assert a.requests == []


SEVERAL = [b"X-Api-Key: " + ONE.encode() + b"\r\n" + bearer(ONE), bearer(ONE) + b"\r\n" + bearer(ONE)]


@pytest.mark.parametrize("headers", SEVERAL)
async def test_who_shows_several_keys_is_told_so(a: ScriptedWorker, keys: str, headers: bytes) -> None:
    """As Anthropic's clients do that have a key and a token: to hear that a key is needed would not help."""
    async with running(a, api_keys=keys) as router, router.client() as client:
        got = await client.ask(post("/v1/messages", b'{"messages":[]}', headers))
    assert got.status == 401
    assert b"2 headers" in got.body


async def test_a_stranger_is_refused_before_his_body_is_read(a: ScriptedWorker, keys: str) -> None:
    async with running(a, api_keys=keys) as router:
        for head in (post(), get("/health"), get("/ready")):
            line = head.partition(b"\r\n")[0]
            for announced in (b"content-length: 50000000", b"transfer-encoding: chunked"):
                async with router.client() as client:
                    client.send(line + b"\r\nhost: x\r\n" + announced + b"\r\n\r\n{")
                    assert (await client.answer()).status == 401
                    assert await client.rest() == b""


async def test_with_a_key_and_with_its_scheme_in_any_case(a: ScriptedWorker, keys: str) -> None:
    async with running(a, api_keys=keys) as router, router.client() as client:
        for _ in range(3):  # the second time on its head is known
            assert (await client.ask(ask_with(ONE))).status == 200
        assert (
            await client.ask(post("/v1/completions", b'{"prompt":"x"}', b"authorization: bEARER kvr-one"))
        ).status == 200
    assert len(a.requests) == 4


async def test_with_a_key_where_anthropics_clients_put_it(a: ScriptedWorker, keys: str) -> None:
    async with running(a, api_keys=keys) as router, router.client() as client:
        got = await client.ask(post("/v1/messages", b'{"messages":[]}', b"X-Api-Key: " + ONE.encode()))
    assert got.status == 200
    assert ONE.encode() not in a.requests[0].head


# -- pages


async def test_health_is_open_and_ready_says_yes_or_no_only(a: ScriptedWorker, keys: str) -> None:
    async with running(a, api_keys=keys) as router, router.client() as client:
        for request in (get("/health"), get("/health", b"content-length: 0")):
            assert (await client.ask(request)).status == 200
        for request in (get("/ready"), get_with(ONE, "/ready"), get_with("kvr-wrong", "/ready")):
            got = await client.ask(request)
            assert (got.status, json.loads(got.body)) == (200, {"ready": True})
        assert json.loads((await client.ask(get_with(ADMIN, "/ready"))).body)["workers"]


async def test_workers_are_named_only_to_who_may_see_them(a: ScriptedWorker, keys: str) -> None:
    to = b"x-router-target-worker: nobody"
    async with running(a, api_keys=keys) as router, router.client() as client:
        told = [
            error(await client.ask(post("/v1/embeddings", b"{}", bearer(key), to)))["message"] for key in (ONE, ADMIN)
        ]
    assert told == ["There is no worker 'nobody'.", "There is no worker 'nobody'; those here: a."]


async def test_metrics_are_for_admin_keys(a: ScriptedWorker, keys: str) -> None:
    async with running(a, api_keys=keys) as router, router.client() as client:
        got = await client.ask(get_with(ONE, "/metrics"))
        assert (got.status, error(got)["type"]) == (403, "permission_error")
        assert router.total("router_denied_requests_total", reason="admin") == 1
        assert (await client.ask(get_with(ADMIN, "/metrics"))).status == 200


async def test_pages_that_are_not_protected(a: ScriptedWorker, keys: str) -> None:
    async with running(a, api_keys=keys, protect_metrics=False) as router, router.client() as client:
        assert (await client.ask(get("/metrics"))).status == 200
        assert json.loads((await client.ask(get("/ready"))).body)["workers"]
        assert (await client.ask(get("/v1/models"))).status == 401


# -- models


async def test_a_model_that_is_not_for_this_key_is_as_if_it_were_not_there(a: ScriptedWorker, keys: str) -> None:
    a.pages.models = ["tiny", "secret-model"]
    async with running(a, api_keys=keys) as router, router.client() as client:
        for path in ("/v1/completions", "/v1/embeddings"):
            got = await client.ask(ask_with(TWO, b'{"model":"secret-model","prompt":"x"}', path))
            assert (got.status, error(got)["code"], error(got)["param"]) == (404, "model_not_found", "model")
            assert (await client.ask(ask_with(TWO, b'{"model":"tiny","prompt":"x"}', path))).status == 200
            assert (await client.ask(ask_with(ONE, b'{"model":"secret-model","prompt":"x"}', path))).status == 200
        assert router.total("router_denied_requests_total", reason="model") == 2
        nameless = await client.ask(ask_with(TWO, b'{"prompt":"x"}'))
        assert (nameless.status, error(nameless)["param"]) == (403, "model")
        assert b"name one of tiny " in nameless.body
        unknown = await client.ask(ask_with(TWO, b'{"model":"no","prompt":"x"}'))
        assert b"secret-model" not in unknown.body
        shown = [await client.ask(get_with(key, "/v1/models/secret-model")) for key in (ONE, TWO)]
        assert [got.status for got in shown] == [200, 404]
        assert (await client.ask(get_with(TWO, "/v1/models/tiny"))).status == 200
        listed = {key: await client.ask(get_with(key, "/v1/models")) for key in (ONE, TWO)}
    names = {key: [model["id"] for model in json.loads(got.body)["data"]] for key, got in listed.items()}
    assert names == {ONE: ["tiny", "secret-model"], TWO: ["tiny"]}


async def test_a_model_that_is_gone_is_not_answered_by_the_only_other(a: ScriptedWorker, keys: str) -> None:
    """SGLang answers for the model that it has, whatever name it is asked for on most paths."""
    a.pages.models = ["secret-model"]
    async with running(a, api_keys=keys) as router, router.client() as client:
        for path in ("/v1/embeddings", "/v1/responses", "/v1/messages"):
            got = await client.ask(ask_with(TWO, b'{"model":"tiny","input":"x"}', path))
            assert (got.status, error(got)["code"]) == (404, "model_not_found")
            assert b"secret-model" not in got.body
        assert a.requests == []
        assert (await client.ask(ask_with(ONE, b'{"model":"tiny","input":"x"}', "/v1/embeddings"))).status == 200


async def test_a_key_for_some_models_names_no_adapter_besides(a: ScriptedWorker, keys: str) -> None:
    async with running(a, api_keys=keys) as router, router.client() as client:
        for path in ("/v1/completions", "/v1/embeddings"):
            body = b'{"model":"tiny","prompt":"x","lora_path":%s}'
            got = await client.ask(ask_with(TWO, body % b'"secret"', path))
            assert (got.status, error(got)["param"]) == (403, "lora_path")
            assert (await client.ask(ask_with(TWO, body % b"null", path))).status == 200
            assert (await client.ask(ask_with(ONE, body % b'"secret"', path))).status == 200


HIDDEN = [
    (b'{"prompt":"x"}', b"application/json"),
    (b'{"model":null,"prompt":"x"}', b"application/json"),
    (b'{"model":"tiny","prompt":"x","model":"secret-model"}', b"application/json"),
    (b'{"model":"tiny","prompt":"x","mod\\u0065l":"secret-model"}', b"application/json"),
]
AS_A_FORM = [
    (b'{"model":"tiny","x":"&model=secret-model&"}', b"application/x-www-form-urlencoded"),
    (b'{"model":"tiny"}', b"application/x-www-form-urlencoded\r\ncontent-type: application/json"),
    (b'{"model":"tiny"}', b"text/plain"),
    (b"no JSON", b"application/json"),
    (b"", b"application/json"),
]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        *[("/v1/completions", *each) for each in HIDDEN],
        *[("/v1/embeddings", *each) for each in HIDDEN + AS_A_FORM],
    ],
)
async def test_a_key_for_some_models_names_its_model_beyond_doubt(
    a: ScriptedWorker, keys: str, path: str, body: bytes, kind: bytes
) -> None:
    a.pages.models = ["tiny", "secret-model"]
    async with running(a, api_keys=keys) as router, router.client() as client:
        got = await client.ask(post(path, body, bearer(TWO), b"content-type: " + kind))
    assert got.status in {400, 403, 404}
    assert a.requests == []


# -- limits


async def test_requests_a_minute(a: ScriptedWorker, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, {"name": "one", "key": ONE, "requests_per_minute": 2}, {"name": "two", "key": TWO})
    async with running(a, api_keys=keys) as router, router.client() as client:
        statuses = [(await client.ask(ask_with(ONE))).status for _ in range(2)]
        got = await client.ask(ask_with(ONE))
        assert statuses == [200, 200]
        assert (got.status, error(got)["type"], got.header(b"retry-after")) == (429, "rate_limit_error", b"30")
        assert (await client.ask(ask_with(TWO))).status == 200
        assert router.total("router_denied_requests_total", reason="rate") == 1
    assert len(a.requests) == 3


async def busy(client: RawClient, worker: ScriptedWorker, router: RunningRouter, key: str) -> None:
    count = len(worker.requests)
    worker.then(never)
    client.send(ask_with(key))
    await until(lambda: len(worker.requests) > count)


async def test_requests_at_a_time_however_they_end(a: ScriptedWorker, b: ScriptedWorker, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, {"name": "one", "key": ONE, "concurrency": 1})
    async with running(a, api_keys=keys) as router, router.client() as client:
        for script in (answer(), answer(b"{}", 400), drop, answer(b"{}", 500)):
            a.then(script)
            assert (await client.ask(ask_with(ONE))).status != 429
            a.behave()
        assert (await client.ask(ask_with(ONE, b'{"prompt":7}'))).status == 400
        async with router.client() as first:
            await busy(first, a, router, ONE)
            got = await client.ask(ask_with(ONE))
            assert (got.status, got.header(b"retry-after")) == (429, b"1")
            assert router.total("router_denied_requests_total", reason="concurrency") == 1
            assert (await client.ask(get_with(ONE, "/v1/models"))).status == 429
        await router.at_rest()  # the first client has gone
        assert (await client.ask(ask_with(ONE))).status == 200


def guard(*entries: Key, protect: bool = True) -> Guard:
    return Guard(Keys(entries), protect, lambda: 0.0, lambda _: None)


def test_keys_read_again_keep_what_is_in_use() -> None:
    """What has been used up of a limit stays used up, unless the limit is another. All else is as it was read last."""
    one = Key("one", sha256(ONE.encode()).hexdigest(), requests_per_minute=1)
    door = guard(one, Key("gone", sha256(TWO.encode()).hexdigest()), Key("unused", "b" * 64))
    tenant, _ = (door._tenant([(b"x-api-key", key.encode())]) for key in (ONE, TWO))
    assert set(door._tenants) == {"one", "gone"}, "thousands may never come"
    tenant.admit(0.0)
    assert tenant.may_use("secret-model")
    door.take(Keys([Key("one", "c" * 64, requests_per_minute=1, models=frozenset(("tiny",)))]))
    assert door._tenants == {"one": tenant}
    assert not tenant.may_use("secret-model")
    with pytest.raises(Exception, match="1 requests a minute"):
        tenant.admit(0.0)
    door.take(Keys([Key("one", "c" * 64, requests_per_minute=2)]))
    tenant.admit(0.0)


def test_a_key_that_is_put_back_finds_its_requests_that_are_in_progress() -> None:
    one = Key("one", sha256(ONE.encode()).hexdigest(), concurrency=1)
    door, shown = guard(one), [(b"x-api-key", ONE.encode())]
    door._tenant(shown).begin()
    door.take(Keys([]))
    with pytest.raises(Exception, match="not valid"):
        door._tenant(shown)
    door.take(Keys([one]))
    with pytest.raises(Exception, match="1 requests in progress"):
        door._tenant(shown).admit(0.0)


async def test_a_hangup_reads_the_keys_again(a: ScriptedWorker, tmp_path: Path) -> None:
    path = write_keys(tmp_path, {"name": "one", "key": ONE})
    async with running(a, source=source_of(a), api_keys=path) as router, router.client() as client:
        write_keys(tmp_path, {"name": "two", "key": TWO})
        await router.hang_up()
        assert (await client.ask(ask_with(TWO))).status == 200
        assert (await client.ask(ask_with(ONE))).status == 401
        (tmp_path / "keys.yaml").write_text("nonsense: [")
        await router.hang_up()
        async with router.client() as other:
            assert (await other.ask(ask_with(TWO))).status == 200


# -- where keys go


async def authorizations(worker: ScriptedWorker, header: bytes, **settings: Any) -> list[bytes]:
    """What the worker sees of a client's header."""
    async with running(worker, **settings) as router, router.client() as client:
        for path in ("/v1/completions", "/v1/embeddings"):
            assert (await client.ask(post(path, b'{"prompt":"x"}', header))).status == 200
    return [value for request in worker.requests for value in request.values(b"authorization")]


async def test_without_keys_of_its_own_the_client_and_the_engine_settle_it(a: ScriptedWorker) -> None:
    assert await authorizations(a, b"Authorization: Bearer theirs") == [b"Bearer theirs"] * 2


async def test_a_clients_key_ends_here(a: ScriptedWorker, keys: str) -> None:
    assert await authorizations(a, bearer(ONE), api_keys=keys) == []


def test_nor_does_it_pass_by_the_other_header_that_shows_it(keys: str) -> None:
    stated: dict[str, Any] = {"workers": (parse_worker("http://a:1"),), "pass_header": ("x-api-key",)}
    check_security(Settings(**stated))  # an engine's own affair
    with pytest.raises(SettingsError, match="--pass-header x-api-key"):
        check_security(Settings(api_keys=keys, **stated))


@pytest.fixture
def worker_key(tmp_path: Path) -> str:
    path = tmp_path / "worker.key"
    path.write_text("sk-engines\n")
    return str(path)


async def test_the_workers_key_takes_its_place(a: ScriptedWorker, keys: str, worker_key: str) -> None:
    seen = await authorizations(a, bearer(ONE), api_keys=keys, worker_api_key_file=worker_key)
    assert seen == [b"Bearer sk-engines"] * 2


async def test_the_workers_key_takes_its_place_without_keys_too(a: ScriptedWorker, worker_key: str) -> None:
    seen = await authorizations(a, b"Authorization: Bearer theirs", worker_api_key_file=worker_key)
    assert seen == [b"Bearer sk-engines"] * 2


async def test_what_the_router_asks_for_itself_carries_the_workers_key(a: ScriptedWorker, worker_key: str) -> None:
    async with running(a, router_mode="kv", worker_api_key_file=worker_key) as router, router.client() as client:
        assert (await client.ask(post())).status == 200
    assert {"/health", "/v1/models", "/tokenize", "/metrics"} <= set(a.asked)
    assert {each.values(b"authorization")[0] for each in a.probes} == {b"Bearer sk-engines"}

"""What the router answers itself: its pages, its refusals, and who may serve what."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engines.problems import EVENTS_OFF
from indexer.events import EventBatch, LoadReport
from indexer.hashing import HASH_VERSION
from indexer.types import WorkerRank
from router.metrics.registry import Sample
from tests.fakes.raw_client import Answered, get, post
from tests.fakes.scripted_worker import ScriptedWorker, answer, never
from tests.fakes.waiting import until
from tests.router.proxy.running import running

SECRET = b"SECRET-PROMPT"


def error(got: Answered) -> dict[str, Any]:
    """The error object, which has all that OpenAI's clients read."""
    assert got.header(b"content-type") == b"application/json"
    found: dict[str, Any] = json.loads(got.body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"]
    return found


# -- bad requests

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
BAD = [
    (COMPLETION, b""),
    (COMPLETION, SECRET),
    (COMPLETION, b'{"prompt":"SECRET-PROMPT"'),
    (COMPLETION, b'{"prompt":"SECRET-PROMPT"} trailing'),
    (COMPLETION, b'{"prompt":"SECRET-PROMPT","model":7}'),
    (COMPLETION, b'{"prompt":"SECRET-PROMPT","cache_salt":{"SECRET-PROMPT":1}}'),
    (COMPLETION, b'["SECRET-PROMPT"]'),
    (COMPLETION, b'"SECRET-PROMPT"'),
    (COMPLETION, b"null"),
    (COMPLETION, b'{"messages":[{"role":"user","content":"SECRET-PROMPT"}]}'),
    (COMPLETION, b'{"prompt":null}'),
    (COMPLETION, b'{"prompt":7}'),
    (COMPLETION, b'{"prompt":{"text":"SECRET-PROMPT"}}'),
    (COMPLETION, b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    (COMPLETION, b'{"prompt":"a","x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"),
    (COMPLETION, '{"prompt":"SECRET-PROMPT"}'.encode("utf-16")),
    (COMPLETION, b'{"prompt":"SECRET-PROMPT\\ud800"}'),
    (COMPLETION, b'{"prompt":"SECRET-PROMPT\n"}'),
    (COMPLETION, BOM_UTF8 * 2 + b'{"prompt":"SECRET-PROMPT"}'),
    (CHAT, b'{"prompt":"SECRET-PROMPT"}'),
    (CHAT, b'{"messages":"SECRET-PROMPT"}'),
    (CHAT, b'{"messages":{"content":"SECRET-PROMPT"}}'),
]
NOT_UTF_8 = [
    (COMPLETION, b'{"prompt":"SECRET-PROMPT \xff\xfe"}'),
    (COMPLETION, b'{"prompt":"SECRET-PROMPT \xed\xa0\x80"}'),
    (COMPLETION, b'{"prompt":"a","SECRET-PROMPT\xff":1}'),
    (CHAT, b'{"messages":[{"role":"user","content":"SECRET-PROMPT\xc3"}]}'),
]


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_what_is_no_request_is_refused_and_never_quoted(a: ScriptedWorker, mode: str) -> None:
    async with running(a, router_mode=mode) as router, router.client() as client:
        for path, body in BAD + (NOT_UTF_8 if mode == "kv" else []):
            got = await client.ask(post(path, body))
            assert got.status == 400, body[:60]
            assert error(got)["type"] == "invalid_request_error"
            assert b"SECRET" not in got.body
            assert len(got.body) < 500
        assert (await client.ask(post())).status == 200
    assert len(a.requests) == 1


async def test_text_that_nothing_here_reads_is_the_engines_to_judge(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        for path, body in NOT_UTF_8:
            assert (await client.ask(post(path, body))).status == 200
    assert [request.body for request in a.requests] == [body for _, body in NOT_UTF_8]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETION, b'{"model":"tiny"}', "prompt"),
        (COMPLETION, b'{"prompt":7}', "prompt"),
        (CHAT, b'{"messages":"hello"}', "messages"),
        (CHAT, b"{}", "messages"),
        (CHAT, b'{"messages":[],"model":["x"]}', "model"),
    ],
)
async def test_a_wrong_field_is_named(a: ScriptedWorker, path: str, body: bytes, param: str) -> None:
    async with running(a) as router, router.client() as client:
        found = error(await client.ask(post(path, body)))
    assert found["param"] == param
    assert param in found["message"]


async def test_odd_prompts_are_the_engines_to_judge(a: ScriptedWorker) -> None:
    """The router reads what it needs and refuses only what is no request."""
    odd = [b'{"prompt":[]}', b'{"prompt":""}', b'{"prompt":[[1,2],[3]]}', b'{"prompt":["a","b"]}', b'{"prompt":[{}]}']
    image = b'[{"role":"user","content":[{"type":"image_url"}]}]'
    chats = [b"[]", b"[7]", b'[{"role":7}]', b'[{"content":null}]', image]
    async with running(a, router_mode="kv") as router, router.client() as client:
        for body in odd:
            assert (await client.ask(post(COMPLETION, body))).status == 200, body
        for messages in chats:
            assert (await client.ask(post(CHAT, b'{"messages":' + messages + b"}"))).status == 200, messages
    assert len(a.requests) == len(odd) + len(chats)


@pytest.mark.parametrize(
    "prompt",
    [
        "[-1]",
        "[1,99999999999999999999]",
        '[1,"SECRET-PROMPT",null]',
        "[[1],[4294967296]]",
        "[1.0,2.0]",
        '["1",2]',
        '[["1"]]',
    ],
)
async def test_what_is_no_token_id_never_reaches_an_engine(a: ScriptedWorker, prompt: str) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        got = await client.ask(post(COMPLETION, b'{"prompt":' + prompt.encode() + b"}"))
        chat = await client.ask(post(CHAT, b'{"messages":[],"input_ids":' + prompt.encode() + b"}"))
    assert (got.status, error(got)["param"]) == (400, "prompt")
    assert (chat.status, error(chat)["param"]) == (400, "input_ids")
    assert b"SECRET" not in got.body + chat.body
    assert a.requests == []


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/embeddings", "input"),
        ("/v1/classify", "input"),
        ("/classify", "input_ids"),
        ("/v1/score", "query"),
        ("/v1/score", "items"),
    ],
)
async def test_nor_do_those_of_an_input(a: ScriptedWorker, path: str, field: str) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        for ids in (b"[1,4294967295]", b"[[1],[2,-1]]"):
            got = await client.ask(post(path, b'{"%s":%s}' % (field.encode(), ids)))
            assert (got.status, error(got)["param"]) == (400, field)
        assert a.requests == []
        for ids in (b"[1,2]", b"[[1],[2]]"):
            assert (await client.ask(post(path, b'{"%s":%s}' % (field.encode(), ids)))).status == 200


@pytest.mark.parametrize("given", [b'"x"', b'["x","y"]', b'[{"text":"x"}]', b"7", b"null", b'["\xff"]'])
async def test_other_inputs_are_the_engines_to_judge(a: ScriptedWorker, given: bytes) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        assert (await client.ask(post("/v1/embeddings", b'{"input":' + given + b"}"))).status == 200
    assert len(a.requests) == 1


async def test_a_body_over_the_limit(a: ScriptedWorker) -> None:
    body = b'{"prompt":"' + b"x" * 1000 + b'"}'
    chunks = b"".join(b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(20))
    async with running(a, max_body_size=1000) as router:
        for request in (
            post(body=body),
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunks,
        ):
            async with router.client() as client:
                got = await client.ask(request)
                assert got.status == 413
                assert "--max-body-size" in error(got)["message"]
                assert await client.rest() == b""
        async with router.client() as client:
            assert (await client.ask(post(body=body[:900] + b'"}'))).status == 200
    assert len(a.requests) == 1


async def test_a_large_body_over_the_limit_that_is_still_being_sent(a: ScriptedWorker) -> None:
    """The refusal arrives although the client is not finished."""
    async with running(a, max_body_size=1000) as router, router.client() as client:
        client.send(post(body=b"x" * 3_000_000))
        assert (await client.answer()).status == 413


async def test_a_prompt_longer_than_the_model(a: ScriptedWorker) -> None:
    a.pages.max_model_len = 10
    async with running(a, router_mode="kv") as router, router.client() as client:
        for prompt in (b'"SECRET-PROMPT"', b"[1,2,3,4,5,6,7,8,9,10,11]"):
            got = await client.ask(post(COMPLETION, b'{"prompt":' + prompt + b"}"))
            assert got.status == 400
            assert error(got)["code"] == "context_length_exceeded"
            assert b"SECRET" not in got.body
    assert a.requests == []


@pytest.mark.parametrize(("mode", "length"), [("kv", 20), ("round-robin", 10)])
async def test_a_model_is_as_long_as_what_finds_a_worker(
    a: ScriptedWorker, b: ScriptedWorker, mode: str, length: int
) -> None:
    """In mode kv, what is too long for one goes to another."""
    a.pages.max_model_len, b.pages.max_model_len = 10, 20
    async with running(a, b, router_mode=mode) as router, router.client() as client:
        (model,) = json.loads((await client.ask(get("/v1/models"))).body)["data"]
    assert model["max_model_len"] == length


# -- who serves what


async def test_models_are_the_union(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.pages.models, b.pages.models = ["one", "both"], ["both", "two"]
    async with running(a, b) as router, router.client() as client:
        got = json.loads((await client.ask(get("/v1/models"))).body)
        assert got["object"] == "list"
        assert {model["id"] for model in got["data"]} == {"one", "two", "both"}
        assert all(model["object"] == "model" and model["owned_by"] == "vllm" for model in got["data"])
        for name, servers in (("one", {b"a"}), ("two", {b"b"}), ("both", {b"a", b"b"})):
            body = json.dumps({"model": name, "prompt": "x"}).encode()
            for path in (COMPLETION, "/v1/embeddings"):
                answers = [await client.ask(post(path, body)) for _ in range(4)]
                assert {each.header(b"x-router-worker") for each in answers} == servers


async def test_one_model_is_shown_by_the_router_whoever_serves_it(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """vLLM has no such path, and another worker's engine would not know the model."""
    a.pages.models, b.pages.models = ["one"], ["two", "org/three"]
    async with running(a, b) as router, router.client() as client:
        listed = {model["id"]: model for model in json.loads((await client.ask(get("/v1/models"))).body)["data"]}
        for path, name in (("one", "one"), ("two", "two"), ("org/three", "org/three"), ("org%2Fthree", "org/three")):
            got = await client.ask(get(f"/v1/models/{path}"))
            assert (got.status, json.loads(got.body)) == (200, listed[name])
        for path in ("nobody", "%FF"):
            got = await client.ask(get(f"/v1/models/{path}"))
            assert (got.status, error(got)["code"]) == (404, "model_not_found")
        everyone = await client.ask(get("/v1/models/"))
        assert (everyone.status, json.loads(everyone.body)["data"]) == (200, [*listed.values()])
        deleted = await client.ask(get("/v1/models/one").replace(b"GET", b"DELETE", 1))
        assert (deleted.status, deleted.header(b"allow")) == (405, b"GET, HEAD")
    assert a.requests == b.requests == []


async def test_a_model_whose_workers_are_down_is_not_said_to_be_unknown(a: ScriptedWorker, b: ScriptedWorker) -> None:
    """Clients ask again after 503, and not after 404."""
    a.pages.models, b.pages.models = ["one"], ["two"]
    async with running(a, b) as router, router.client() as client:
        await a.refuse()
        assert (await client.ask(post(body=b'{"model":"one","prompt":"x"}'))).status == 502
        for request in (get("/v1/models/one"), post(body=b'{"model":"one","prompt":"x"}')):
            got = await client.ask(request)
            assert (got.status, error(got)["type"]) == (503, "server_error")
            assert "No worker that serves 'one' is up" in error(got)["message"]
        unknown = await client.ask(get("/v1/models/nobody"))
        assert (unknown.status, error(unknown)["code"]) == (404, "model_not_found")
        assert "these do: one, two." in error(unknown)["message"]


async def test_an_unknown_model(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        got = await client.ask(post(body=b'{"model":"nobody","prompt":"SECRET-PROMPT"}'))
    assert got.status == 404
    found = error(got)
    assert (found["code"], found["param"], found["type"]) == ("model_not_found", "model", "not_found_error")
    assert "nobody" in found["message"]
    assert "tiny" in found["message"]
    assert b"SECRET" not in got.body


NEED_MODEL = [COMPLETION, "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"]


@pytest.mark.parametrize("path", NEED_MODEL)
async def test_among_several_models_one_has_to_be_named(a: ScriptedWorker, b: ScriptedWorker, path: str) -> None:
    """Else it would be left to chance which answers."""
    a.pages.models, b.pages.models = ["one"], ["two"]
    async with running(a, b) as router, router.client() as client:
        for name in (b"", b'"model":"",', b'"model":null,'):
            body = b'{%b"prompt":"x","messages":[{"role":"user","content":"x"}]}' % name
            got = await client.ask(post(path, body))
            assert (got.status, error(got)["param"]) == (400, "model")
        assert a.requests == b.requests == []
        got = await client.ask(post(path, body, b"x-router-target-worker: b"))
        assert (got.status, got.header(b"x-router-worker")) == (200, b"b")


JSON = b"content-type: application/json"
FORM = b"content-type: multipart/form-data; boundary=xyz"


def form(model: str) -> bytes:
    lines = ["--xyz", 'Content-Disposition: form-data; name="file"; filename="a.wav"', "", "RIFF"]
    lines += ["--xyz", 'Content-Disposition: form-data; name="model"', "", model, "--xyz--", ""]
    return "\r\n".join(lines).encode()


async def test_a_form_goes_where_its_model_is_served(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.pages.models, b.pages.models = ["one"], ["two"]
    async with running(a, b) as router, router.client() as client:
        for name, server in (("one", b"a"), ("one", b"a"), ("two", b"b"), ("two", b"b")):
            got = await client.ask(post("/v1/audio/transcriptions", form(name), FORM))
            assert (got.status, got.header(b"x-router-worker")) == (200, server)


UNKNOWN = [("/v1/audio/transcriptions", form("nobody"), FORM)]
UNKNOWN += [(path, b'{"model":"nobody"}', JSON) for path in ("/v1/embeddings", "/v1/messages", "/v1/responses")]


@pytest.mark.parametrize(("path", "body", "kind"), UNKNOWN)
async def test_among_several_models_an_unknown_one_is_nobodys(
    a: ScriptedWorker, b: ScriptedWorker, path: str, body: bytes, kind: bytes
) -> None:
    """An engine that does not look at the name would answer with a model of its own."""
    a.pages.models, b.pages.models = ["one"], ["two"]
    async with running(a, b) as router, router.client() as client:
        got = await client.ask(post(path, body, kind))
        assert (got.status, error(got)["code"]) == (404, "model_not_found")
    assert a.requests == b.requests == []


@pytest.mark.parametrize(("path", "body", "kind"), UNKNOWN)
async def test_the_engines_of_one_model_judge_an_unknown_name(
    a: ScriptedWorker, path: str, body: bytes, kind: bytes
) -> None:
    async with running(a) as router, router.client() as client:
        assert (await client.ask(post(path, body, kind))).status == 200


async def test_no_worker_is_up(a: ScriptedWorker) -> None:
    await a.refuse()
    async with running(a, health_interval=0.2) as router, router.client() as client:
        for request in (post(), post(body=b'{"model":"any","prompt":"x"}'), post("/v1/embeddings"), get("/v1/files")):
            got = await client.ask(request)
            assert got.status == 503
            assert error(got)["type"] == "server_error"
        ready = await client.ask(get("/ready"))
        assert ready.status == 503
        (worker,) = json.loads(ready.body)["workers"]
        assert (worker["up"], worker["trouble"]) == (False, "cannot be reached: Connection refused")
        assert (await client.ask(get("/health"))).status == 200
        assert json.loads((await client.ask(get("/v1/models"))).body)["data"] == []
        await a.listen()
        await until(lambda: router.is_up(a))
        assert (await client.ask(get("/ready"))).status == 200
        assert (await client.ask(post())).status == 200


async def test_a_model_whose_only_worker_is_down(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.pages.models, b.pages.models = ["one"], ["two"]
    async with running(a, b) as router, router.client() as client:
        await a.refuse()
        statuses = [(await client.ask(post(body=b'{"model":"one","prompt":"x"}'))).status for _ in range(2)]
    assert statuses == [502, 503]  # found down, then known to be


@pytest.mark.parametrize("mode", ["kv", "round-robin", "direct"])
async def test_a_request_names_its_worker(a: ScriptedWorker, b: ScriptedWorker, mode: str) -> None:
    async with running(a, b, router_mode=mode) as router, router.client() as client:
        for name in ("b", b.url, f"{b.url}/"):  # --worker takes its URL with a slash too
            for path in (COMPLETION, "/v1/embeddings"):
                got = await client.ask(post(path, b'{"prompt":"x"}', b"X-Router-Target-Worker: " + name.encode()))
                assert got.header(b"x-router-worker") == b"b"
    assert (len(a.requests), len(b.requests)) == (0, 6)


async def test_a_request_names_a_worker_that_there_is_not(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        for name in (b"nobody", b"http://127.0.0.1:1", b"", b"\xff<a>"):
            got = await client.ask(post(COMPLETION, b'{"prompt":"x"}', b"x-router-target-worker: " + name))
            assert got.status == 400
            error(got)
    assert a.requests == []


async def test_a_request_names_a_worker_that_is_down(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async with running(a, b) as router, router.client() as client:
        await a.refuse()
        target = b"x-router-target-worker: a"
        statuses = [(await client.ask(post(COMPLETION, b'{"prompt":"x"}', target))).status for _ in range(2)]
    assert statuses == [502, 503]
    assert b.requests == []


async def test_a_request_names_a_worker_that_lacks_its_model(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.pages.models, b.pages.models = ["one"], ["two"]
    async with running(a, b) as router, router.client() as client:
        got = await client.ask(post(COMPLETION, b'{"model":"two","prompt":"x"}', b"x-router-target-worker: a"))
    assert got.status == 503
    assert "does not serve" in error(got)["message"]


async def test_direct_mode_wants_a_name(a: ScriptedWorker) -> None:
    async with running(a, router_mode="direct") as router, router.client() as client:
        for path in (COMPLETION, "/v1/embeddings"):
            got = await client.ask(post(path))
            assert got.status == 400
            assert "X-Router-Target-Worker" in error(got)["message"]
        assert (await client.ask(get("/v1/models"))).status == 200


async def test_load_is_balanced_by_what_is_in_flight(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(never, never, never)
    b.then(never, never, never)
    async with running(a, b, router_mode="least-loaded") as router, AsyncExitStack() as stack:
        for number in range(1, 5):
            client = await stack.enter_async_context(router.client())
            client.send(post())
            await until(partial(lambda wanted: len(a.requests) + len(b.requests) == wanted, number))
        assert (len(a.requests), len(b.requests)) == (2, 2)


# -- pages


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
async def test_pages_answer_get_and_head_alone(a: ScriptedWorker, path: str) -> None:
    async with running(a) as router, router.client() as client:
        whole = await client.ask(get(path))
        head = await client.ask(get(path, method=b"HEAD"))
        assert (whole.status, head.status) == (200, 200)
        assert int(head.header(b"content-length") or 0) > 0
        assert (await client.ask(get(path + "?x=1"))).status == 200
        refused = await client.ask(post(path))
        assert (refused.status, refused.header(b"allow")) == (405, b"GET, HEAD")
        error(refused)
    assert a.requests == []


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("method", [b"GET", b"PUT", b"DELETE", b"OPTIONS"])
async def test_inference_takes_post_alone(a: ScriptedWorker, path: str, method: bytes) -> None:
    async with running(a) as router, router.client() as client:
        got = await client.ask(get(path, method=method))
        assert (got.status, got.header(b"allow")) == (405, b"POST")
        error(got)


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/metrics/", "//v1/completions", "/V1/completions", "*"])
async def test_there_is_nothing_else(a: ScriptedWorker, path: str) -> None:
    async with running(a) as router, router.client() as client:
        got = await client.ask(get(path))
        assert got.status in {400, 404}
        error(got)
    assert a.requests == []


@pytest.mark.parametrize(
    "path", ["/tokenize/", "/rerank/?x", "/generate/", "/health/", "/v1/completions/", "/v1/files/"]
)
async def test_a_slash_too_many_is_named(a: ScriptedWorker, path: str) -> None:
    """Engines redirect these; that there is no such path would be said of a path that there is."""
    async with running(a) as router, router.client() as client:
        got = await client.ask(post(path, b'{"prompt":"x"}'))
    assert got.status == 400
    assert "'/' at its end" in error(got)["message"]
    assert a.requests == []


async def test_metrics_can_be_read(a: ScriptedWorker) -> None:
    async with running(a, router_mode="kv", kv_events=False) as router, router.client() as client:
        await client.ask(post())
        got = await client.ask(get("/metrics"))
        families = {family.name: family for family in text_string_to_metric_families(got.body.decode())}
        assert got.header(b"content-type") == b"text/plain; version=0.0.4; charset=utf-8"
        (counted,) = [s for s in families["router_requests"].samples if s.name == "router_requests_total"]
        assert (counted.labels, counted.value) == ({"worker": "a", "status": "200", "end": "complete"}, 1)
        assert families["router_requests_in_flight"].samples[0].value == 0


async def test_metrics_that_cannot_be_read_are_answered_too(a: ScriptedWorker) -> None:
    faults = [ZeroDivisionError()]

    def fail() -> list[Sample]:
        while faults:
            raise faults.pop()
        return []

    async with running(a) as router, router.client() as client:
        router.app._metrics.observe("router_odd", "Never there.", (), fail)
        message = error(await client.ask(get("/metrics")))["message"]
        assert message == "The router could not make this page; its log says why."
        assert (await client.ask(get("/metrics"))).status == 200


async def test_what_alarms_look_at_is_there_before_it_happens(a: ScriptedWorker) -> None:
    """Of a series whose first value is 1, no rate tells."""
    async with running(a, router_mode="kv", kv_events=False) as router:
        read = router.app._metrics.registry.get_sample_value
        assert read("router_worker_failures_total", {"worker": "a"}) == 0
        assert read("router_denied_requests_total", {"reason": "wrong_key"}) == 0
        assert read("router_untokenized_requests_total", {"reason": "engine"}) == 0
        assert read("router_replays_total", {"outcome": "unanswered"}) == 0
        assert read("router_undecodable_messages_total", {"kind": "events"}) == 0


async def test_ready_tells_what_each_worker_is(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        (worker,) = json.loads((await client.ask(get("/ready"))).body)["workers"]
    assert (worker["id"], worker["url"], worker["up"], worker["engine"]) == ("a", a.url, True, "vllm")
    assert (worker["models"], worker["block_size"]) == (["tiny"], 4)
    assert worker["ranks"][0]["routed"] == "by assumption"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"router_mode": "kv"}, True),
        ({"ab": "kv:1,random:1"}, True),
        ({"router_mode": "kv", "kv_events": False}, False),
        ({"router_mode": "kv", "event_plane": "nats://127.0.0.1:1"}, False),
        ({"router_mode": "round-robin"}, False),
    ],
)
async def test_ready_asks_for_kv_events_only_where_the_router_reads_the_engines(
    a: ScriptedWorker, settings: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside a broker it would ask for flags that are not read there, however they were set."""
    async with running(a, **settings) as router, router.client() as client:
        (worker,) = json.loads((await client.ask(get("/ready"))).body)["workers"]
    assert (EVENTS_OFF in worker["problems"]) == (EVENTS_OFF in caplog.messages) == told


@pytest.mark.parametrize(
    ("exact", "version", "routed"),
    [
        (True, HASH_VERSION, "by events"),
        (False, HASH_VERSION, "by events and assumption"),
        (True, HASH_VERSION + 1, "by assumption"),
    ],
)
async def test_ready_tells_how_a_rank_with_events_is_routed(
    a: ScriptedWorker, exact: bool, version: int, routed: str
) -> None:
    async with running(a, router_mode="kv") as router, router.client() as client:
        indexer = router.app._indexer
        indexer.watch(WorkerRank("a", 0))
        indexer.on_report(LoadReport("a", 0, 1, -1, exact))
        indexer.on_batch(EventBatch("a", 0, 1, 0, [], hash_version=version))
        (worker,) = json.loads((await client.ask(get("/ready"))).body)["workers"]
    assert worker["ranks"][0]["routed"] == routed


async def test_a_block_size_that_is_not_the_engines_is_told(
    a: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(a, options=",block_size=64") as router, router.client() as client:
        (worker,) = json.loads((await client.ask(get("/ready"))).body)["workers"]
    (problem,) = [problem for problem in worker["problems"] if "block_size" in problem]
    assert worker["block_size"] == 64
    assert [record.getMessage() for record in caplog.records].count(problem) == 1


async def test_what_a_worker_reports_of_its_answer_is_counted(a: ScriptedWorker) -> None:
    usage = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}'
    a.then(answer(usage), answer(b'{"text":"\\"cached_tokens\\": 5"}'))
    async with running(a) as router, router.client() as client:
        for _ in range(2):
            await client.ask(post())
        assert router.samples("router_reported_cached_tokens_total") == {"a": 8}

"""What passes through the router unchanged, and what must not."""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from codecs import BOM_UTF8

import pytest

from tests.fakes.raw_client import get, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, answer, drop, events, says
from tests.router.proxy.running import running, session

BODIES = [
    b'{"prompt":"hello"}',
    b' {\t"prompt" :\r\n "a" ,  "vendor_field": {"deep": [1, 2.50, 1e3, -0.0]}, "prompt": "b" }\n ',
    '{"prompt":"Grüße, 世界 \U0001f600 \\u00e9"}'.encode(),
    b'{"prompt":[1,2,3],"temperature":0.10000000000000001,"seed":123456789012345678901234567890}',
    b'{"prompt":[' + b"7," * 2_500_000 + b"7]}",
]


@pytest.mark.parametrize("body", BODIES, ids=["plain", "odd spacing", "unicode", "numbers", "5 MB"])
@pytest.mark.parametrize("mode", ["round-robin", "kv"])
async def test_a_body_arrives_byte_for_byte(a: ScriptedWorker, body: bytes, mode: str) -> None:
    a.pages.max_model_len = 10_000_000
    async with running(a, router_mode=mode) as router, router.client() as client:
        assert (await client.ask(post(body=body))).status == 200
    (request,) = a.requests
    assert request.body == body
    assert request.values(b"content-length") == [b"%d" % len(body)]


async def test_a_chunked_request_arrives_whole_with_its_length(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b'8;note=1\r\n{"prompt\r\n5\r\n":"a"\r\n')
        client.send(b"1\r\n}\r\n0\r\ntrailer: x\r\n\r\n")
        assert (await client.answer()).status == 200
    assert a.requests[0].body == b'{"prompt":"a"}'
    assert a.requests[0].values(b"transfer-encoding") == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize("mode", ["round-robin", "kv"])
async def test_a_byte_order_mark_before_json_ends_here(a: ScriptedWorker, path: str, mode: str) -> None:
    """Editors on Windows begin files with one, and engines take it."""
    body = b'{"prompt":"hello","messages":[],"input":"hello"}'
    async with running(a, router_mode=mode) as router, router.client() as client:
        for kind in ((b"content-type: application/json",), ()):
            assert (await client.ask(post(path, BOM_UTF8 + body, *kind))).status == 200
    assert [request.body for request in a.requests] == [body, body]
    assert [request.values(b"content-length") for request in a.requests] == [[b"%d" % len(body)]] * 2


async def test_a_body_that_is_not_json_may_begin_with_any_bytes(a: ScriptedWorker) -> None:
    body = BOM_UTF8 + b"hello"
    async with running(a) as router, router.client() as client:
        assert (await client.ask(post("/v1/files", body, b"content-type: text/plain"))).status == 200
    assert a.requests[0].body == body


async def test_method_path_and_query_pass(a: ScriptedWorker) -> None:
    target = "/v1/files/%C3%BC%2F?a=1&a=%20;b"
    async with running(a) as router, router.client() as client:
        for method in (b"GET", b"DELETE", b"PATCH"):
            await client.ask(get(target, method=method))
    assert [(r.method, r.target) for r in a.requests] == [
        (method, target.encode()) for method in (b"GET", b"DELETE", b"PATCH")
    ]


async def test_a_worker_below_a_path(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        router.app._fleet.workers["a"].pool.address = router.app._fleet.workers["a"].pool.address._replace(base=b"/eu")
        await client.ask(post())
    assert a.requests[0].target == b"/eu/v1/completions"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/audio/transcriptions"])
async def test_other_paths_pass_whatever_their_body(a: ScriptedWorker, path: str) -> None:
    body = bytes(range(256)) * 10
    a.then(answer(body, 201, b"openai-version: 1"))
    async with running(a) as router, router.client() as client:
        got = await client.ask(post(path, body, b"content-type: application/octet-stream"))
    assert (got.status, got.body, got.header(b"openai-version")) == (201, body, b"1")
    assert (a.requests[0].target, a.requests[0].body) == (path.encode(), body)
    assert a.requests[0].values(b"content-type") == [b"application/octet-stream"]


# -- headers


async def test_request_headers_end_here_or_pass(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        await client.ask(
            post(
                "/v1/completions",
                b'{"prompt":"x"}',
                b"Authorization: Bearer secret",
                b"X-Request-Id: mine",
                b"traceparent: 00-1-2-01",
                b"Accept-Encoding: gzip",
                b"Accept: a/b",
                b"Accept: c/d",
                b"User-Agent: me",
                b"Connection: keep-alive, User-Agent",
                b"X-Data-Parallel-Rank: 1",
                b"X-Whatever: 1",
                b"Cookie: a=1",
                b"Keep-Alive: timeout=5",
                b"TE: trailers",
                b"Trailer: x",
                b"Proxy-Authorization: Basic x",
                b"Proxy-Connection: keep-alive",
                b"Upgrade: h2c",
                b"X-Router-Target-Worker: a",
            )
        )
    assert sorted(a.requests[0].headers) == [
        (b"accept", b"a/b"),
        (b"accept", b"c/d"),
        (b"accept-encoding", b"gzip"),
        (b"authorization", b"Bearer secret"),
        (b"content-length", b"14"),
        (b"host", f"127.0.0.1:{a.port}".encode()),
        (b"traceparent", b"00-1-2-01"),
        (b"x-request-id", b"mine"),
        (b"x-router-via", router.app._security.passing.router_id),
    ]


async def test_response_headers_end_here_or_pass(a: ScriptedWorker) -> None:
    a.then(
        answer(
            b"{}",
            203,
            b"Server: engine",
            b"Set-Cookie: a=1",
            b"Set-Cookie: b=2",
            b"Location: http://10.0.0.7/",
            b"Access-Control-Allow-Origin: *",
            b"Retry-After: 7",
            b"Retry-After: 8",
            b"Date: today",
            b"Connection: keep-alive, Date",
            b"Keep-Alive: timeout=5",
            b"Proxy-Authenticate: Basic",
            b"X-Router-Worker: liar",
            b"X-Request-Id: theirs",
        )
    )
    async with running(a) as router, router.client() as client:
        got = await client.ask(post("/v1/completions", b'{"prompt":"x"}', b"x-request-id: mine"))
    assert got.status == 203
    assert sorted(got.headers) == [
        (b"content-length", b"2"),
        (b"content-type", b"application/json"),
        (b"retry-after", b"7"),
        (b"retry-after", b"8"),
        (b"x-request-id", b"mine"),
        (b"x-router-worker", b"a"),
    ]


async def test_what_tells_how_to_read_embeddings_as_bytes_passes(a: ScriptedWorker) -> None:
    layout = b'{"data":[{"index":0,"start":0,"end":4,"shape":[1],"embed_dtype":"float32"}]}'
    a.then(answer(b"\0\0\x80?", 200, b"Metadata: " + layout))
    async with running(a) as router, router.client() as client:
        got = await client.ask(post("/v1/embeddings", b'{"input":"x","encoding_format":"bytes"}'))
    assert (got.body, got.header(b"metadata")) == (b"\0\0\x80?", layout)


async def test_headers_that_the_operator_names_pass_too(a: ScriptedWorker) -> None:
    a.then(answer(b"{}", 200, b"X-Told: 3"))
    async with running(a, pass_header=("x-data-parallel-rank", "x-told")) as router, router.client() as client:
        got = await client.ask(post("/v1/completions", b'{"prompt":"x"}', b"X-Data-Parallel-Rank: 2", b"X-Other: 1"))
    assert a.requests[0].values(b"x-data-parallel-rank") == [b"2"]
    assert a.requests[0].values(b"x-other") == []
    assert got.header(b"x-told") == b"3"


async def test_a_request_id_is_made_where_there_is_none(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        answers = [await client.ask(post()) for _ in range(2)]
    made = [got.header(b"x-request-id") for got in answers]
    assert len(set(made)) == 2
    assert all(made)
    assert [request.values(b"x-request-id") for request in a.requests] == [[one] for one in made]


async def test_an_answer_of_the_routers_own_carries_the_request_id(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        await a.refuse()
        got = await client.ask(post("/v1/completions", b'{"prompt":"x"}', b"x-request-id: mine"))
    assert (got.status, got.header(b"x-request-id")) == (502, b"mine")


MINE = b"x-request-id: mine"
REFUSED = [
    (post("/v1/completions", b'{"prompt":"x","model":"nobody"}', MINE), 404),
    (post("/v1/completions", b"{}", MINE), 400),
    (post("/v1/completions", b'{"prompt":"x"}', MINE, b"x-router-target-worker: nobody"), 400),
    (get("/v1/completions", MINE), 405),
    (get("/metrics", MINE, method=b"DELETE"), 405),
    (get("/nowhere", MINE), 404),
    (get("/v1/load_lora_adapter", MINE), 403),
    (get("/v1/files", MINE, method=b"PURGE"), 405),
    (post("/v1/completions", b'{"prompt":"' + b"x" * 1000 + b'"}', MINE), 413),
    (get("/v1/files", MINE, b"host: two"), 400),
    (get("/v1/files", MINE, b"transfer-encoding: gzip"), 501),
]


@pytest.mark.parametrize(("request_", "status"), REFUSED)
async def test_what_is_refused_carries_the_request_id(a: ScriptedWorker, request_: bytes, status: int) -> None:
    async with running(a, max_body_size=1000) as router:
        async with router.client() as client:
            got = await client.ask(request_)
        async with router.client() as client:
            made = await client.ask(request_.replace(MINE, b"x-other: 1"))
    assert (got.status, got.header(b"x-request-id")) == (status, b"mine")
    assert (made.status, len(made.header(b"x-request-id") or b"")) == (status, 32)


async def test_an_event_in_the_log_names_its_request(a: ScriptedWorker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "router.routing_log")
    a.then(drop)
    long = b"m" * 1000
    async with running(a) as router, router.client() as client:
        await client.ask(post("/v1/completions", b'{"prompt":"x"}', b"x-request-id: " + long))
    records = [record for record in caplog.records if record.name == "router.routing_log"]
    told = [(record.message, vars(record)["fields"]["request"]) for record in records]
    assert told == [("Decided", "m" * 128), ("Worker failed a request", "m" * 128)]


async def test_a_decision_in_the_log_names_its_figures(a: ScriptedWorker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "router.routing_log")
    async with running(a, router_mode="kv") as router, router.client() as client:
        await client.ask(post("/v1/completions", b'{"prompt":[1,2,3]}'))
    (decided,) = (vars(record)["fields"] for record in caplog.records if record.message == "Decided")
    assert decided["predicted"].startswith("queue 0, held 0, prefill ")


@pytest.mark.parametrize("mode", ["kv", "round-robin", "random", "least-loaded", "power-of-two", "direct"])
async def test_every_mode_names_the_worker_and_kv_the_overlap(a: ScriptedWorker, mode: str) -> None:
    body = b'{"prompt":[1,2,3,4,5,6,7,8,9,10]}'
    target = [b"x-router-target-worker: a"] if mode == "direct" else []
    async with running(a, router_mode=mode, kv_events=False) as router, router.client() as client:
        first, second = [await client.ask(post("/v1/completions", body, *target)) for _ in range(2)]
    assert first.header(b"x-router-worker") == second.header(b"x-router-worker") == b"a"
    overlaps = (first.header(b"x-router-overlap-tokens"), second.header(b"x-router-overlap-tokens"))
    assert overlaps == ((b"0", b"8") if mode == "kv" else (None, None))


# -- answers

CHUNKED = b"transfer-encoding: chunked\r\n"
PIECES = [b"5\r\nhel", b"lo\r\n3;ext=1\r\n, w\r", b"\n5\r\norld!\r\n", b"0\r\nx-trailer: 1\r\n\r\n"]


async def test_a_chunked_answer_keeps_its_framing(a: ScriptedWorker) -> None:
    a.then(says(b"HTTP/1.1 200 OK\r\n", CHUNKED + b"\r\n", *PIECES))
    async with running(a) as router, router.client() as client:
        client.send(post())
        head = await client.head()
        assert head.header(b"transfer-encoding") == b"chunked"
        assert await client.read_exactly(len(b"".join(PIECES))) == b"".join(PIECES)
        assert (await client.ask(post())).status == 200  # and the connection goes on


async def test_an_answer_that_ends_with_the_connection_becomes_chunked(a: ScriptedWorker) -> None:
    a.then(says(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nhello,", b" world!", then=Dialogue.drop))
    async with running(a) as router, router.client() as client:
        got = await client.ask(post())
        assert (got.body, got.header(b"transfer-encoding")) == (b"hello, world!", b"chunked")
        assert got.header(b"connection") is None
        assert (await client.ask(post())).status == 200


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_that_have_no_body(a: ScriptedWorker, status: int) -> None:
    a.then(says(b"HTTP/1.1 %d X\r\nretry-after: 1\r\n%s\r\n" % (status, b"content-length: 0\r\n" * (status == 204))))
    async with running(a) as router, router.client() as client:
        got = await client.ask(get("/v1/files"))
        assert (got.status, got.header(b"retry-after")) == (status, b"1")
        assert got.header(b"content-length") is None
        assert (await client.ask(post())).status == 200
    assert a.requests[1].connection == a.requests[0].connection


async def test_head_is_passed_on_and_has_no_body(a: ScriptedWorker) -> None:
    a.then(says(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"))
    async with running(a) as router, router.client() as client:
        got = await client.ask(get("/v1/files", method=b"HEAD"))
        assert (got.status, got.header(b"content-length")) == (200, b"1000")
        assert (await client.ask(post())).status == 200
    assert a.requests[0].method == b"HEAD"


@pytest.mark.parametrize(
    "interim", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"]
)
async def test_interim_answers_stop_here(a: ScriptedWorker, interim: bytes) -> None:
    a.then(
        says(interim, interim + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"),
        says(interim[:9], interim[9:], b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"),
    )
    async with running(a) as router, router.client() as client:
        for _ in range(2):
            got = await client.ask(post())
            assert (got.status, got.body, got.header(b"link")) == (200, b"ok", None)


async def test_an_old_client_gets_no_chunks(a: ScriptedWorker) -> None:
    a.then(events(b"1", b"[DONE]"))
    body = b'{"prompt":"x"}'
    async with running(a) as router, router.client() as client:
        client.send(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        got = await client.head()
        assert got.header(b"transfer-encoding") is None
        assert await client.rest() == b"data: 1\n\ndata: [DONE]\n\n"


async def test_an_old_client_that_wants_to_stay_is_told_that_it_may(a: ScriptedWorker) -> None:
    """It would wait for the connection's end otherwise."""
    request = (
        b"POST /v1/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 14\r\n\r\n" + b'{"prompt":"x"}'
    )
    a.then(answer(), events(b"[DONE]"))
    async with running(a) as router, router.client() as client:
        assert (await client.ask(request)).header(b"connection") == b"keep-alive"
        assert (await client.ask(request)).header(b"connection") == b"close"  # which ends that answer


async def test_an_event_arrives_before_the_next_is_sent(a: ScriptedWorker) -> None:
    seen = asyncio.Semaphore(0)

    async def script(dialogue: Dialogue) -> None:
        dialogue.events_head()
        for number in range(5):
            dialogue.event(b"%d" % number)
            await seen.acquire()
        dialogue.end()

    a.then(script)
    async with running(a) as router, router.client() as client:
        client.send(post(body=b'{"prompt":"x","stream":true}'))
        head = await client.head()
        assert head.header(b"content-type") == b"text/event-stream; charset=utf-8"
        assert head.header(b"x-accel-buffering") == b"no"
        for number in range(5):
            assert await client.chunk() == (b"9\r\ndata: %d\n\n\r\n" % number, b"data: %d\n\n" % number)
            seen.release()
        assert await client.read_exactly(5) == b"0\r\n\r\n"


async def test_compressed_events_are_not_held_back(a: ScriptedWorker) -> None:
    """Where one ends cannot be seen."""
    packer, seen = zlib.compressobj(wbits=31), asyncio.Event()
    first = packer.compress(b"data: 1\n\n") + packer.flush(zlib.Z_SYNC_FLUSH)
    last = packer.compress(b"data: 2\n\n") + packer.flush()

    async def one_after_the_other(dialogue: Dialogue) -> None:
        dialogue.head(200, b"content-type: text/event-stream", b"content-encoding: gzip")
        dialogue.chunk(first)
        await seen.wait()
        dialogue.chunk(last)
        dialogue.end()

    a.then(one_after_the_other)
    async with running(a) as router, router.client() as client:
        client.send(post("/v1/completions", b'{"prompt":"x","stream":true}', b"accept-encoding: gzip"))
        assert (await client.head()).header(b"content-encoding") == b"gzip"
        assert (await client.chunk())[1] == first
        seen.set()
        assert (await client.chunk())[1] == last


async def test_an_event_cut_anywhere_arrives_as_it_was(a: ScriptedWorker) -> None:
    first, last = 'data: {"text":"Grüße 世界"}\n\n'.encode(), b"data: \xff\xfe\r\n\r\n: comment\n\ndata: [DONE]\r\n\r\n"
    stream = b"%x\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (len(first), first, len(last), last)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + CHUNKED + b"\r\n"
    async with running(a) as router, router.client() as client:
        for cut in range(len(stream) + 1):
            a.then(says(head, *([stream[:cut], stream[cut:]] if 0 < cut < len(stream) else [stream])))
            client.send(post())
            await client.head()
            assert await client.read_exactly(len(stream)) == stream


async def test_many_at_once_do_not_mix(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async def echo(dialogue: Dialogue) -> None:
        name = json.loads(dialogue.request.body)["prompt"].encode()
        dialogue.events_head()
        for number in range(20):
            dialogue.event(b"%s %d" % (name, number))
            await asyncio.sleep(0)
        dialogue.end()

    a.then(*[echo] * 50)
    b.then(*[echo] * 50)
    async with running(a, b) as router, session(router) as client:

        async def ask(name: str) -> None:
            async with client.post("/v1/completions", json={"prompt": name}) as response:
                text = await response.text()
            assert text == "".join(f"data: {name} {number}\n\n" for number in range(20))

        await asyncio.gather(*(ask(f"request {number}") for number in range(100)))
    assert (len(a.requests), len(b.requests)) == (50, 50)

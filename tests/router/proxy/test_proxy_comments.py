"""Streams that are silent for longer than `--sse-keep-alive`, from the client's side."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router import housekeeping
from router.http.relay import COMMENT
from tests.fakes.raw_client import RawClient, error_of, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, events, held_stream
from tests.fakes.waiting import until
from tests.router.migration.client import seen
from tests.router.proxy.running import running
from tests.router.proxy.test_proxy_migration import asking, assert_whole, engine, fleet, migrations
from tests.router.proxy.test_proxy_pairs import PREFILLED, STREAMED, router_of

SOON = 0.05
STREAM = post(body=b'{"prompt":"x","stream":true}')
SAID = b": waiting\n\n"
WHOLE = b"data: 1\n\ndata: [DONE]\n\n"


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL", SOON / 5)


async def on_the_word(dialogue: Dialogue) -> None:
    await dialogue.go_on.wait()
    await events(b"1", b"[DONE]")(dialogue)


async def said(client: RawClient) -> None:
    """A head and a comment have come."""
    assert (await client.head()).status == 200
    assert (await client.chunk())[0] == COMMENT


async def rest(client: RawClient) -> bytes:
    """What follows, without comments."""
    got = b""
    while piece := (await client.chunk())[1]:
        got += piece
    return got.replace(SAID, b"")


async def test_a_client_hears_of_a_long_prefill(a: ScriptedWorker) -> None:
    a.then(on_the_word)
    async with running(a, sse_keep_alive=SOON) as router, router.client() as client:
        client.send(STREAM)
        await said(client)
        assert (await client.chunk())[0] == COMMENT
        a.go_on.set()
        assert await rest(client) == WHOLE
        assert (await client.ask(post())).status == 200


async def test_and_of_one_that_is_silent_amid_its_answer(a: ScriptedWorker) -> None:
    a.then(held_stream)
    async with running(a, sse_keep_alive=SOON) as router, router.client() as client:
        client.send(STREAM)
        await client.head()
        assert (await client.chunk())[1] == b"data: 1\n\n"
        assert (await client.chunk())[0] == COMMENT
        a.go_on.set()
        assert await rest(client) == b"data: [DONE]\n\n"


async def test_another_worker_may_still_be_tried(a: ScriptedWorker, b: ScriptedWorker) -> None:
    async def fails(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        dialogue.drop()

    a.then(fails)
    b.then(events(b"1", b"[DONE]"))
    async with running(a, b, sse_keep_alive=SOON) as router, router.client() as client:
        client.send(STREAM)
        await said(client)
        a.go_on.set()
        assert await rest(client) == WHOLE
        assert router.samples("router_requests_total") == {"b": 1}


async def test_if_none_is_left_the_stream_ends_in_the_error(a: ScriptedWorker) -> None:
    async def fails(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        dialogue.drop()

    a.then(fails)
    async with running(a, sse_keep_alive=SOON) as router, router.client() as client:
        client.send(STREAM)
        await said(client)
        a.go_on.set()
        error = error_of(await rest(client))
        assert (error["code"], "Worker a broke off" in error["message"]) == (502, True)
        assert router.total("router_requests_total", status="502") == 1
        assert (await client.ask(post())).status == 200


async def test_a_request_held_until_it_is_too_late_is_told_so(a: ScriptedWorker) -> None:
    a.pages.max_model_len = 1_000_000
    long = {"model": "tiny", "prompt": [5] * 90_000, "stream": True}
    settings: dict[str, Any] = {"router_mode": "kv", "sse_keep_alive": SOON, "queue_timeout": 5 * SOON}
    async with running(a, **settings) as router, router.client() as one, router.client() as two:
        a.then(on_the_word)
        one.send(post(body=json.dumps(long).encode()))
        await until(lambda: a.requests)
        two.send(STREAM)
        await said(two)
        error = error_of(await rest(two))
        assert (error["type"], "in the queue" in error["message"]) == ("timeout_error", True)
        a.go_on.set()
        await said(one)
        assert await rest(one) == WHOLE


@pytest.fixture
async def p() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker("p", default=PREFILLED) as worker:
        yield worker


async def test_a_split_request_has_its_comments_before_its_first_token(p: ScriptedWorker) -> None:
    async def slow(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await PREFILLED(dialogue)

    p.then(slow)
    async with (
        ScriptedWorker("d", default=events(b"1", b"[DONE]")) as d,
        router_of("nixl", p, d, sse_keep_alive=SOON) as router,
        router.client() as client,
    ):
        client.send(post(body=STREAMED))
        await said(client)
        p.go_on.set()
        assert await rest(client) == WHOLE


async def test_a_stream_that_goes_on_elsewhere_has_comments_until_then() -> None:
    async def late(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await engine("b")(dialogue)

    async with fleet(engine("a", 2), late, sse_keep_alive=SOON) as (router, client, workers):
        client.send(post("/v1/completions", json.dumps(asking("completions")).encode()))
        await client.head()
        got = (await client.chunk())[1]
        workers[0].go_on.set()
        await until(lambda: workers[1].requests)
        while (piece := (await client.chunk())[1]) != SAID:
            got += piece
        workers[1].go_on.set()
        assert_whole(seen((got + await rest(client)).replace(SAID, b"")), "completions")
        assert migrations(router) == {"continued": 1}

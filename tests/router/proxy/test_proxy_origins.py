"""Web pages of other origins, with `--allowed-origin`: what a browser would read."""

from __future__ import annotations

from pathlib import Path

import pytest

from router import housekeeping
from tests.fakes.raw_client import Answered, get, post
from tests.fakes.scripted_worker import Dialogue, ScriptedWorker, events
from tests.router.proxy.running import running
from tests.router.security.files import bearer, write_keys

PAGE = b"https://chat.example.com"
FROM_PAGE = b"Origin: " + PAGE
ALLOWED = (PAGE.decode(),)
ASKS = (FROM_PAGE, b"Access-Control-Request-Method: POST", b"Access-Control-Request-Headers: authorization")
PREFLIGHT = get("/v1/completions", *ASKS, method=b"OPTIONS")


def allowed(answered: Answered) -> bytes | None:
    names = [name for name, _ in answered.headers]
    assert all(names.count(name) == 1 for name in names)
    return answered.header(b"access-control-allow-origin")


async def test_a_page_asks_and_is_served_over_one_connection(a: ScriptedWorker) -> None:
    a.then(events(b"1", b"[DONE]"))
    async with running(a, allowed_origin=ALLOWED) as router, router.client() as client:
        asked = await client.ask(PREFLIGHT)
        assert (asked.status, allowed(asked), asked.body) == (200, PAGE, b"")
        assert asked.header(b"access-control-allow-headers") == b"authorization"
        assert not a.requests
        for _ in range(2):  # the second time with a head that is known
            got = await client.ask(post("/v1/completions", b'{"prompt":"x","stream":true}', FROM_PAGE))
            assert (got.status, allowed(got), got.header(b"vary")) == (200, PAGE, b"origin")
        assert allowed(await client.ask(get("/v1/models", FROM_PAGE))) == PAGE
        assert allowed(await client.ask(post("/v1/none", b"{}", FROM_PAGE))) == PAGE, "errors too"


async def test_others_are_told_nothing(a: ScriptedWorker) -> None:
    other = b"Origin: https://elsewhere.example.com"
    async with running(a, allowed_origin=ALLOWED) as router, router.client() as client:
        assert allowed(await client.ask(post("/v1/completions", b"{}", other))) is None
        assert allowed(await client.ask(post())) is None
        asked = await client.ask(get("/v1/completions", other, *ASKS[1:], method=b"OPTIONS"))
        assert (asked.status, allowed(asked)) == (405, None)
    async with running(a) as router, router.client() as client:
        assert allowed(await client.ask(post("/v1/completions", b"{}", FROM_PAGE))) is None
        assert (await client.ask(PREFLIGHT)).status == 405


async def test_a_browser_asks_without_a_key_but_is_served_with_one_only(a: ScriptedWorker, tmp_path: Path) -> None:
    keys, with_key = write_keys(tmp_path, {"name": "me", "key": "kvr-me"}), (FROM_PAGE, bearer("kvr-me"))
    async with running(a, allowed_origin=ALLOWED, api_keys=keys) as router, router.client() as client:
        assert (await client.ask(PREFLIGHT)).status == 200
        assert (await client.ask(post("/v1/completions", b'{"prompt":"x"}', *with_key))).status == 200
        refused = await client.ask(post("/v1/completions", b'{"prompt":"x"}', FROM_PAGE))
        assert (refused.status, allowed(refused)) == (401, PAGE), "the page can say why"
    async with running(a, allowed_origin=ALLOWED, api_keys=keys) as router, router.client() as client:
        with_body = get("/v1/completions", *ASKS, b"Content-Length: 1000000", method=b"OPTIONS")
        assert (await client.ask(with_body)).status == 401


async def test_a_stream_that_begins_with_a_comment_is_readable_too(
    a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(dialogue: Dialogue) -> None:
        await dialogue.go_on.wait()
        await events(b"1", b"[DONE]")(dialogue)

    monkeypatch.setattr(housekeeping, "INTERVAL", 0.01)
    a.then(late)
    async with running(a, allowed_origin=("*",), sse_keep_alive=0.02) as router, router.client() as client:
        client.send(post("/v1/completions", b'{"prompt":"x","stream":true}', FROM_PAGE))
        assert allowed(await client.head()) == b"*"
        await client.chunk()
        a.go_on.set()
        while (await client.chunk())[1]:
            pass

"""What the router passes on without knowing it is read behind it as it is here."""

from __future__ import annotations

import pytest

from router.http.messages import request_head
from router.openai.errors import BadRequest
from router.security.passed_on import check_passed_on, content_kind
from tests.fakes.raw_client import get, post
from tests.fakes.scripted_worker import ScriptedWorker
from tests.router.proxy.running import running

OWN = frozenset((b"/v1/completions", b"/v1/models", b"/metrics"))


def check(target: bytes, method: bytes = b"GET") -> None:
    check_passed_on(request_head(method, target, [], True, False), OWN)


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/files",
        b"/v1/files/a-1_2.txt?x=../..",
        b"/v1/models/org/name",
        b"/v1/models/org%2Fname",
        b"/v1/models/a%20b",
        "/v1/models/é".encode(),
        b"/v1/models/a..b",
        b"/v1/models/.a",
        b"/v1/models/org/load_lora_adapter",
    ],
)
def test_plain_paths_pass(target: bytes) -> None:
    check(target)


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/../reset_prefix_cache",
        b"/v1/..",
        b"/v1/./x",
        b"/v1/%2e%2e/metrics",
        b"/v1/%2E./metrics",
        b"/v1/..%2fmetrics",
        b"/v1/%252e%252e/metrics",
        b"/v1/..;/metrics",
        b"/v1/..;x=1/metrics",
        b"/v1/%" + b"25" * 1000,
        b"/v1//x",
        b"/v1/%2fx",
        b"/v1\\..\\metrics",
        b"/v1/..%5cmetrics",
        b"/v1/completions#x",
        b"/v1/completions%23x",
        b"/v1/x%3fy",
        b"/v1/x%00y",
        b"/v1/x%0d%0ay",
        b"/v1/completions/",
        b"/v1/%63ompletions",
        b"/v1/completion%73",
        b"/v1/%6dodels",
        b"/v1/%2563ompletions",
    ],
)
def test_paths_in_disguise_are_refused(target: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        check(target)
    assert caught.value.response.status == 400


@pytest.mark.parametrize("target", [b"/v1/completions/", b"/v1/responses/", b"/v1/files/?x", b"/v1/"])
def test_a_slash_at_the_end_is_named(target: bytes) -> None:
    """Engines redirect the others too, but `Location` does not pass."""
    with pytest.raises(BadRequest, match="'/' at its end"):
        check(target, b"POST")


@pytest.mark.parametrize("target", ["/v1/v1/chat/completions", "/v1/v1/models", "/v1/messages/v1/messages?beta=true"])
async def test_a_base_url_that_has_the_path_already_is_named(a: ScriptedWorker, target: str) -> None:
    """The most frequent mistake in a client's configuration. An engine would say "Not Found"."""
    async with running(a) as router, router.client() as client:
        got = await client.ask(post(target, b'{"prompt":"x"}'))
    assert got.status == 404
    assert b"has /v1/ twice" in got.body
    assert a.requests == []


MANAGING = [b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter", b"/v1/unload_lora_adapter?x", b"/v1/set_lora"]
MANAGING += [b"/v1/merge_lora_weights", b"/v1/unmerge_lora_weights/", b"/v1/%6coad_lora_adapter"]
MANAGING += [b"/v1/load_lora_adapter;x=1", b"/v1/load_lora_adapter;x/"]


@pytest.mark.parametrize("target", MANAGING)
@pytest.mark.parametrize("method", [b"POST", b"GET", b"OPTIONS"])
async def test_what_manages_workers_is_not_for_clients(a: ScriptedWorker, target: bytes, method: bytes) -> None:
    async with running(a) as router, router.client() as client:
        got = await client.ask(get(target.decode(), method=method))
    assert got.status == 403
    assert a.requests == []


@pytest.mark.parametrize("method", [b"TRACE", b"CONNECT", b"PURGE", b"PROPFIND", b"LINK"])
def test_methods_that_workers_have_no_use_for(method: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        check(b"/v1/files", method)
    assert caught.value.response.status == 405


async def test_a_websocket_is_refused_with_that_said(a: ScriptedWorker) -> None:
    """To its engine it would be a GET, on a path that takes WebSockets only."""
    offer = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==")
    async with running(a) as router, router.client() as client:
        got = await client.ask(get("/v1/realtime?model=m", *offer))
    assert got.status == 501
    assert b"WebSockets" in got.body
    assert a.requests == []


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([b"application/json"], "json"),
        ([b"Application/JSON; charset=utf-8"], "json"),
        ([b"application/json", b"application/json"], "json"),
        ([], "unclear"),
        ([b"application/json", b"application/x-www-form-urlencoded"], "unclear"),
        ([b"application/vnd.api+json"], "unclear"),
        ([b"text/json"], "unclear"),
        ([b"application/json\xa0; charset=utf-8"], "json"),
        ([b"\x85application/vnd.api+json\xa0"], "unclear"),
        ([b"multipart/form-data; boundary=x"], "other"),
        ([b"text/plain"], "other"),
        ([b""], "other"),
    ],
)
def test_what_a_body_is_said_to_be(kinds: list[bytes], expected: str) -> None:
    assert content_kind([(b"content-type", kind) for kind in kinds]) == expected


TARGETS = [b"/v1/../metrics", b"/v1/completions#x", b"/v1/%63ompletions", b"//v1/x"]
TARGETS += [b"http://10.0.0.1/v1/../metrics", b"http://10.0.0.1//v1/x", b"http://10.0.0.1#/v1/x", b"http:///v1/x"]
TARGETS += [b"http://router/reset_prefix_cache", b"*", b"/metrics/", b"/reset_prefix_cache"]


@pytest.mark.parametrize("target", TARGETS)
async def test_no_worker_sees_such_a_request(a: ScriptedWorker, target: bytes) -> None:
    async with running(a) as router, router.client() as client:
        got = await client.ask(get(target.decode()))
    assert got.status in {400, 404}
    assert a.requests == []


NOT_JSON = [b'{"x":NaN,"bootstrap_host":"h"}', '{"bootstrap_host":"h"}'.encode("utf-16")]
NOT_JSON += [b'\xef\xbb\xbf{"bootstrap_host":"h"}', b"\xef\xbb\xbf\xef\xbb\xbf{}"]
KINDS = [[b"content-type: application/json"], [], [b"content-type: application/json\xa0"]]
KINDS += [[b"content-type: text/plain", b"connection: content-type"]]  # of which the worker is told nothing


@pytest.mark.parametrize("body", [*NOT_JSON, b'{"bootstrap_host":"h"}'])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_steers_an_engine_does_not_slip_through_as_json_of_another_kind(
    a: ScriptedWorker, body: bytes, kind: list[bytes]
) -> None:
    async with running(a) as router, router.client() as client:
        got = await client.ask(post("/v1/embeddings", body, *kind))
    assert got.status == 400
    assert a.requests == []


async def test_a_name_in_an_answers_head_cannot_add_a_line(a: ScriptedWorker) -> None:
    """Nothing of a body gets into a head, and a request's id has come as one line."""
    a.pages.models = ["evil\r\nx-evil: 1"]
    async with running(a) as router, router.client() as client:
        for body in (b'{"model":"evil\\r\\nx-evil: 1","prompt":"x"}', b'{"model":"no\\r\\nx-evil: 1","prompt":"x"}'):
            got = await client.ask(post("/v1/completions", body, b"x-request-id: 1"))
            assert b"x-evil" not in got.head
    assert all(b"x-evil" not in request.head for request in a.requests)

"""Traces with `--otlp-traces-endpoint`: what a collector gets of them, and what engines are told."""

from __future__ import annotations

import threading

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from router.tracing import telemetry
from tests.fakes.collector import Collector, attributes
from tests.fakes.raw_client import get, post
from tests.fakes.scripted_worker import ScriptedWorker, answer, events, never
from tests.fakes.waiting import until
from tests.router.proxy.running import running

TRACE, THEIRS = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STATE = b"tracestate: vendor=1"
BODY = b'{"model":"tiny","prompt":"x"}'
USAGE = b'{"usage":{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":32}}}'


def traceparent(sampled: bool = True) -> bytes:
    return f"traceparent: 00-{TRACE}-{THEIRS}-0{sampled:d}".encode()


def told(worker: ScriptedWorker, number: int = 0) -> list[str]:
    """The parts of the traceparent that a worker got."""
    (value,) = worker.requests[number].values(b"traceparent")
    return value.decode().split("-")


def by_name(spans: list[Span]) -> dict[str, Span]:
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


async def test_a_request_is_a_part_of_its_clients_trace_and_its_engines_spans_are_parts_of_it(
    a: ScriptedWorker,
) -> None:
    a.then(answer(USAGE))
    async with Collector() as collector:
        async with running(a, otlp_traces_endpoint=collector.url) as router, router.client() as client:
            got = await client.ask(post("/v1/completions", BODY, traceparent(), STATE, b"X-Request-Id: mine"))
            assert got.status == 200
        spans = by_name(collector.spans)
    whole, leg = spans["POST /v1/completions"], spans["worker"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, THEIRS)
    assert (leg.trace_id.hex(), leg.parent_span_id) == (TRACE, whole.span_id)
    assert told(a) == ["00", TRACE, leg.span_id.hex(), "01"]
    assert a.requests[0].values(b"tracestate") == [b"vendor=1"]
    assert (whole.kind, leg.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT)
    assert attributes(whole.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "router.request_id": "mine",
        "gen_ai.request.model": "tiny",
        "http.response.status_code": 200,
        "router.end": "complete",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 32,
    }
    assert attributes(leg.attributes) == {"router.worker": "a", "router.dp_rank": 0}
    (first_byte,) = whole.events
    assert whole.start_time_unix_nano <= leg.start_time_unix_nano <= leg.end_time_unix_nano
    assert whole.start_time_unix_nano <= first_byte.time_unix_nano <= whole.end_time_unix_nano
    assert collector.resources[0]["service.name"] == "kv-router"


async def test_without_a_trace_of_the_clients_there_is_a_new_one(a: ScriptedWorker) -> None:
    async with Collector() as collector:
        async with running(a, otlp_traces_endpoint=collector.url) as router, router.client() as client:
            for _ in range(2):
                await client.ask(post("/v1/completions", BODY))
        assert len({span.trace_id for span in collector.spans}) == 2
    roots = [span for span in collector.spans if not span.parent_span_id]
    assert [span.trace_id.hex() for span in roots] == [told(a)[1], told(a, 1)[1]]


async def test_what_its_client_does_not_sample_is_not_sent_and_the_engine_is_told_so(a: ScriptedWorker) -> None:
    async with Collector() as collector:
        async with running(a, otlp_traces_endpoint=collector.url) as router, router.client() as client:
            await client.ask(post("/v1/completions", BODY, traceparent(sampled=False)))
        assert collector.spans == []
    assert (told(a)[1], told(a)[3]) == (TRACE, "00")


async def test_without_the_flag_the_clients_span_passes(a: ScriptedWorker) -> None:
    async with running(a) as router, router.client() as client:
        await client.ask(post("/v1/completions", BODY, traceparent()))
    assert told(a) == ["00", TRACE, THEIRS, "01"]


async def test_each_worker_that_is_tried_has_a_span(a: ScriptedWorker, b: ScriptedWorker) -> None:
    a.then(answer(b"{}", 503))
    b.then(events(b"1", b"[DONE]"))
    async with Collector() as collector:
        async with running(a, b, otlp_traces_endpoint=collector.url) as router, router.client() as client:
            await client.ask(post("/v1/completions", b'{"model":"tiny","prompt":"x","stream":true}'))
        legs = {attributes(span.attributes)["router.worker"]: span for span in collector.spans if span.name == "worker"}
    assert (legs["a"].status.code, legs["a"].status.message) == (Status.STATUS_CODE_ERROR, "answered 503")
    assert legs["b"].status.code == Status.STATUS_CODE_UNSET
    assert [told(worker)[2] for worker in (a, b)] == [legs["a"].span_id.hex(), legs["b"].span_id.hex()]


async def test_a_request_that_fails_is_an_error_and_one_whose_client_leaves_is_none(a: ScriptedWorker) -> None:
    a.then(answer(b"{}", 500), never)
    async with Collector() as collector:
        async with running(a, otlp_traces_endpoint=collector.url) as router, router.client() as client:
            assert (await client.ask(post("/v1/completions", BODY))).status == 500
            client.send(post("/v1/completions", BODY))
            await until(lambda: len(a.requests) == 2)
            client.vanish()
        wholes = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [(attributes(span.attributes)["router.end"], span.status.code) for span in wholes] == [
        ("complete", Status.STATUS_CODE_ERROR),
        ("cancelled", Status.STATUS_CODE_UNSET),
    ]


async def test_a_path_that_may_hold_an_id_names_no_span(a: ScriptedWorker) -> None:
    async with Collector() as collector:
        async with running(a, otlp_traces_endpoint=collector.url) as router, router.client() as client:
            await client.ask(get("/v1/files/file-123"))
        assert sorted(span.name for span in collector.spans) == ["GET", "worker"]


async def test_a_collector_that_hangs_does_not_keep_the_router_from_ending(
    a: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_LAST", 0.01)
    async with ScriptedWorker("collector", default=never) as collector:
        endpoint = f"{collector.url}/v1/traces"
        async with running(a, otlp_traces_endpoint=endpoint) as router, router.client() as client:
            assert (await client.ask(post("/v1/completions", BODY))).status == 200
        (last,) = (thread for thread in threading.enumerate() if thread.name == telemetry.LAST_SPANS)
        await collector.refuse()
        await until(lambda: not last.is_alive())

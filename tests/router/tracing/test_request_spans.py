"""The spans of one request in two parts, and of one that is tried again."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from indexer.types import WorkerRank
from router.http.messages import RequestHead, request_head
from router.proxy.legs import Part
from router.proxy.outcome import Outcome
from router.tracing.request_spans import RequestSpans

PAGE = Path(__file__).parents[3] / "docs" / "tracing.md"
HEAD = request_head(b"POST", b"/v1/completions", [], True, False)
P, D = WorkerRank("p", 0), WorkerRank("d", 1)
DONE = Outcome(None, 200, "complete", 0.5, 1.0, None, None)
BEGAN = 1_000_000_000_000_000_000


class Traced:
    """A request that is traced, and its spans that have ended."""

    def __init__(self, head: RequestHead = HEAD) -> None:
        self._ended = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self.spans = RequestSpans(provider.get_tracer("test"), head, None, b"id", BEGAN)

    @property
    def ended(self) -> list[ReadableSpan]:
        return list(self._ended.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.ended]


def test_the_two_parts_of_a_request_are_told_apart() -> None:
    traced = Traced()
    first = traced.spans.begin_leg("prefill", P, 16)
    second = traced.spans.begin_leg("decode", D, None)
    traced.spans.end_leg("prefill")
    assert traced.names == ["prefill worker"]
    traced.spans.end(DONE)
    assert traced.names == ["prefill worker", "decode worker", "POST /v1/completions"]
    prefill, decode, _ = traced.ended
    assert prefill.attributes == {"router.worker": "p", "router.dp_rank": 0, "router.overlap_tokens": 16}
    assert decode.attributes == {"router.worker": "d", "router.dp_rank": 1}
    assert first != second


def test_a_part_that_is_begun_again_ends_what_was_begun_before() -> None:
    traced = Traced()
    traced.spans.begin_leg("prefill", P, None)
    traced.spans.begin_leg("decode", D, None)
    traced.spans.begin_leg("decode", P, None)
    assert traced.names == ["decode worker"]
    traced.spans.begin_leg("whole", D, None)
    assert sorted(traced.names) == ["decode worker", "decode worker", "prefill worker"]


def test_a_failure_is_told_once() -> None:
    traced = Traced()
    traced.spans.begin_leg("whole", P, None)
    traced.spans.end_leg("whole", "cannot be reached: refused")
    traced.spans.end_leg("whole", "again")
    (span,) = traced.ended
    assert (span.status.is_ok, span.status.description) == (False, "cannot be reached: refused")


def test_the_first_byte_is_shown_where_it_came() -> None:
    traced = Traced()
    traced.spans.end(DONE)
    (whole,) = traced.ended
    assert [(event.name, event.timestamp) for event in whole.events] == [("first byte", BEGAN + 500_000_000)]
    assert whole.start_time == BEGAN
    never = Traced()
    never.spans.end(DONE._replace(first_byte=None, status=499, end="cancelled"))
    assert never.ended[0].events == ()


def test_every_span_event_and_attribute_is_on_the_page() -> None:
    traced = Traced()
    for part in get_args(Part):
        traced.spans.begin_leg(part, P, 16)
        traced.spans.end_leg(part)
    traced.spans.end(DONE._replace(prompt_tokens=40, cached_tokens=32))
    names = {name for span in traced.ended for name in span.attributes or {}}
    names |= {*traced.names, *(event.name for span in traced.ended for event in span.events)} - {"POST /v1/completions"}
    page = PAGE.read_text("utf-8")
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "named", [b"", b"00-0-0-01", b"garbage", b"\xff", b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]
)
def test_what_names_no_span_begins_a_trace(named: bytes) -> None:
    traced = Traced(request_head(b"POST", b"/v1/completions", [(b"traceparent", named)], True, False))
    traced.spans.end(DONE)
    assert traced.ended[0].parent is None

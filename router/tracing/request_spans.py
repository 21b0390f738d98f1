"""The spans of one request: one for all of it, and below it one for each worker that it is sent to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from indexer.types import WorkerRank
from router.http.messages import TRACEPARENT, TRACESTATE, RequestHead, first, header_lines
from router.openai.engine_paths import GENERATE, PASSED_ON
from router.openai.inference import ENDPOINTS, INPUTS, RENDERED
from router.proxy.legs import Part
from router.proxy.outcome import Outcome

_NAMES: Final[Mapping[Part, str]] = {"whole": "worker", "prefill": "prefill worker", "decode": "decode worker"}
_ROUTES: Final = frozenset((*ENDPOINTS, *GENERATE, *RENDERED, *INPUTS, *PASSED_ON))
"""Paths that name a span. Any other may hold an id, and collectors expect few names."""
_NANOSECONDS: Final = 10**9
_PROPAGATOR = TraceContextTextMapPropagator()
_Attributes: TypeAlias = Mapping[str, AttributeValue | None]


class RequestSpans:
    """Implements `Spans`. `began`: nanoseconds of the wall clock."""

    def __init__(self, tracer: Tracer, head: RequestHead, model: str | None, request_id: bytes, began: int) -> None:
        self._tracer = tracer
        self._began = began
        method, path = head.method.decode("latin-1"), head.path.decode("latin-1")
        told: _Attributes = {
            "http.request.method": method,
            "url.path": path,
            "router.request_id": request_id.decode("latin-1"),
            "gen_ai.request.model": model,
        }
        name = f"{method} {path}" if head.path in _ROUTES else method
        self._span = tracer.start_span(name, _parent(head), SpanKind.SERVER, _known(told), start_time=began)
        self._context = set_span_in_context(self._span, Context())
        self._legs: dict[Part, Span] = {}

    def begin_leg(self, part: Part, rank: WorkerRank, overlap_tokens: int | None) -> bytes:
        for other in [part] if part == "decode" else [*self._legs]:  # given up without a word
            self.end_leg(other)
        told: _Attributes = {
            "router.worker": rank.worker_id,
            "router.dp_rank": rank.dp_rank,
            "router.overlap_tokens": overlap_tokens,
        }
        self._legs[part] = span = self._tracer.start_span(_NAMES[part], self._context, SpanKind.CLIENT, _known(told))
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        return header_lines((name.encode(), value.encode()) for name, value in carrier.items())

    def end_leg(self, part: Part, failure: str = "") -> None:
        span = self._legs.pop(part, None)
        if span is None:
            return
        if failure:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end()

    def end(self, outcome: Outcome) -> None:
        for part in [*self._legs]:
            self.end_leg(part)
        if outcome.first_byte is not None:
            self._span.add_event("first byte", timestamp=self._began + int(outcome.first_byte * _NANOSECONDS))
        told: _Attributes = {
            "http.response.status_code": outcome.status,
            "router.end": outcome.end,
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
        }
        self._span.set_attributes(_known(told))
        if outcome.status >= 500:  # a client's own faults are none of this server's
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _parent(head: RequestHead) -> Context:
    """With the client's span that the request is a part of, if it names one."""
    named = ((name, first(head.headers, name)) for name in (TRACEPARENT, TRACESTATE))
    return _PROPAGATOR.extract({name.decode(): value.decode("latin-1") for name, value in named if value}, Context())


def _known(told: _Attributes) -> dict[str, AttributeValue]:
    return {name: value for name, value in told.items() if value is not None}

"""Sends spans to a collector, with OpenTelemetry's SDK.

What has no flag here is set by the SDK's own variables: `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`,
`OTEL_EXPORTER_OTLP_HEADERS` and others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from router.http.messages import RequestHead
from router.tracing.exporter import Exporter
from router.tracing.request_spans import RequestSpans

LAST_SPANS: Final = "last spans"
_LAST: Final = 2.0
"""Seconds for what is left at the end: the SDK itself would try for ten."""


class Telemetry:
    """Implements `Tracing`."""

    def __init__(self, endpoint: str, version: str) -> None:
        """`endpoint`: see `Exporter`. `version`: the router's."""
        own = Resource({"service.name": "kv-router", "service.version": version})
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        self._exporter = Exporter(endpoint, time.monotonic)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("router", version)

    def begin(self, head: RequestHead, model: str | None, request_id: bytes) -> RequestSpans:
        return RequestSpans(self._tracer, head, model, request_id, time.time_ns())

    async def close(self) -> None:
        """Send what is left, unless the collector hangs."""
        last = threading.Thread(target=self._provider.shutdown, name=LAST_SPANS, daemon=True)
        last.start()
        await asyncio.to_thread(last.join, _LAST)
        self._exporter.shutdown()  # it would try again, if it has not ended

"""Sends spans with OpenTelemetry's exporter, and tells in few words when that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from publishers.logs import Seldom, log_event

logger = logging.getLogger(__name__)


class Exporter(SpanExporter):
    """What the exporter logs by itself are four lines for each batch that it cannot send."""

    def __init__(self, endpoint: str, clock: Callable[[], float]) -> None:
        """`endpoint`: the URL that spans are posted to, such as http://localhost:4318/v1/traces."""
        self._endpoint = endpoint
        self._clock = clock
        self._exporter = OTLPSpanExporter(endpoint)
        self._reasons = _Reasons()
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(self._reasons)
        self._seldom = Seldom()
        self._over = False
        self._lost = 0
        """Spans since it was last told."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reasons.said.clear()
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._lost += len(spans)
            self._tell(self._clock())
        return result

    def _tell(self, now: float) -> None:
        if not self._seldom.may(now):
            return
        self._seldom.said(now)
        fields = {"endpoint": self._endpoint, "lost": self._lost, "reason": next(iter(self._reasons.said), "")}
        log_event(logger, logging.WARNING, "Spans cannot be sent", **fields)
        self._lost = 0

    def shutdown(self) -> None:
        """More than once is no mistake."""
        if self._over:
            return
        self._over = True
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # theirs has no types
        logging.getLogger(OTLPSpanExporter.__module__).removeFilter(self._reasons)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Reasons(logging.Filter):
    """Keeps what is logged, instead of letting it pass. The first line of a batch says the most."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.said.append(record.getMessage())
        return False

"""A collector that takes no spans is told of in one line, once a minute."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import cast

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from router.checking import check
from router.settings import Settings, SettingsError
from router.tracing.exporter import Exporter

SPAN = cast("ReadableSpan", TracerProvider(shutdown_on_exit=False).get_tracer("test").start_span("test"))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """The fields of what was logged at all."""
    return [getattr(record, "fields", {}) for record in caplog.records if record.levelno >= logging.INFO]


class Other(BaseHTTPRequestHandler):
    """Has no such page."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


def test_what_cannot_be_sent_is_told_once_a_minute(caplog: pytest.LogCaptureFixture, elsewhere: str) -> None:
    now = [0.0]
    exporter = Exporter(elsewhere, lambda: now[0])
    for seconds, spans in ((0.0, 1), (1.0, 2), (59.0, 3), (60.0, 4)):
        now[0] = seconds
        assert exporter.export([SPAN] * spans) is SpanExportResult.FAILURE
    exporter.shutdown()
    assert [(told["endpoint"], told["lost"]) for told in lines(caplog)] == [(elsewhere, 1), (elsewhere, 2 + 3 + 4)]
    assert all("code: 404" in str(told["reason"]) for told in lines(caplog))


def test_another_exporter_in_this_process_is_heard_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    theirs = logging.getLogger(OTLPSpanExporter.__module__)
    exporter = Exporter("http://127.0.0.1:9/v1/traces", lambda: 0.0)
    theirs.error("unheard")
    exporter.shutdown()
    theirs.error("heard")
    assert [record.getMessage() for record in caplog.records] == ["heard"]


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("opentelemetry")])
def test_without_its_packages_the_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch, missing: ModuleNotFoundError | None
) -> None:
    def find(_: str) -> None:
        if missing:
            raise missing

    traced = Settings(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    check(traced)
    monkeypatch.setattr(importlib.util, "find_spec", find)
    check(Settings())
    with pytest.raises(SettingsError, match=r"pip install 'kv-aware-router\[otel\]'"):
        check(traced)

"""An OpenTelemetry collector: takes spans over HTTP, on a free port of 127.0.0.1."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    async def __aenter__(self) -> Collector:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for of_resource in message.resource_spans:
            self.resources.append(attributes(of_resource.resource.attributes))
            for of_scope in of_resource.scope_spans:
                self.spans.extend(of_scope.spans)
        return web.Response()


def attributes(given: Any) -> dict[str, Any]:
    """Of a span or a resource, by name."""
    pairs: list[KeyValue] = list(given)
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "") for pair in pairs}

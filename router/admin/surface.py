"""The admin surface's HTTP server: which path is answered how."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import UNSET

from publishers.logs import get_level, log_event, set_level
from publishers.reasons import reason_of
from router.admin.access import Authorize, Refusal, refuse_foreign_host
from router.admin.openapi import document
from router.admin.shapes import (
    LogLevel,
    Workers,
    WorkerState,
    Wrong,
    read_change,
    read_limits,
    read_log_level,
    read_timeout,
    read_worker,
)
from router.context import RouterContext
from router.openai.errors import error_response
from router.settings.administration import Address
from router.settings.logs import LogLevel as Level
from router.split.pairing import counterparts
from router.workers.roster import Conflict, Roster
from router.workers.status import WorkerStatus, worker_status, worker_statuses
from router.workers.worker import Worker

logger = logging.getLogger("router.admin")

_MOST_BYTES = 64 * 1024
"""Of a body: the longest URL and names there could be are a tenth of it."""
_IDLE = 60.0
"""Seconds that a connection may stay open without a request: whoever shows no key could hold any number of them."""
_FAREWELL = 1.0
"""Seconds that requests here may take once the router ends."""

_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _is_ours(record: logging.LogRecord) -> bool:
    """Not what a client sends that is no HTTP, before it has shown a key: aiohttp answers that with 400, and would log
    it as an error with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_http = logging.getLogger("router.admin.http")
_http.addFilter(_is_ours)


class CannotAdminister(Exception):
    """Why the surface cannot be listened on."""


class AdminSurface:
    """`start`, then `close`. `authorize`: from a request's headers to why it is refused."""

    def __init__(
        self, roster: Roster, context: RouterContext, drain_timeout: float, authorize: Authorize | None = None
    ) -> None:
        """`drain_timeout`: seconds that a worker has which is removed, where it is not said. `authorize` None: anybody
        on this machine may do all."""
        self._roster = roster
        self._context = context
        self._drain_timeout = drain_timeout
        self._authorize = authorize
        self.app = web.Application(middlewares=[self._guard], client_max_size=_MOST_BYTES)
        self.app.add_routes(
            [
                web.get("/admin/workers", self._list, allow_head=False),
                web.post("/admin/workers", self._add),
                web.get("/admin/workers/{id}", self._show, allow_head=False),
                web.patch("/admin/workers/{id}", self._change),
                web.delete("/admin/workers/{id}", self._remove),
                web.get("/admin/limits", self._limits, allow_head=False),
                web.put("/admin/limits", self._set_limits),
                web.get("/admin/log-level", self._log_level, allow_head=False),
                web.put("/admin/log-level", self._set_log_level),
                web.get("/admin/openapi.json", self._openapi, allow_head=False),
            ]
        )
        self._runner = web.AppRunner(
            self.app, access_log=None, logger=_http, keepalive_timeout=_IDLE, shutdown_timeout=_FAREWELL
        )
        self.port = 0

    async def start(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        """Raises CannotAdminister when it cannot be listened on."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, address.host, address.port, ssl_context=tls).start()
        except OSError as error:
            raise CannotAdminister(f"--admin-listen {address.host}:{address.port}: {reason_of(error)}") from error
        self.port = self._runner.addresses[0][1]
        log_event(logger, logging.INFO, "Administration", host=address.host, port=self.port)

    async def free_port(self) -> None:
        """Another router may listen there from now on. Whoever is connected may go on asking."""
        for site in self._runner.sites:
            await site.stop()

    async def close(self) -> None:
        await self._runner.cleanup()

    # -- every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Answer) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal:
            return _error(refusal.status, refusal.message)
        try:
            return await handler(request)
        except Wrong as wrong:
            return _error(wrong.status, f"{wrong}")
        except Conflict as conflict:
            return _error(409, f"{conflict}")
        except web.HTTPException as error:
            return _of_http(request, error)
        except Exception:  # whatever it is, the client gets an answer
            logger.exception("A request to administer failed")
            return _error(500, "The router could not do that; its log says why.")

    def _refusal(self, request: web.Request) -> Refusal | None:
        if self._authorize is None:
            return refuse_foreign_host(request.headers.get("Host"))
        return self._authorize([(name.lower(), value) for name, value in request.raw_headers])

    # -- workers

    async def _list(self, _: web.Request) -> web.Response:
        found = await worker_statuses(self._context)
        return _json(200, Workers([self._with_leaving(worker, status) for worker, status in found]))

    async def _show(self, request: web.Request) -> web.Response:
        return _json(200, self._state(self._worker(request)))

    async def _add(self, request: web.Request) -> web.Response:
        spec = read_worker(await _body(request))
        worker = self._roster.join(spec)
        log_event(logger, logging.INFO, "A worker was added", worker=worker.id, url=spec.url)
        return _json(201, self._state(worker))

    async def _change(self, request: web.Request) -> web.Response:
        self._worker(request)
        change = read_change(await _body(request))
        worker = self._worker(request)  # it may have left meanwhile
        if change.drain is not UNSET:
            self._roster.drain(worker, change.drain)
        if stated := change.stated:
            self._roster.restate(worker, msgspec.structs.replace(worker.spec, **stated))
            log_event(logger, logging.INFO, "What is stated of a worker was changed", worker=worker.id, **stated)
        return _json(200, self._state(worker))

    async def _remove(self, request: web.Request) -> web.Response:
        worker = self._worker(request)
        timeout = read_timeout(request.query, self._drain_timeout)
        self._roster.leave(worker, timeout)
        log_event(logger, logging.INFO, "A worker is removed", worker=worker.id, timeout=timeout)
        return _json(202, self._state(worker))

    def _worker(self, request: web.Request) -> Worker:
        worker = self._context.fleet.workers.get(request.match_info["id"])
        if worker is None:
            raise Wrong(404, f"There is no worker {request.match_info['id']!r}; GET /admin/workers lists them.")
        return worker

    def _state(self, worker: Worker) -> WorkerState:
        others = counterparts(self._context.fleet.up)
        return self._with_leaving(worker, worker_status(self._context, worker, others))

    def _with_leaving(self, worker: Worker, status: WorkerStatus) -> WorkerState:
        return WorkerState(**msgspec.structs.asdict(status), leaves_in_seconds=self._roster.leaves_in(worker))

    # -- the rest

    async def _limits(self, _: web.Request) -> web.Response:
        return _json(200, asdict(self._context.queue.limits))

    async def _set_limits(self, request: web.Request) -> web.Response:
        told = msgspec.structs.asdict(read_limits(await _body(request)))
        queue = self._context.queue
        for name, limit in told.items():
            setattr(queue.limits, name, limit)
        queue.wake()
        log_event(logger, logging.WARNING, "The limits were changed", **told)
        return _json(200, told)

    async def _log_level(self, _: web.Request) -> web.Response:
        return _json(200, LogLevel(cast("Level", get_level())))

    async def _set_log_level(self, request: web.Request) -> web.Response:
        level = read_log_level(await _body(request))
        set_level(level)
        log_event(logger, logging.WARNING, "The log level was changed", level=level)
        return _json(200, LogLevel(level))

    async def _openapi(self, _: web.Request) -> web.Response:
        return _json(200, document())


async def _body(request: web.Request) -> bytes:
    """A form may be sent by any page that a browser shows, JSON only with the leave of whoever is asked."""
    if request.content_type != "application/json":
        raise Wrong(415, "The body must be JSON: send it with Content-Type: application/json.")
    try:
        return await request.read()
    except (web.RequestPayloadError, OSError):
        raise Wrong(400, "The body did not come whole.") from None


def _json(status: int, content: object) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(content), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    body = error_response(status, message).body
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _of_http(request: web.Request, error: web.HTTPException) -> web.Response:
    """What aiohttp refuses itself."""
    messages = {
        404: "There is no such path here; GET /admin/openapi.json tells those there are.",
        405: f"{request.path} does not take {request.method}.",
        413: f"The body is larger than {_MOST_BYTES} bytes.",
    }
    response = _error(error.status, messages.get(error.status, error.reason))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response

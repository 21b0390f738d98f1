"""A simulated worker's HTTP: routes, statuses and headers as `vllm serve` or SGLang have them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, cast

import msgspec
from aiohttp import HttpVersion11, web

from engines.sim.answering import DONE, Answer, StreamedAnswer
from engines.sim.connectors.base import Leg
from engines.sim.faults import REFUSALS, Fault, read_fault
from engines.sim.flavour import Heading
from engines.sim.generation import Asked, Refused, check_together, read_generation, read_tokenize
from engines.sim.place import Place
from engines.sim.rank import Rank
from engines.sim.request import Request, make_request
from engines.sim.worker import Worker

MAX_BODY_BYTES = 256 * 2**20
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RANK_HEADER = "X-data-parallel-rank"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(worker: Worker) -> web.Application:
    """The worker's whole HTTP surface. Run it with handler cancellation, so that a disconnect aborts its request."""
    server = _Server(worker)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[server.shape_errors])
    post, get = app.router.add_post, partial(app.router.add_get, allow_head=False)
    post("/v1/completions", server.completions)
    post("/v1/chat/completions", server.chat)
    get("/v1/models", server.models)
    get("/health", server.health)
    app.router.add_get("/metrics", server.metrics)
    for path in worker.flavour.pages(0, 0.0):
        get(path, server.page)
    for path in worker.flavour.tokenize_paths:
        post(path, server.tokenize)
    for method in worker.flavour.reset_methods:
        app.router.add_route(method, worker.flavour.reset_path, server.reset_cache)
    post("/sim/fault", server.arm_fault)
    get("/sim/faults", server.faults)
    post("/sim/faults/clear", server.clear_faults)
    get("/sim/cache", server.cache)
    get("/sim/transfers", server.transfers)
    return app


def make_bootstrap_app(place: Place) -> web.Application:
    """Where Mooncake's decode workers find out how to reach a prefill worker; SGLang's says nothing here."""

    async def query(_: web.Request) -> web.Response:
        return _json(place.bootstrap_page())

    app = web.Application()
    app.router.add_get("/query", query)
    return app


class _Server:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def shape_errors(self) -> Any:
        """Middleware: a refusal becomes the flavour's error object; of what is not served, both say it as FastAPI does.
        A client that has left gets nothing."""

        @web.middleware
        async def middleware(http: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(http)
            except Refused as refused:
                return _json(self._worker.flavour.error(refused), refused.status)
            except web.HTTPClientError as error:
                allowed = {name: value for name, value in error.headers.items() if name == "Allow"}
                return _json({"detail": error.reason}, error.status, allowed)
            except ConnectionError:  # aiohttp would log it as an error of the handler's
                return web.Response()

        return middleware

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, chat=False)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, chat=True)

    async def models(self, _: web.Request) -> web.Response:
        return _json(self._worker.flavour.models())

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._worker.flavour.metrics().encode(), headers={"Content-Type": METRICS_TYPE})

    async def page(self, http: web.Request) -> web.Response:
        return _json(self._worker.flavour.pages(self._worker.in_flight, time.time())[http.path])

    async def tokenize(self, http: web.Request) -> web.Response:
        tokens = read_tokenize(await http.read(), self._worker.settings, self._worker.tokenizer)
        return _json(self._worker.flavour.tokenized(tokens))

    async def reset_cache(self, _: web.Request) -> web.Response:
        done = self._worker.reset_cache()
        said = self._worker.flavour.cleared(done)
        return web.Response(text=said, status=200 if done else 400) if isinstance(said, str) else _json(said)

    async def arm_fault(self, http: web.Request) -> web.Response:
        try:
            fault = read_fault(await http.read())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(400, str(error)) from error
        if fault.kind == "slow":
            self._worker.slow_down(fault.factor)
        else:
            self._worker.faults.arm(fault)
        return _json(msgspec.to_builtins(fault))

    async def faults(self, _: web.Request) -> web.Response:
        faults = self._worker.faults
        return _json({"armed": faults.armed, "struck": faults.struck})

    async def cache(self, _: web.Request) -> web.Response:
        """By rank; sequence hashes as the router's index knows them."""
        return _json({"ranks": [rank.scheduler.cache.hashes for rank in self._worker.ranks]})

    async def transfers(self, _: web.Request) -> web.Response:
        """Of the whole fleet."""
        return _json(self._worker.fleet.state())

    async def clear_faults(self, _: web.Request) -> web.Response:
        self._worker.faults.clear()
        self._worker.slow_down(1.0)
        return _json({})

    async def _generate(self, http: web.Request, chat: bool) -> web.StreamResponse:
        worker = self._worker
        fault = worker.faults.take()
        body = await http.read()
        worker.in_flight += 1
        try:
            if fault is not None:
                await _strike(fault, http)
            asked = read_generation(body, chat, worker.settings, worker.tokenizer)
            rank = worker.rank(self._asked_rank(http, asked))
            leg = worker.connector.leg(asked, http.headers.get("X-Request-Id"), worker.ranks.index(rank))
            check_together(asked, worker.settings.flavour)  # only now, so that a connector writes it down
            return await self._answer(http, asked, rank, leg, fault.after if fault else None)
        finally:
            worker.in_flight -= 1

    async def _answer(
        self, http: web.Request, asked: Asked, rank: Rank, leg: Leg, break_after: int | None
    ) -> web.StreamResponse:
        flavour = self._worker.flavour
        answer_id = flavour.answer_id(asked.chat, http.headers.get("X-Request-Id") or self._worker.new_request_id())
        heading = Heading(answer_id, int(time.time()), asked.model, asked.chat)
        parts = (heading, asked, self._requests(asked, leg), flavour, self._worker.answers, _transport(http), leg)
        if asked.stream:
            chunked = http.version >= HttpVersion11
            return await self._stream(http, StreamedAnswer(*parts, break_after, chunked=chunked), rank)
        answer = Answer(*parts, break_after)
        with _running(answer, rank):
            await answer.done
        return web.Response(body=answer.whole(), content_type="application/json")

    async def _stream(self, http: web.Request, answer: StreamedAnswer, rank: Rank) -> web.StreamResponse:
        response = await _begin_stream(http) if answer.flavour.head_at_once else None
        try:
            with _running(answer, rank):
                if response is None:
                    async with answer.held():
                        response = await _begin_stream(http)
                await answer.done
        except Refused as refused:  # both engines tell it in the stream
            response = response or await _begin_stream(http)
            event = msgspec.json.encode(answer.flavour.streamed_error(refused))
            await response.write(b"data: %b\n\n%b" % (event, DONE))
        return response

    def _requests(self, asked: Asked, leg: Leg) -> list[Request]:
        return [
            # The worker's own id: a client may use one X-Request-Id twice at once.
            make_request(
                self._worker.new_request_id(),
                [*prompt] if choice else prompt,  # each grows by its answer
                leg.max_tokens or length,
                self._worker.settings.block_size,
                asked.namespace,
                remote=leg.remote,
                keep=leg.keep,
                answers=self._worker.answer_ids,
                choice=choice,
            )
            for prompt, length in zip(asked.prompts, asked.max_tokens, strict=True)
            for choice in range(asked.n)
        ]

    def _asked_rank(self, http: web.Request, asked: Asked) -> int | None:
        header = http.headers.get(RANK_HEADER)
        if header is None:
            return self._worker.connector.rank(asked) if asked.dp_rank is None else asked.dp_rank
        with suppress(ValueError):
            return int(header)
        raise Refused(400, f"{RANK_HEADER} must be an integer", RANK_HEADER)


async def _begin_stream(http: web.Request) -> web.StreamResponse:
    """In chunks; an HTTP/1.0 client does not know them, and reads until the connection ends."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if http.version < HttpVersion11:
        response.force_close()  # even where it asked for keep-alive
    await response.prepare(http)
    return response


@contextmanager
def _running(answer: Answer, rank: Rank) -> Iterator[None]:
    """Its requests; whatever ends the answer before their last token frees their blocks."""
    leg = answer.leg

    def submit() -> None:
        for request, sink in zip(answer.requests, answer.sinks(), strict=True):
            rank.submit(request, leg.sink(request, sink))

    try:
        leg.start(answer.requests, rank, submit, answer.fail)
        yield
    finally:
        for request in answer.requests:
            rank.abort(request.request_id)
        leg.close()


async def _strike(fault: Fault, http: web.Request) -> None:
    """Refuse, cut the connection, or never return; a break comes later."""
    if status := REFUSALS.get(fault.kind):
        raise Refused(status, "an armed fault")
    if fault.kind == "drop_before_first_byte":
        _transport(http).abort()
    if fault.kind != "break_after_tokens":
        await _until_disconnect()


def _transport(http: web.Request) -> asyncio.WriteTransport:
    """Raises ConnectionResetError when the client is gone."""
    if http.transport is None:
        raise ConnectionResetError
    return cast("asyncio.WriteTransport", http.transport)  # a stream transport, though aiohttp does not say so


async def _until_disconnect() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")

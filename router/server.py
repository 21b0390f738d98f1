"""Which path is answered how.

Inference is routed, the rest of /v1 is passed on, and `own_pages` answers what is about the router itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Final

from engines.description import EngineKind
from router.arms import Arms
from router.context import RouterContext
from router.forms import form_model
from router.http.front import Connection
from router.http.messages import Request, RequestHead, Response, first, new_request_id, with_request_id
from router.http.origins import Origins
from router.migration.migrating import Migration, Migrations
from router.openai.bodies import PassedOn
from router.openai.engine_paths import GENERATE, MODEL_UNREAD, PASSED_ON, RANKS_IN_BODY
from router.openai.errors import BadRequest, error_response, typed_for
from router.openai.inference import (
    ENDPOINTS,
    INPUTS,
    RENDERED,
    Inference,
    asks_for_stream,
    inputs,
    names_adapter,
    parse_inference,
    read_passed_on,
    rendered_fields,
)
from router.openai.kept_responses import KeptResponses, read_kept
from router.own_pages import ONE_MODEL, OwnPages, no_such_model
from router.prompts import Prompts
from router.proxy.exchange import Exchange
from router.routing import RequestRouting
from router.routing_options import RoutingOptions
from router.security.guard import Guard, Tenant
from router.security.passed_on import check_passed_on, content_kind
from router.store.shared_store import SharedStore
from router.tracing.spans import Tracing
from router.workers.worker import Worker

logger = logging.getLogger(__name__)

_NAMES: Final[Mapping[EngineKind, str]] = {"vllm": "vLLM", "sglang": "SGLang"}
_NO_SUCH_PATH = (
    "There is no such path here: the router serves /v1/…, some of the engines' own paths, /health, /ready and /metrics."
)
_MOST_PRIORITY = 2**31
"""Either way: the queue keeps priorities as 64-bit numbers."""


class Server:
    """Answers requests on connections. `prompts` None: the mode does not look at prompts."""

    def __init__(
        self,
        context: RouterContext,
        prompts: Prompts | None,
        own_pages: OwnPages,
        *,
        direct: bool,
        arms: Arms | None,
        store: SharedStore | None,
        guard: Guard | None,
        tenant_header: bytes | None,
        migrations: Migrations | None,
        responses: KeptResponses,
        commented: bool = False,
        origins: Origins | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`direct`: each request names its worker. `guard`: if requests need an API key. `tenant_header`: the header,
        in lower case, that names a request's tenant if no key does. `commented`: see `Exchange`. `origins`: see
        `RequestReader`."""
        self._context = context
        self._prompts = prompts
        self._own = own_pages
        self._pages = own_pages.by_path
        self._own_paths = frozenset((*self._pages, *ENDPOINTS, *GENERATE))
        self._direct = direct
        self._arms = arms
        self._store = store
        self._guard = guard
        self._tenant_header = tenant_header
        self._migrations = migrations
        self._responses = responses
        self._commented = commented
        self._origins = origins
        self._tracing = tracing
        self.under_way: set[Exchange] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, request: Request, connection: Connection) -> Exchange | None:
        """Implements `front.Serve`."""
        head = request.head
        if self._origins and self._origins.is_preflight(head.method, head.headers):
            connection.respond(self._origins.preflight(head.headers))
            return None
        if request.body.startswith(BOM_UTF8) and content_kind(request.head.headers) != "other":
            request = Request(head, request.body.removeprefix(BOM_UTF8))  # engines take it, as RFC 8259 allows
        try:
            return self._serve(request, connection)
        except BadRequest as error:
            refusal = error.response
        except Exception:  # whatever it is, the client gets an answer
            logger.exception("A request could not be served")
            refusal = error_response(500, "The router could not read the request.")
        connection.respond(with_request_id(typed_for(request.head.path, refusal), request.head.request_id))
        return None

    def _serve(self, request: Request, connection: Connection) -> Exchange | None:
        tenant = None if self._guard is None else self._guard.enter(request.head)
        path, method = request.head.path, request.head.method
        page = self._pages.get(path) or (self._own.model if path.startswith(ONE_MODEL) else None)
        if page:
            if method not in {b"GET", b"HEAD"}:
                raise _wrong_method("GET, HEAD")
            shown = page(request.head, tenant)
            if isinstance(shown, Response):
                connection.respond(shown)
            else:
                self._run_in_background(_show(shown, connection))
            return None
        endpoint = ENDPOINTS.get(path)
        if endpoint:
            if method != b"POST":
                raise _wrong_method("POST")
            return self._infer(request, connection, parse_inference(endpoint, request.body), tenant)
        generate = GENERATE.get(path)
        if generate:
            if method != b"POST":
                raise _wrong_method("POST")
            return self._infer(request, connection, generate(request.body), tenant)
        plain = path.rstrip(b"/")  # what ends with a slash is refused below, for that
        if not path.startswith(b"/v1/") and plain not in PASSED_ON and plain not in self._own_paths:
            raise BadRequest(404, _NO_SUCH_PATH)
        return self._pass_on(request, connection, tenant)

    def _infer(self, request: Request, connection: Connection, inference: Inference, tenant: Tenant | None) -> Exchange:
        self._check_model(inference.model, tenant)
        pinned = self._pinned(request)
        if inference.model is None and pinned is None:
            self._check_one_model()
        if inference.engine:
            self._check_engine(request, pinned, inference.model, inference.engine)
        _check_adapter(request.body, tenant)
        # vLLM's own form has other fields than those that connectors set.
        body = None if inference.engine == "vllm" else request.body
        options = self._options(request, pinned, tenant, inference.streamed, body)
        if inference.engine or inference.recomputed:
            options.engine, options.name_rank = inference.engine, RANKS_IN_BODY.get(request.head.path)
            options.recomputed, options.uncached = inference.recomputed, inference.uncached
        if self._arms and pinned is None:  # one that names its worker is no test of a policy
            options.arm = self._arms.assign(request.head)
        if self._migrations and inference.streamed and pinned is None and _may_move(request, inference):
            options.migration = Migration(self._migrations, inference)
        routing = RequestRouting(self._context, inference.model, options)
        pending = self._prompts.prepare(inference, routing) if self._prompts else None
        if self._store and self._prompts and not inference.uncached:
            pending = self._look_up(self._store, pending, routing, inference)
        exchange = self._exchange(request, connection, routing, tenant, options.migration)
        if pending is None:
            exchange.start()
        else:
            self._start_later(exchange, pending)
        return exchange

    async def _look_up(
        self, store: SharedStore, pending: Awaitable[None] | None, routing: RequestRouting, inference: Inference
    ) -> None:
        if pending:
            await pending
        routing.stored_tokens = await store.leading_tokens(routing.prompt, inference.model)

    def _start_later(self, exchange: Exchange, pending: Awaitable[None]) -> None:
        """The prompt's tokens must first be asked for; the exchange starts then, unless its client has gone."""

        async def wait() -> None:
            try:
                await pending
            except BadRequest as error:
                exchange.answer(error.response)
            except Exception:  # whatever it is, the client gets an answer
                logger.exception("A prompt could not be prepared")
                exchange.answer(error_response(500, "The router could not read the prompt."))
            else:
                exchange.start()

        self._run_in_background(wait())

    def _run_in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pass_on(self, request: Request, connection: Connection, tenant: Tenant | None) -> Exchange:
        check_passed_on(request.head, self._own_paths)
        said = _read(request, tenant)
        model = said.model or form_model(request.head.headers, request.body)
        if request.head.path in MODEL_UNREAD:
            self._check_base(model)
        fields = rendered_fields(request.head, request.body) if self._prompts else {}
        options = self._options(request, self._pinned(request), tenant, asks_for_stream(request.head, said))
        served = self._served(model, tenant)
        routing = RequestRouting(self._context, served, options)
        if self._prompts:
            self._prompts.check(served, inputs(request.head.path, request.body))
        if self._prompts and fields:
            self._prompts.guess(routing, model, fields, RENDERED[request.head.path])
        kept = read_kept(request.head, said)
        if model is None and _needs_model(request.head) and not (kept.named or routing.pinned):
            self._check_one_model()
        note = self._responses.note if kept.keeps else None
        exchange = self._exchange(request, connection, routing, tenant, on_first_bytes=note)
        if kept.named and not routing.pinned:
            self._start_later(exchange, self._to_keeper(kept.named, routing, exchange))
        else:
            exchange.start()
        return exchange

    async def _to_keeper(self, named: str, routing: RequestRouting, exchange: Exchange) -> None:
        """Pin the request to the worker that keeps the answer `named`. If none does, any engine may say so."""
        keeper = await self._responses.keeper(named, lambda: exchange in self.under_way)
        if keeper:
            routing.pin(keeper)

    def _exchange(
        self,
        request: Request,
        connection: Connection,
        routing: RequestRouting,
        tenant: Tenant | None,
        migration: Migration | None = None,
        on_first_bytes: Callable[[Worker, bytes], None] | None = None,
    ) -> Exchange:
        if self._tracing:
            routing.spans = self._tracing.begin(request.head, routing.model, routing.request_id)
        if tenant is not None:
            tenant.begin()
        context = self._context
        context.metrics.tallies.in_flight += 1
        context.retries.request()
        return Exchange(
            request,
            routing.request_id,
            connection,
            routing,
            context.clock,
            self.under_way,
            routing.streamed,
            migration,
            on_first_bytes,
            self._commented,
        )

    def _check_model(self, model: str | None, tenant: Tenant | None) -> None:
        if tenant is not None:
            tenant.check_model(model)
        fleet = self._context.fleet
        if model is not None and not fleet.may_serve(model):
            raise no_such_model(fleet, model, tenant)

    def _check_one_model(self) -> None:
        """A request names no model. Raises BadRequest if it would get the answer of whichever happens to be chosen."""
        if not self._context.fleet.has_one_model:
            text = "The request names no model, and several are served here: name one that /v1/models lists."
            raise BadRequest(400, text, param="model")

    def _check_engine(self, request: Request, pinned: Worker | None, model: str | None, engine: EngineKind) -> None:
        """Raises BadRequest if none of the workers that could get the request can run that engine."""
        fleet = self._context.fleet
        others = fleet.other_engines(engine)
        path = f"{request.head.path.decode('latin-1')} is a path of {_NAMES[engine]}"
        if pinned and pinned.id in others:
            raise BadRequest(400, f"{path}, which worker {pinned.id} does not run.")
        if fleet.workers and len(others) == len(fleet.workers):
            raise BadRequest(404, f"{path}, and no worker runs it.")
        if others and all(worker.id in others for worker in fleet.workers.values() if worker.serves(model)):
            raise BadRequest(404, f"{path}, and no worker that serves {model!r} runs it.")
        if engine == "sglang":
            self._check_base(model)

    def _check_base(self, model: str | None) -> None:
        """SGLang passes over the model on its own paths: it would answer for the base model, whatever adapter is named,
        and whether the client's key is for it or not. Raises BadRequest."""
        if self._context.fleet.names_adapter(model, "sglang"):
            text = "SGLang takes no adapter as the model on this path: name the base model, and it in 'lora_path'."
            raise BadRequest(400, text, param="model")

    def _served(self, model: str | None, tenant: Tenant | None) -> str | None:
        """The model to choose workers by for a request that is passed on; None: any may judge the name. Engines that do
        not look at it would answer with the model they have, which is right only where there is no other, and for a
        key that may use any."""
        fleet = self._context.fleet
        if model is None or fleet.knows(model):
            return model
        if fleet.has_one_model and (tenant is None or tenant.key.models is None):
            return None
        self._check_model(model, tenant)
        return model

    def _options(
        self,
        request: Request,
        pinned: Worker | None,
        tenant: Tenant | None,
        streamed: bool = False,
        body: bytes | None = None,
    ) -> RoutingOptions:
        """`pinned`: the worker that it names. `body`: of a request that may be served in two parts."""
        head, options = request.head, RoutingOptions()
        options.pinned, options.streamed, options.body = pinned, streamed, body
        options.ttft_slo, options.priority = _read_slo(head.ttft_slo), _read_priority(head.priority)
        options.request_id = head.request_id or new_request_id()
        if tenant is not None:
            options.tenant, options.ended = tenant.name, tenant.end
        elif self._tenant_header is not None:
            options.tenant = (first(head.headers, self._tenant_header) or b"").decode("latin-1")
        return options

    def _pinned(self, request: Request) -> Worker | None:
        named = request.head.target_worker
        if named is None:
            if self._direct:
                raise BadRequest(400, "In direct mode a request names its worker in the header X-Router-Target-Worker.")
            return None
        workers = self._context.fleet.workers
        name = named.decode("latin-1")
        for worker in workers.values():
            if name == worker.id or name.rstrip("/") == worker.spec.url:
                return worker
        shown = self._guard is None or self._guard.shows_workers(request.head)
        these = f"; those here: {', '.join(sorted(workers))}" if shown else ""
        raise BadRequest(400, f"There is no worker {name!r}{these}.")


async def _show(page: Coroutine[None, None, Response], connection: Connection) -> None:
    try:
        shown = await page
    except Exception:  # whatever it is, the client gets an answer
        logger.exception("A page could not be made")
        shown = error_response(500, "The router could not make this page; its log says why.")
    connection.respond(shown)


def _may_move(request: Request, inference: Inference) -> bool:
    """Whether another worker may continue the answer: clients of HTTP/1.0 get it as it is."""
    return inference.engine is None and not request.head.http_1_0


def _needs_model(head: RequestHead) -> bool:
    """Whether a request that is passed on is for a model. Others name what an engine keeps, or are unknown."""
    return head.method == b"POST" and (head.path in RENDERED or head.path in INPUTS or head.path in PASSED_ON)


def _read(request: Request, tenant: Tenant | None) -> PassedOn:
    """What a request says that is passed on. Raises BadRequest if it is not for the tenant to say."""
    kind = content_kind(request.head.headers)
    said = read_passed_on(request.body, may_be_other=kind == "other") if request.body else PassedOn()
    if tenant is not None:
        tenant.check_model(said.model if kind == "json" else None)
        _check_adapter(request.body, tenant)
    return said


def _check_adapter(body: bytes, tenant: Tenant | None) -> None:
    """A key for some models only may not name an adapter beside the model."""
    if tenant is not None and tenant.key.models is not None and names_adapter(body):
        text = "Your key is for some models only: name an adapter as the model, not in the field 'lora_path'."
        raise BadRequest(403, text, param="lora_path")


def _wrong_method(allowed: str) -> BadRequest:
    return BadRequest(405, f"This path takes {allowed} only.", header=(b"allow", allowed.encode()))


def _read_slo(given: bytes | None) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(400, "The header X-Router-TTFT-SLO must be a number of seconds above 0.")
    return seconds


def _read_priority(given: bytes | None) -> int:
    if given is None:
        return 0
    try:
        priority = int(given)
    except ValueError:
        priority = _MOST_PRIORITY + 1
    if abs(priority) > _MOST_PRIORITY:
        between = f"from {-_MOST_PRIORITY} to {_MOST_PRIORITY}"
        raise BadRequest(400, f"The header X-Router-Priority must be a whole number {between}.")
    return priority

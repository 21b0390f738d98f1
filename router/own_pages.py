"""The router's own pages: /health, /ready, /metrics, the models that it serves, and what is hot in the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeAlias
from urllib.parse import unquote_to_bytes

import msgspec

from engines.description import Model
from router.context import RouterContext
from router.http.messages import RequestHead, Response
from router.metrics.registry import merge
from router.openai.errors import BadRequest
from router.refusals import no_worker
from router.security.guard import Guard, Tenant
from router.store.hot_page import PATH as HOT
from router.store.hot_page import hot_page
from router.store.shared_store import SharedStore
from router.workers.fleet import Fleet
from router.workers.status import worker_statuses
from router.workers.worker import Worker

ONE_MODEL = b"/v1/models/"
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"

Page: TypeAlias = Callable[[RequestHead, Tenant | None], Response | Coroutine[None, None, Response]]
"""A coroutine where the answer takes a while, in which other work gets its turns."""


class OwnPages:
    def __init__(
        self,
        context: RouterContext,
        started: int,
        *,
        counts_prompts: bool,
        metrics_of_all: Callable[[], Awaitable[dict[int, bytes]]] | None,
        store: SharedStore | None,
        guard: Guard | None,
    ) -> None:
        """`started`: seconds of the wall clock. `counts_prompts`: prompts are sent to workers that they fit.
        `metrics_of_all`: of all processes that share the port, if there are several. `guard`: if pages need an API
        key."""
        self._context = context
        self._started = started
        self._counts_prompts = counts_prompts
        self._metrics_of_all = metrics_of_all
        self._store = store
        self._guard = guard
        self.by_path: dict[bytes, Page] = {
            b"/health": lambda *_: Response(200, b'{"status":"ok"}'),
            b"/ready": self._ready,
            b"/metrics": lambda *_: self._metrics(),
            b"/v1/models": self._models,
        }
        if store:
            self.by_path[HOT.encode()] = lambda head, _: self._hot(store, head)

    async def _metrics(self) -> Response:
        of_all = self._metrics_of_all
        return Response(200, await merge(await of_all()) if of_all else await self._context.metrics.page(), _TEXT)

    def _models(self, _: RequestHead, tenant: Tenant | None) -> Response:
        served = self._context.fleet.models().values()
        models = [self._shown(worker, model) for worker, model in served if _may_use(tenant, model.id)]
        return Response(200, msgspec.json.encode({"object": "list", "data": models}))

    def model(self, head: RequestHead, tenant: Tenant | None) -> Response:
        """Not asked of a worker: vLLM has no such path, and not every worker knows every model."""
        name = unquote_to_bytes(head.path.removeprefix(ONE_MODEL)).decode(errors="replace")
        if not name:  # engines redirect it to the list
            return self._models(head, tenant)
        if tenant is not None:
            tenant.check_model(name)
        fleet = self._context.fleet
        found = fleet.models().get(name)
        if found is None and fleet.may_serve(name):  # its workers are down, and clients do not ask again after a 404
            return no_worker(fleet, name, None, retried=False)
        if found is None:
            raise no_such_model(fleet, name, tenant)
        return Response(200, msgspec.json.encode(self._shown(*found)))

    def _shown(self, worker: Worker, model: Model) -> dict[str, object]:
        return {
            "id": model.id,
            "object": "model",
            "created": self._started,
            "owned_by": worker.engine,
            "root": model.root,
            "parent": model.parent,
            "max_model_len": self._context_length(model),
        }

    def _context_length(self, model: Model) -> int | None:
        """What fits every worker; or any, if prompts are counted, since they then go to workers that they fit."""
        base = self._context.fleet.base_model(model.id)
        if base is None:
            return model.max_model_len
        lengths = self._context.fleet.context_lengths(base.id)
        return (lengths.most if self._counts_prompts else None) or lengths.least or model.max_model_len

    def _ready(self, head: RequestHead, _: Tenant | None) -> Response | Coroutine[None, None, Response]:
        ready = bool(self._context.fleet.candidates(None))
        if self._guard is not None and not self._guard.shows_workers(head):
            return Response(200 if ready else 503, msgspec.json.encode({"ready": ready}))
        return self._ready_in_full(ready)

    async def _ready_in_full(self, ready: bool) -> Response:
        workers = [status for _, status in await worker_statuses(self._context)]
        body: dict[str, object] = {"ready": ready, "workers": workers}
        if self._store:
            body["store"] = {"up": self._store.healthy, "problems": self._store.problems}
        return Response(200 if ready else 503, msgspec.json.encode(body))

    def _hot(self, store: SharedStore, head: RequestHead) -> Response:
        if self._guard:  # it tells of all tenants' prompts
            self._guard.check_admin(head.headers)
        return Response(200, msgspec.json.encode(hot_page(store, self._context.indexer, self._context.clock())))


def no_such_model(fleet: Fleet, model: str, tenant: Tenant | None) -> BadRequest:
    known = ", ".join(sorted(name for name in fleet.names() if _may_use(tenant, name))) or "none"
    text = f"The model {model!r} does not exist here; these do: {known}."
    return BadRequest(404, text, code="model_not_found", param="model")


def _may_use(tenant: Tenant | None, name: str) -> bool:
    return tenant is None or tenant.may_use(name)

"""How much is taken on at a time, and how long anything may wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from router.settings.options import Above0, about, memory, read_header, read_none, seconds, seconds_or_none

AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]


def _most(description: str) -> msgspec.Meta:
    return about("Limits", description, "NUMBER", takes="a whole number of at least 1, or none", read=read_none)


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_queue: Annotated[
        int,
        about(
            "Limits",
            "Most requests held in the router at a time; beyond that, requests of the tenant with the most held ones "
            "are refused with 429.",
            "NUMBER",
            ge=0,
        ),
    ] = 1024
    queue_timeout: Annotated[
        float, seconds("Limits", "How long a request is held in the router before it is answered with 408.")
    ] = 60.0
    max_concurrency: Annotated[
        AtLeast1 | None, _most("Most requests at all workers together; those beyond it are held in the router.")
    ] = None
    max_worker_concurrency: Annotated[
        AtLeast1 | None,
        _most("Most requests at each worker; a worker with that many gets no more until one of them ends."),
    ] = None
    wait_for_worker: Annotated[
        Above0 | None,
        seconds_or_none(
            "Limits",
            "How long a request for which no worker is up is held in the router before it is answered with 503. With "
            "none, it is answered at once.",
        ),
    ] = None
    max_connections: Annotated[
        int,
        about("Limits", "Most client connections; further ones are answered with 503 and closed.", "NUMBER", ge=1),
    ] = 16384
    max_buffered: Annotated[
        int,
        memory(
            "Limits",
            "Most bytes of large request bodies (above 64KiB) that each process holds at a time; requests beyond that "
            "are answered with 429, and one whose body alone is larger with 413.",
        ),
    ] = 1024**3
    client_timeout: Annotated[
        float,
        seconds(
            "Limits",
            "How long a client may take to send a request, once begun (else it gets 408), and how long it may read "
            "nothing of an answer that is there (else its connection is closed).",
        ),
    ] = 60.0
    keep_alive_timeout: Annotated[
        float, seconds("Limits", "How long a client's connection may stay open without a request.")
    ] = 75.0
    sse_keep_alive: Annotated[
        Above0 | None,
        seconds_or_none(
            "Limits",
            "How long a stream may be silent before its client is sent a comment, so that proxies in between do not "
            "give it up (docs/administration.md). No comments with none.",
        ),
    ] = None
    tenant_header: Annotated[
        str | None,
        about(
            "Limits",
            "Request header that names the tenant, if there are no --api-keys. While requests are held, tenants take "
            "turns.",
            "HEADER",
            takes="a header's name such as x-tenant, or none",
            read=read_header,
        ),
    ] = None

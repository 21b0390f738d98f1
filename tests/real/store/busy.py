"""Keeps one worker at work for as long as a test needs it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.real.eventually import eventually
from tests.real.fleet import Router
from tests.real.pd.requests import PATIENCE, long_to_write

from .members import Member

REQUESTS = 12


@contextmanager
def saturated(worker: Member, router: Router) -> Iterator[None]:
    """Requests that take a minute unless they are given up, which they are at the end of the block."""
    with ExitStack() as stack:
        for number in range(REQUESTS):
            body = long_to_write(f"saturates {worker.worker_id} {number}")
            assert stack.enter_context(pinned(router, worker, body)).status == 200
        eventually(worker.running, lambda running: running == REQUESTS)
        yield
    eventually(worker.running, lambda running: running == 0)


@contextmanager
def pinned(router: Router, worker: Member, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """A stream of which no more than the head is read."""
    address = urlsplit(router.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    headers = {"Content-Type": "application/json", "X-Router-Target-Worker": worker.worker_id}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        yield response
        response.close()
    finally:
        connection.close()

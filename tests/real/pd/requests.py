"""Requests whose answer tells whether the KV was right, and ways to ask them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from tests.real.asking import Answer, ask
from tests.real.fleet import Engine
from tests.real.prompts import Kind, ids, request

ANSWER_TOKENS = 16
LONGEST = 8192
PATIENCE = 60.0


def telling(kind: Kind, topic: str, *, stream: bool = False) -> dict[str, Any]:
    """The same each time; greedy, so that any engine with the same weights answers the same."""
    body = request(kind, topic, stream=stream, tail="the same")
    return body | {"max_tokens": ANSWER_TOKENS, "return_token_ids": True}


def long_to_read(topic: str) -> dict[str, Any]:
    return telling("ids", topic) | {"prompt": ids(topic, LONGEST - ANSWER_TOKENS)}


def long_to_write(topic: str) -> dict[str, Any]:
    """Takes a minute unless it is given up."""
    return telling("ids", topic, stream=True) | {"max_tokens": LONGEST - 1024}


def directly(engine: Engine, body: Mapping[str, Any]) -> Answer:
    return ask(engine.url + path_of(body), body)


def path_of(body: Mapping[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


@contextmanager
def client_that_leaves(url: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """Has asked; is gone at the end of the block, whatever came by then."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE)
    try:
        connection.request("POST", path_of(body), json.dumps(body), {"Content-Type": "application/json"})
        yield connection
    finally:
        if connection.sock:
            with suppress(OSError):
                connection.sock.shutdown(2)
        connection.close()

"""What the admin surface is sent: bodies and a query. Nothing is connected to: only the readers are asked."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from router.admin.openapi import document
from router.admin.shapes import Wrong, read_change, read_log_level, read_timeout, read_worker
from router.http.pool import parse_address
from router.openai.errors import error_response
from tests.fuzz.target import DEEP_JSON, JSON, Target, place

_STATUSES = {400, 422}


def _bodies(data: bytes) -> Hashable:
    """Wrong with a described status and a sentence that can be answered, and nothing else."""
    return tuple(_outcome(read, data) for read in (_worker, read_change, read_log_level, _timeout))


def _worker(data: bytes) -> object:
    spec = read_worker(data)
    assert parse_address(spec.url).host
    return spec


def _timeout(data: bytes) -> object:
    seconds = read_timeout({"timeout": data.decode("utf-8", "replace")}, 30.0)
    assert seconds >= 0
    return seconds


def _outcome(read: Callable[[bytes], object], data: bytes) -> Hashable:
    try:
        return type(read(data)).__name__
    except Wrong as error:
        wrong = error
    assert wrong.status in _STATUSES
    assert error_response(wrong.status, str(wrong)).body
    return place(wrong)


def _seeds() -> list[bytes]:
    """A worker with all that the description knows, and the other bodies."""
    keys = document()["components"]["schemas"]["NewWorker"]["properties"]
    full = dict.fromkeys(keys) | {"url": "http://h:1", "role": "auto", "store": True}
    bodies: list[object] = [
        {"url": "https://[::1]:8000/x", "name": "a", "block_size": 16, "role": "prefill", "connector": "nixl"},
        {
            "url": "http://h",
            "events": "tcp://h:1",
            "replay": "ipc://x",
            "bootstrap_port": 1,
            "host": "h",
            "store": False,
        },
        full,
        {"role": "both", "drain": True},
        {"level": "debug"},
    ]
    return [*map(JSON.encode, bodies), b"30", b"0.5"]


_WORDS = (
    *DEEP_JSON, b'"url":"http://h"', b'"url":"http://[::"', b":99999", b'"name":"\\u0000"', b'"drain":null',
    b'"role":""', b'"block_size":1.0', b'"store":"true"', b'"level":"info"', b"1e999", b"nan", b"inf", b"-1", b"\xff",
    b"null", b"{}", b"@", b"?", b"#", b"9" * 4400, b"/v1",
)  # fmt: skip

TARGETS = (Target("admin-bodies", _bodies, _seeds, _WORDS, JSON, share=50),)

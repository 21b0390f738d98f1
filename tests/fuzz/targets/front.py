"""The client's side: whatever bytes a client sends, cut anywhere."""

from __future__ import annotations

from collections.abc import Hashable

import h11

from router.http.front import MAX_PIPELINED
from router.http.messages import Request, Response, origin_form
from tests.fuzz.target import Target, coin, pieces
from tests.fuzz.targets.http_messages import WORDS, requests
from tests.router.http.test_front import Site
from tests.router.http.test_repeated import told, with_ids_alike

_STATUSES = {100, 200, 400, 413, 415, 431, 501}


def _connection(data: bytes) -> Hashable:
    """What comes in pieces is read as what comes whole."""
    slow = coin(data)
    whole, cut = _fed([data], slow), _fed(pieces(data), slow)
    assert list(map(told, whole.requests)) == list(map(told, cut.requests))
    written = _final(whole)
    assert written == _final(cut)
    for name in ("closed", "aborted", "eof", "reading"):
        assert getattr(whole.transport, name) == getattr(cut.transport, name), name
    assert whole.connection.closing == cut.connection.closing
    assert not whole.transport.written or whole.transport.status in _STATUSES
    return len(whole.requests), written[-80:-40], whole.transport.eof, whole.transport.closed


def _final(site: Site) -> bytes:
    """The answers, without the interim ones: whether these are needed depends on what has come already."""
    return with_ids_alike(site.transport.written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""))


def _fed(data: list[bytes], slow: bool) -> Site:
    """A connection after all of it, every request answered; `slow`: only after the last byte."""
    site = Site(slow)
    for piece in data:
        site.feed(piece)
        while site.connection._resting:
            site.connection._go_on()
    assert not slow or len(site.requests) <= 1
    assert len(site.connection._waiting) < MAX_PIPELINED or not site.transport.reading
    while site.connection._current:
        site.connection.respond(_OK)
    return site


def _beside_h11(data: bytes) -> Hashable:
    """Where another parser takes the first request too, it takes it for the same: nothing can be smuggled past us."""
    ours = _fed([data], slow=False).requests
    theirs = _first_of_h11(data)
    if not ours or theirs is None:
        return bool(ours), theirs is None
    assert (ours[0].head.method, ours[0].head.target, ours[0].body) == theirs
    return _shape(ours[0])


def _first_of_h11(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(data)
        request, body = connection.next_event(), b""
        while isinstance(event := connection.next_event(), h11.Data):
            body += event.data
    except (h11.RemoteProtocolError, RuntimeError):  # RuntimeError: asked for more behind the end
        return None
    if not isinstance(request, h11.Request) or not isinstance(event, h11.EndOfMessage):
        return None
    return request.method, origin_form(request.target), body  # h11 leaves a host before the path to its user


def _shape(request: Request) -> Hashable:
    return request.head.method, request.head.keep_alive, len(request.body) > 5, len(request.head.headers)


_OK = Response(200, b"ok")

TARGETS = (
    Target("front", _connection, requests, WORDS),
    Target("front-beside-h11", _beside_h11, requests, WORDS, share=40),
)

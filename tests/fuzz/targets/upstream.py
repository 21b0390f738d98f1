"""The worker's side: whatever bytes a worker answers, cut anywhere, and how they are passed on."""

from __future__ import annotations

from collections.abc import Hashable

from router.http.chunked import decode_chunks
from router.http.relay import relay_for
from tests.fuzz.target import Target, coin, pieces
from tests.fuzz.targets.http_messages import WORDS, answers
from tests.router.http.test_upstream import Client, Line


def _connection(data: bytes) -> Hashable:
    """What comes in pieces is passed on as what comes whole; where it makes no sense, at most as far."""
    head_only = coin(data) and coin(data, 1)
    whole, cut = _asked([data], head_only, coin(data, 2)), _asked(pieces(data), head_only, coin(data, 3))
    assert (whole.head, whole.end) == (cut.head, cut.end)
    if whole.end == "end":
        assert (whole.body, whole.chunks) == (cut.body, cut.chunks)
        assert _passed_on(whole) == _passed_on(cut)
    else:
        assert cut.body.startswith(whole.body) or whole.body.startswith(cut.body)
    assert len(whole.body) <= len(data)
    return whole.end, whole.head and whole.head[0][:4], min(whole.chunks, 5), min(len(whole.body), 50) // 10


def _passed_on(client: Client) -> bytes:
    """A body that ends with the connection is passed on in chunks, as it comes."""
    return decode_chunks(client.sent) if client.head and client.head[0].framing == "close" else client.sent


def _asked(data: list[bytes], head_only: bool, passing: bool) -> Client:
    """What came of the answer, after which the worker closes. The clients are told of its end, if there is one."""
    line = Line()
    client = line.ask(head_only, passing)
    for piece in data:
        if not line.transport.closed:
            line.feed(piece)
    line.connection.connection_lost(None)
    assert client.end
    assert line.gone == 1
    if client.relay and client.head:
        client.sent += client.relay.end() if client.end == "end" else client.relay.broken(b"data: broken\n\n") or b""
        if client.end == "end":
            old = relay_for(client.head[0], http_1_0=True)
            assert len(old.body(client.body, 0) + old.end()) <= len(client.body)
    return client


TARGETS = (Target("upstream", _connection, answers, WORDS),)

"""Bytes as engines send them."""

from __future__ import annotations

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Router-Worker: w1\r\n"
DONE = b"data: [DONE]\n\n"


def token(text: str = " a") -> bytes:
    return b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % text.encode()


def usage(prompt: int, cached: int | None, output: int) -> bytes:
    details = b"null" if cached is None else b'{"cached_tokens":%d}' % cached
    fields = b'"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":%s' % (prompt, output, details)
    return b'data: {"choices":[],"usage":{%s}}\n\n' % fields


def chunked(*pieces: bytes) -> bytes:
    """A whole response, each piece a chunk of its own."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def plain(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
